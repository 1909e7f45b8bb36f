"""Scoring answers against references, per kind of question."""

from collections import Counter
from dataclasses import dataclass

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Message
from llava_ds.data.sources import Sample
from llava_ds.infer.generate import Prompt


@dataclass(frozen=True)
class Question:
    """One question with its reference answer; kind groups the scores."""

    id: str
    kind: str
    prompt: Prompt
    reference: str


def questions_of(samples: list[Sample]) -> list[Question]:
    """Every answered turn of every sample, asked with the file's own earlier turns before it."""
    questions = []
    for sample in samples:
        for i, message in enumerate(sample.messages):
            if message.role == "gpt" and i > 0:
                before = sample.messages[:i]
                shown = sum(m.text.count(IMAGE_TOKEN) for m in before)
                prompt = Prompt(before, sample.images[:shown])
                questions.append(Question(sample.id, sample.kind or "all", prompt, message.text))
    if not questions:
        raise DataError("there is no question with an answer in the data")
    return questions


def without_image(question: Question) -> Question:
    """The same question with its pictures withheld: neither features nor marks remain."""
    messages = tuple(Message(m.role, m.text.replace(IMAGE_TOKEN, "").strip()) for m in question.prompt.messages)
    return Question(question.id, question.kind, Prompt(messages, ()), question.reference)


def is_correct(answer: str, reference: str) -> bool:
    """Exact match, whatever the case, outer spaces and a final full stop."""
    return _plain(answer) == _plain(reference)


def accuracy_by_kind(questions: list[Question], answers: list[str]) -> dict[str, tuple[int, int]]:
    """Per kind, and under "overall": (right answers, questions)."""
    asked, right = Counter(), Counter()
    for question, answer in zip(questions, answers, strict=True):
        for kind in (question.kind, "overall"):
            asked[kind] += 1
            right[kind] += is_correct(answer, question.reference)
    kinds = [*sorted(set(asked) - {"overall"}), "overall"]
    return {kind: (right[kind], asked[kind]) for kind in kinds}


def table(columns: dict[str, dict[str, tuple[int, int]]]) -> list[str]:
    """Lines of a table: a row per kind, a column of accuracies per run, and the number of questions."""
    first = next(iter(columns.values()))
    width = max(len(kind) for kind in first) + 2
    lines = [f"{'kind':{width}}{'questions':>10}" + "".join(f"{name:>18}" for name in columns)]
    for kind, (_, asked) in first.items():
        cells = "".join(f"{scores[kind][0] / scores[kind][1]:>18.3f}" for scores in columns.values())
        lines.append(f"{kind:{width}}{asked:>10,}{cells}")
    return lines


def _plain(text: str) -> str:
    return text.strip().rstrip(".").lower()
