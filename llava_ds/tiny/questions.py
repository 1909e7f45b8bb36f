"""Generate captions of scenes, and questions with short answers whose frequencies are balanced.

Questions are balanced per *form* (the content of a question without its wording): in a data set, all answers to a form
are about equally frequent, so a model that sees no image can only guess.
"""

import collections
import functools
import itertools
import typing

from llava_ds.tiny.scenes import COLOURS, PLACES, SHAPES

NUMBERS = ("one", "two", "three", "four")  # up to scenes.MAX_THINGS
KINDS = ("existence", "count", "colour", "shape", "position", "relation")
TURN_SHARES = (0.12, 0.26, 0.14, 0.14, 0.16, 0.18)  # for KINDS; counts are often refused for balance
ANSWERS = {
    "existence": ("yes", "no"),
    "count": NUMBERS,
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "position": PLACES,
    "relation": ("yes", "no"),
}
RELATIONS = ("left of", "right of", "above", "below")

WORDINGS = {
    "existence": ("Is there a {0}?", "Can you see a {0}?"),
    "count": ("How many {0} are there?", "How many {0} can you see?"),
    "colour": ("What colour is the {0}?", "Which colour does the {0} have?"),
    "shape": ("What shape is the {0}?", "Which shape does the {0} have?"),
    "position": ("Where is the {0}?", "In which place is the {0}?"),
    "relation": ("Is the {0} {1} the {2}?", "Does the {0} lie {1} the {2}?"),
}

CAPTION_REQUESTS = ("Describe the picture.", "What is in the picture?", "Say what you see.", "")


class Question(typing.NamedTuple):
    """A question about a scene. form: its content without wording. given, revealed: sets of facts, as pairs (index of a
    thing, attribute)."""

    kind: str
    form: tuple
    answer: str
    given: frozenset  # facts stated in the question's text
    revealed: frozenset  # facts stated in the answer

    def text(self, rng):
        """Return the question in one of its wordings."""
        wordings = WORDINGS[self.kind]
        return wordings[int(rng.integers(len(wordings)))].format(*self.form[1:])


def caption(scene, rng):
    """Return one or two English sentences that name every thing and its place, in reading order."""
    named = [(f"a {t.colour} {t.shape}", place_phrase(t.place)) for t in scene.things]
    style, number = int(rng.integers(4)), len(named)
    start = ("", "there is ", "", f"{NUMBERS[number - 1]} {plural('shape', number)}: ")[style]
    text = start + join_words([f"{place} is {name}" if style == 2 else f"{name} {place}" for name, place in named])
    return text[0].upper() + text[1:] + "."


def place_phrase(place):
    return f"in the {PLACES[place]}" if PLACES[place] == "centre" else f"at the {PLACES[place]}"


