# U scored units (questions; for MMBench, all rounds of a question), C columns of figures per unit
"""Score answers by the rules of each benchmark."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llava_ds.constants import DataError
from llava_ds.extensions.benchmarks.answer_rules import (
    BOX_UNITS,
    anls,
    box_iou,
    contains_text,
    first_character,
    first_yes_or_no,
    leads_with_letter,
    letter_alone,
    mathvista_extraction,
    mathvista_match,
    mmmu_letter,
    mmmu_open_match,
    named_box,
    relaxed_match,
)
from llava_ds.extensions.benchmarks.captions import caption_words, cider, rouge_l
from llava_ds.extensions.benchmarks.normalise import evalai_answer, plain_answer, vqa_answer, vqa_punctuation
from llava_ds.extensions.benchmarks.option_letters import LETTERS, matched_letter, named_letter, says_yes
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.files.python_function import function_of_file

LEAST_IOU = 0.5  # minimum IoU of a correct box
LEAST_REFERENCES = 4  # minimum for VQA accuracy: with fewer answers, the full score is impossible

Figures = Callable[[np.ndarray], np.ndarray]  # (..., C) means over units -> (...)


@dataclass(frozen=True)
class Scored:
    """The scores of one evaluation. The first metric is the benchmark's main score, the mean of the first column.

    columns (U, C): figures of each unit; kinds: score groups of each unit; metrics: functions of the columns' means;
    per_question: the main score of each question's answer.
    """

    columns: np.ndarray
    kinds: list[tuple[str, ...]]
    metrics: dict[str, Figures]
    per_question: np.ndarray


def _mean(column: int) -> Figures:
    return lambda means: means[..., column]


def _per_question(name: str, scores: list[float], questions: list[Question]) -> Scored:
    columns = np.array(scores, dtype=np.float64)[:, None]
    return Scored(columns, [question.kinds for question in questions], {name: _mean(0)}, columns[:, 0])


def exact_match(questions: list[Question], answers: list[str]) -> Scored:
    """Score answers that equal the reference except for case, surrounding spaces and a full stop."""
    right = [plain_answer(a) == plain_answer(q.reference) for q, a in zip(questions, answers, strict=True)]
    return _per_question("accuracy", right, questions)


def preferred(questions: list[Question], answers: list[str]) -> Scored:
    """Return the share of pairs in which the chosen answer (the reference) was preferred."""
    return _per_question("accuracy", [a == q.reference for q, a in zip(questions, answers, strict=True)], questions)


def gqa_accuracy(questions: list[Question], answers: list[str]) -> Scored:
    """Compare answers with references exactly, after the normalisation with which LLaVA submits answers to GQA."""
    right = [a.rstrip(".").lower() == q.reference for q, a in zip(questions, answers, strict=True)]
    return _per_question("accuracy", right, questions)


def vqa_accuracy(questions: list[Question], answers: list[str]) -> Scored:
    """Compute VQA accuracy. reference: the annotators' answers; their punctuation is removed only if they differ."""

    def score(answer: str, people: list[str]) -> float:
        spelled = [vqa_punctuation(each) for each in people] if len(set(people)) > 1 else people
        return _leave_one_out(vqa_answer(answer), spelled)

    return _per_question(
        "accuracy", [score(a, q.reference) for q, a in zip(questions, answers, strict=True)], questions
    )


def textvqa_accuracy(questions: list[Question], answers: list[str]) -> Scored:
    """Compute TextVQA's accuracy. reference: the annotators' answers, normalised by EvalAI's rules like the model's."""
    scores = [
        _leave_one_out(evalai_answer(a), [evalai_answer(each) for each in q.reference])
        for q, a in zip(questions, answers, strict=True)
    ]
    return _per_question("accuracy", scores, questions)


def _leave_one_out(answer: str, people: list[str]) -> float:
    """Return the mean over annotators of min(1, number of other annotators who gave this answer / 3).

    Source: VQA (arXiv 1505.00468), section 3.2, as its evaluation code averages it.
    """
    same = people.count(answer)
    return sum(min(1, float(same - (each == answer)) / 3) for each in people) / len(people)


def yes_no(questions: list[Question], answers: list[str]) -> Scored:
    """Score yes-or-no answers. reference: "yes" or "no". As in POPE, yes is the positive class."""
    said = np.array([says_yes(answer) for answer in answers], dtype=bool)
    true = np.array([question.reference == "yes" for question in questions], dtype=bool)
    columns = np.stack([said == true, said & true, said, true], axis=1).astype(np.float64)
    return Scored(
        columns,
        [question.kinds for question in questions],
        {
            "accuracy": _mean(0),
            "precision": lambda means: _ratio(means[..., 1], means[..., 2]),
            "recall": lambda means: _ratio(means[..., 1], means[..., 3]),
            "f1": lambda means: _ratio(2 * means[..., 1], means[..., 2] + means[..., 3]),
            "yes_ratio": _mean(2),
        },
        columns[:, 0],
    )


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, or 0 where whole is 0, for example if no answer or label is yes."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def multiple_choice(questions: list[Question], answers: list[str]) -> Scored:
    """Score multiple-choice answers. reference: [index of the correct option, number of options]."""
    right = [named_letter(a, q.reference[1]) == q.reference[0] for q, a in zip(questions, answers, strict=True)]
    return _per_question("accuracy", right, questions)


