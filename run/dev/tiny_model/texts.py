"""Training documents of the tiny Llama: scenes described in words, with captions and questions about them.

A document is a list of spans. Each is a piece of text that is tokenized separately, like LLaVA tokenizes the pieces
around an image. A description replaces the image: sentences, a listing, or a *patchwork*, one position per cell of a
6 x 6 grid in reading order, each holding a few weighted words. A patchwork is what a projector can write to an
image's positions, in the language model's own words; it uses no image.
"""

import dataclasses

from llava_ds.data.templates import V1_SYSTEM as SYSTEM
from llava_ds.tiny.questions import (
    CAPTION_REQUESTS,
    KINDS,
    RELATIONS,
    all_questions,
    caption,
    place_phrase,
    place_relation,
)
from llava_ds.tiny.scenes import PLACES

PATCHWORK_SIDE = 6  # two positions per cell of the 3 x 3 grid of places, in both directions
KIND_SHARES = (0.14, 0.2, 0.12, 0.12, 0.14, 0.28)  # shares of KINDS in a conversation: relations are learned last
STYLES = ("patchwork", "sentences", "listing")
NOTHING = ("nothing", "empty", "ground")


@dataclasses.dataclass(frozen=True)
class Span:
    """A piece of text and the weight of its tokens in the loss; or, with words, a patchwork without text."""

    text: str = ""
    weight: float = 0.0
    words: tuple = ()  # per position: a tuple of (word, weight)


def quiz_document(scene, rng, style, comparisons):
    """Return the spans of a description and of a list of the shortest possible questions about it.

    They have the look-ups and place comparisons of a conversation at a third of the tokens: the model learns them here
    first.
    """
    items = list((_comparisons if comparisons else _facts)(scene, rng).items())
    spans = describe(scene, rng, style)
    for i in rng.permutation(len(items)):
        key, answer = items[i]
        spans += [Span(f"{key}?"), Span(answer, 1.0)]
    return spans


def chat_document(scene, rng, style, num_turns, with_system):
    """Return the spans of a conversation in LLaVA's v1 format, with a description at the image's position."""
    spans = [Span((SYSTEM + " " if with_system else "") + "USER: ", 0.1), *describe(scene, rng, style)]
    for i, (question, answer) in enumerate(_talk(scene, rng, num_turns)):
        start = "\n" if i == 0 else "USER: "
        spans += [Span(f"{start}{question} ASSISTANT:", 0.05), Span(f"{answer}</s>", 1.0)]
    return spans


def _facts(scene, rng):
    """Return a dict such as {red circle: top left, bottom: nothing, circle: red top left, circles: two}."""
    facts = {}
    for place, name in enumerate(PLACES):
        facts[name] = next((f"{t.colour} {t.shape}" for t in scene.things if t.place == place), "nothing")
    for question in all_questions(scene, "position"):
        facts[question.form[1]] = question.answer
    for t in scene.things:
        if sum(other.shape == t.shape for other in scene.things) == 1:
            facts[t.shape] = f"{t.colour} {PLACES[t.place]}"
        if sum(other.colour == t.colour for other in scene.things) == 1:
            facts[t.colour] = f"{t.shape} {PLACES[t.place]}"
    for question in all_questions(scene, "count"):
        if question.answer == "one" and rng.random() < 0.7:
            continue  # most groups have one thing, so the others would hardly be learned
        facts[question.form[1]] = question.answer
    absent = [q.form[1] for q in all_questions(scene, "existence") if q.answer == "no"]
    for i in rng.permutation(len(absent))[:4]:
        facts[absent[i]] = "nothing"
    return facts