def join_words(parts):
    """Return "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def plural(noun, number):
    if number == 1:
        return noun
    return noun + ("es" if noun == "cross" else "s")


def all_questions(scene, kind):
    """Return every question of a kind that has one right answer in this scene."""
    return _ASKERS[kind](scene.things)


def _ask_existence(things):
    told = collections.defaultdict(frozenset)
    for i, t in enumerate(things):
        told[t.colour, t.shape] |= {(i, "colour"), (i, "shape")}
    questions = []
    for name in itertools.product(COLOURS, SHAPES):
        answer = "yes" if name in told else "no"
        form = ("existence", " ".join(name))
        questions.append(Question("existence", form, answer, frozenset(), told.get(name, frozenset())))
    return questions


def _ask_count(things):
    groups = [("shapes", things)]
    groups += [(f"{colour} shapes", [t for t in things if t.colour == colour]) for colour in COLOURS]
    groups += [(plural(shape, 2), [t for t in things if t.shape == shape]) for shape in SHAPES]
    return [
        Question("count", ("count", name), NUMBERS[len(group) - 1], frozenset(), frozenset({("count", name)}))
        for name, group in groups
        if group
    ]


def _ask_attribute(things, kind, noun, other, wording):
    """Return questions for an attribute of each thing. kind: the attribute. A thing is named by its place, and by its
    `other` attribute if that is unique; noun, wording: how."""
    questions = []
    for i, t in enumerate(things):
        names = [(f"{noun} {place_phrase(t.place)}", "place")]
        if sum(getattr(each, other) == getattr(t, other) for each in things) == 1:
            names.append((wording.format(getattr(t, other)), other))
        for name, attribute in names:
            given, revealed = frozenset({(i, attribute)}), frozenset({(i, kind)})
            questions.append(Question(kind, (kind, name), getattr(t, kind), given, revealed))
    return questions


def _ask_position(things):
    return [
        Question("position", ("position", name), PLACES[things[i].place], given, frozenset({(i, "place")}))
        for i, name, given in _unique_names(things)
    ]


def _ask_relation(things):
    questions = []
    for (i, name, given), (j, other_name, other_given) in itertools.permutations(_unique_names(things), 2):
        revealed = frozenset({("relation", min(i, j), max(i, j))})
        for relation in RELATIONS:
            if (answer := place_relation(relation, things[i].place, things[j].place)) is not None:
                form = ("relation", name, relation, other_name)
                questions.append(Question("relation", form, "yes" if answer else "no", given | other_given, revealed))
    return questions


def _unique_names(things):
    """Return (index, name like "red circle", facts in the name) of each thing whose name is unique."""
    names = [f"{t.colour} {t.shape}" for t in things]
    return [
        (i, name, frozenset({(i, "colour"), (i, "shape")})) for i, name in enumerate(names) if names.count(name) == 1
    ]


def place_relation(relation, a, b):
    """Return True if place a has the relation to place b; None if both are in the same column (or row)."""
    difference = a % 3 - b % 3 if relation in ("left of", "right of") else a // 3 - b // 3
    if difference == 0:
        return None
    return (difference < 0) == (relation in ("left of", "above"))


_ASKERS = {
    "existence": _ask_existence,
    "count": _ask_count,
    "colour": functools.partial(_ask_attribute, kind="colour", noun="shape", other="shape", wording="{}"),
    "shape": functools.partial(_ask_attribute, kind="shape", noun="thing", other="colour", wording="{} thing"),
    "position": _ask_position,
    "relation": _ask_relation,
}


class Balance:
    """Counts the answers of chosen questions, and refuses questions that would make an answer too frequent.

    An answer may be at most form_slack occurrences ahead of the rarest answer to its form, and kind_slack ahead of the
    rarest of its kind. Relations are counted by their relation word, because a full form occurs only about once.
    """

    def __init__(self, form_slack, kind_slack):
        self.form_slack, self.kind_slack = form_slack, kind_slack
        self.per_form = collections.Counter()
        self.per_kind = collections.Counter()

    def choose(self, questions, rng):
        """Choose and count the question whose answer occurred least; None if all are refused. questions: of one
        kind."""
        if not questions:
            return None
        kind = questions[0].kind
        kind_limit = self.kind_slack + min([self.per_kind[kind, answer] for answer in ANSWERS[kind]])
        questions = [q for q in questions if self.per_kind[kind, q.answer] < kind_limit and self._allows(q)]
        if not questions:
            return None
        ties = rng.random(len(questions))
        best = min(range(len(questions)), key=lambda i: (*self._asked(questions[i]), ties[i]))
        question = questions[best]
        self.per_form[self._key(question), question.answer] += 1
        self.per_kind[question.kind, question.answer] += 1
        return question

    def _key(self, question):
        return (question.kind, question.form[2]) if question.kind == "relation" else question.form

    def _allows(self, question):
        key = self._key(question)
        rarest = min([self.per_form[key, answer] for answer in ANSWERS[question.kind]])
        return self.per_form[key, question.answer] < self.form_slack + rarest

    def _asked(self, question):
        return self.per_kind[question.kind, question.answer], self.per_form[self._key(question), question.answer]


def conversation(scene, num_turns, balance, rng):
    """Return up to num_turns Questions about a scene. Earlier questions and answers never give an answer away."""
    possible = {kind: all_questions(scene, kind) for kind in KINDS}
    known, asked, turns = set(), set(), []
    for _ in range(3 * num_turns):
        if len(turns) == num_turns:
            break
        kind = str(rng.choice(KINDS, p=TURN_SHARES))
        fresh = [q for q in possible[kind] if q.form not in asked and not (q.revealed and q.revealed <= known)]
        question = balance.choose(fresh, rng)
        if question is not None:
            turns.append(question)
            asked.add(question.form)
            known |= question.given | question.revealed
    return turns