def circular_choice(questions: list[Question], answers: list[str]) -> Scored:
    """Score questions as correct if all of their rounds are. reference: [question, correct letter, texts by letter].

    Source: MMBench (arXiv 2307.06281), section 4.1, CircularEval.
    """
    rounds: dict[object, list[bool]] = defaultdict(list)
    kinds, per_question = {}, []
    for question, answer in zip(questions, answers, strict=True):
        of, letter, options = question.reference
        per_question.append(matched_letter(answer, options) == letter)
        rounds[of].append(per_question[-1])
        kinds.setdefault(of, question.kinds)
    columns = np.array([[all(right), right[0]] for right in rounds.values()], dtype=np.float64)
    metrics = {"accuracy": _mean(0)}
    if any(len(right) > 1 for right in rounds.values()):
        metrics["first_round_accuracy"] = _mean(1)
    return Scored(columns, list(kinds.values()), metrics, np.array(per_question, dtype=np.float64))


def caption_scores(questions: list[Question], answers: list[str]) -> Scored:
    """Score captions by CIDEr-D and ROUGE-L. reference: captions of the same image."""
    captions = [caption_words(answer) for answer in answers]
    references = [[caption_words(each) for each in question.reference] for question in questions]
    columns = np.stack([cider(captions, references), rouge_l(captions, references)], axis=1)
    metrics = {"cider": _mean(0), "rouge_l": _mean(1)}
    return Scored(columns, [question.kinds for question in questions], metrics, columns[:, 0])


def _graded(grade: Callable[[str, Any], object], *names: str) -> Callable[[list[Question], list[str]], Scored]:
    """Build a metric from a function grade(answer, reference) that returns one number per name."""

    def score(questions: list[Question], answers: list[str]) -> Scored:
        grades = [grade(a, q.reference) for q, a in zip(questions, answers, strict=True)]
        columns = np.array(grades, dtype=np.float64).reshape(len(grades), len(names))
        metrics = {name: _mean(column) for column, name in enumerate(names)}
        return Scored(columns, [question.kinds for question in questions], metrics, columns[:, 0])

    return score


def _mmmu_grade(answer: str, reference: dict) -> tuple[bool, bool]:
    """Return (is correct, names no option). reference: {"answer": letter or texts, "options": texts by letter}."""
    if not reference["options"]:
        return mmmu_open_match(answer, reference["answer"]), False
    letter = mmmu_letter(answer, reference["options"])
    return letter == reference["answer"], letter is None


def _mathvista_grade(answer: str, reference: dict) -> tuple[bool, bool]:
    """Return (is correct, can't be parsed). The official code would parse the latter with a language model."""
    extraction = mathvista_extraction(answer, reference)
    return extraction is not None and mathvista_match(extraction, reference), extraction is None


def ocrbench(questions: list[Question], answers: list[str]) -> Scored:
    """Score OCRBench. reference: {"answer": texts, "category": question type}. The metric "points" is scaled to the
    1,000 questions of the full file.
    """
    grade = _graded(lambda answer, ref: contains_text(answer, ref["answer"], ref["category"]), "accuracy")
    scored = grade(questions, answers)
    return replace(scored, metrics={**scored.metrics, "points": lambda means: 1000 * means[..., 0]})


def mme(questions: list[Question], answers: list[str]) -> Scored:
    """Score MME. reference: {"answer": "yes" or "no", "pair": id of an image's questions}; kinds: category and ability.

    An ability's score is the sum, over categories, of the percentages of correct answers and of fully correct pairs.
    Source: MME (arXiv 2306.13394), section 2.3.
    """
    right = [first_yes_or_no(a) == q.reference["answer"] for q, a in zip(questions, answers, strict=True)]
    pairs: dict[tuple, list[bool]] = defaultdict(list)
    kinds = {}
    for question, each in zip(questions, right):
        pair = tuple(question.reference["pair"])
        pairs[pair].append(each)
        kinds[pair] = question.kinds
    categories = list(dict.fromkeys(kinds.values()))
    columns = np.zeros((len(pairs), 2 + 2 * len(categories)))  # per category: 1 for its pairs, and their scores
    for row, (pair, both) in zip(columns, pairs.items()):
        row[:2] = np.mean(both), all(both)
        place = 2 + 2 * categories.index(kinds[pair])
        row[place : place + 2] = 1, row[0] + row[1]

    def total(ability: str) -> Figures:
        places = [2 + 2 * i for i, kind in enumerate(categories) if ability in kind]
        return lambda means: 100 * sum((_ratio(means[..., i + 1], means[..., i]) for i in places), 0 * means[..., 0])

    metrics = {"accuracy": _mean(0), "accuracy_plus": _mean(1)}
    metrics |= {ability: total(ability) for ability in ("perception", "cognition")}
    return Scored(columns, list(kinds.values()), metrics, np.array(right, dtype=np.float64))