def _comparisons(scene, rng):
    """Return a dict such as {red circle to blue square: left above, red circle left of blue square: yes}.

    Answers in words for the position of one thing relative to another taught the model to compare places in under two
    hundred steps; plain yes and no had not in four hundred.
    """
    named = {q.form[1]: PLACES.index(q.answer) for q in all_questions(scene, "position")}
    pairs = [(a, b) for a in named.items() for b in named.items() if a != b]
    pairs = [pairs[i] for i in rng.permutation(len(pairs))[:6]]
    for first, second in rng.integers(0, len(PLACES), (6, 2)).tolist():
        pairs.append(((PLACES[first], first), (PLACES[second], second)))
    facts = {}
    for (name, place), (other_name, other) in pairs:
        holds = {relation: place_relation(relation, place, other) for relation in RELATIONS}
        if place != other:
            facts[f"{name} to {other_name}"] = " ".join(r.split()[0] for r in RELATIONS if holds[r])
        relation = RELATIONS[int(rng.integers(len(RELATIONS)))]
        if holds[relation] is not None:
            facts[f"{name} {relation} {other_name}"] = "yes" if holds[relation] else "no"
    return facts


def _talk(scene, rng, num_turns):
    talk = []
    for _ in range(num_turns):
        if rng.random() < 0.04:
            request = CAPTION_REQUESTS[int(rng.integers(len(CAPTION_REQUESTS) - 1))]
            talk.append((request, caption(scene, rng)))
            continue
        questions = all_questions(scene, str(rng.choice(KINDS, p=KIND_SHARES)))
        if questions:
            question = choose_by_answer(questions, rng)
            talk.append((question.text(rng), question.answer))
    return talk


def choose_by_answer(questions, rng):
    """Choose a question with every answer equally likely, because most existence questions have the answer "no"."""
    answers = sorted({q.answer for q in questions})
    wanted = answers[int(rng.integers(len(answers)))]
    questions = [q for q in questions if q.answer == wanted]
    return questions[int(rng.integers(len(questions)))]


def describe(scene, rng, style):
    """Return the spans of a description in one of STYLES."""
    if style == "sentences":
        return [Span(caption(scene, rng), 0.1)]
    if style == "listing":
        return [Span(_listing(scene, rng), 0.1)]
    return [Span(words=_patchwork(scene, rng))]


def _listing(scene, rng):
    parts = []
    for t in scene.things:
        place = PLACES[t.place] if rng.random() < 0.5 else place_phrase(t.place)
        parts.append(f"{t.colour} {t.shape} {place}")
    if rng.random() < 0.5:
        parts = [parts[i] for i in rng.permutation(len(parts))]
    return (", ", "; ", " ")[int(rng.integers(3))].join(parts)


def _patchwork(scene, rng):
    """Return one tuple of (word, weight) per position; the manner varies per document."""
    nothing = NOTHING[int(rng.integers(len(NOTHING)))]
    with_place = rng.random() < 0.5  # True if empty positions also name their place
    keep = (1.0, 1.0, 0.9)[int(rng.integers(3))]  # share of a thing's four positions that mention it
    single_words = rng.random() < 0.15  # one word per position, like text
    by_place = {t.place: t for t in scene.things}
    mentioned = set()
    for place in by_place:
        corners = [(dy, dx) for dy in (0, 1) for dx in (0, 1)]
        first = int(rng.integers(4))
        mentioned |= {(place, c) for i, c in enumerate(corners) if i == first or single_words or rng.random() < keep}
    positions = []
    for y in range(PATCHWORK_SIDE):
        for x in range(PATCHWORK_SIDE):
            place, corner = (y // 2) * 3 + x // 2, (y % 2, x % 2)
            place_words = PLACES[place].split()
            if (place, corner) in mentioned:
                thing = by_place[place]
                words = [thing.colour, thing.shape, *place_words]
                if single_words:
                    words = [words[(corner[0] * 2 + corner[1]) % len(words)]]
            else:
                words = [nothing, *place_words] if with_place else [nothing]
            weights = rng.uniform(0.4, 1.0, len(words))
            positions.append(tuple(zip(words, weights.tolist(), strict=True)))
    return tuple(positions)