def grounding(questions: list[Question], answers: list[str]) -> Scored:
    """Score boxes as correct at an IoU of at least 0.5, in the box unit in which most answers are correct.

    reference: {"answer": box in pixels, "size": (width, height) of the image}, and optionally "resized": its size after
    the model's resize.
    """
    boxes = [named_box(answer) for answer in answers]
    ious = np.zeros((len(answers), len(BOX_UNITS)))
    for i, (question, box) in enumerate(zip(questions, boxes, strict=True)):
        true, size = question.reference["answer"], question.reference["size"]
        if box is not None:
            resized = question.reference.get("resized", size)
            ious[i] = [box_iou(in_pixels(box, size, resized), true) for in_pixels in BOX_UNITS.values()]
    hits = ious >= LEAST_IOU
    unit = hits.sum(axis=0).argmax()
    columns = np.column_stack([hits[:, unit], ious[:, unit], hits]).astype(np.float64)
    names = ("accuracy", "mean_iou", *(f"accuracy_{name}" for name in BOX_UNITS))
    metrics = {name: _mean(column) for column, name in enumerate(names)}
    return Scored(columns, [question.kinds for question in questions], metrics, columns[:, 0])


METRICS = {
    "exact": exact_match,
    "vqa": vqa_accuracy,
    "textvqa": textvqa_accuracy,
    "yes_no": yes_no,
    "choice": multiple_choice,
    "circular": circular_choice,
    "gqa": gqa_accuracy,
    "caption": caption_scores,
    "preference": preferred,
    "anls": _graded(anls, "anls"),
    "relaxed": _graded(relaxed_match, "accuracy"),
    "leading_letter": _graded(leads_with_letter, "accuracy"),
    "letter_alone": _graded(letter_alone, "accuracy"),
    "first_character": _graded(first_character, "accuracy"),
    "mmmu": _graded(_mmmu_grade, "accuracy", "not_read"),
    "mathvista": _graded(_mathvista_grade, "accuracy", "needs_judge"),
    "ocrbench": ocrbench,
    "mme": mme,
    "grounding": grounding,
}


def metric_of(name: str) -> Callable[[list[Question], list[str]], Scored]:
    """Return the metric with a name in METRICS, or the function that path.py:function names.

    Raises ConfigError if it doesn't exist.
    """
    if ":" not in name:
        return METRICS[name]
    function = function_of_file("--metric", name)

    def score(questions: list[Question], answers: list[str]) -> Scored:
        prompts, references, ids = zip(*[(q.asked, q.reference, str(q.id)) for q in questions])
        values = function(list(prompts), answers, list(references), list(ids))
        return _per_question(name.rpartition(":")[2], values, questions)

    return score


def shown_reference(metric: str, reference: object) -> object:
    """Return a question's reference in readable form, for multiple choice the correct letter."""
    if isinstance(reference, dict):
        return reference["answer"]
    if metric == "choice":
        return LETTERS[reference[0]]
    return reference[1] if metric == "circular" else reference


def reference_for(metric: str, texts: list[str]) -> object:
    """Convert a LLaVA-format record's references to the form that a metric expects. Raises DataError if it can't."""
    if metric == "caption":
        return texts
    if metric == "vqa":
        if len(texts) < LEAST_REFERENCES:
            raise DataError(
                f"has {len(texts)} reference answers, but VQA accuracy needs {LEAST_REFERENCES} or more (VQAv2 has "
                '10): list them under "references", or use another --metric'
            )
        return texts
    if len(texts) != 1:
        raise DataError(f"has {len(texts)} references, but --metric {metric} takes one")
    text = texts[0]
    if metric == "yes_no":
        word = plain_answer(text).split(",")[0].split(" ")[0].rstrip(".")
        if word not in ("yes", "no"):
            raise DataError(f"has the reference {text[:60]!r}, expected yes or no for --metric yes_no")
        return word
    if metric == "choice":
        letter = named_letter(text.strip().removesuffix("."), len(LETTERS))
        if letter is None:
            raise DataError(f"has the reference {text[:60]!r}, expected a letter from A to E for --metric choice")
        return [letter, len(LETTERS)]
    return text
