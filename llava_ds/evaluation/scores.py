# U scored units (questions; for MMBench, all rounds of one), C columns of figures per unit
"""Scores of answers, by the rules of each benchmark."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llava_ds.constants import DataError
from llava_ds.evaluation.caption_words import caption_words
from llava_ds.evaluation.captions import cider, rouge_l
from llava_ds.evaluation.normalise import evalai_answer, plain_answer, vqa_answer, vqa_punctuation
from llava_ds.evaluation.option_letters import LETTERS, matched_letter, named_letter, says_yes
from llava_ds.evaluation.question import Question
from llava_ds.train.rewards import function_of_file

LEAST_REFERENCES = 4  # for VQA accuracy: with fewer no answer could count in full

Figures = Callable[[np.ndarray], np.ndarray]  # (..., C) means over units -> (...)


@dataclass(frozen=True)
class Scored:
    """columns (U, C); kinds: the groups that each unit counts in; metrics: each a function of the columns' means;
    per_question: what each question's own answer is worth by the first metric.

    The first metric is the mean of the first column: the one figure of the benchmark.
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
    """Score pairs whose chosen answer, the reference, was preferred."""
    return _per_question("accuracy", [a == q.reference for q, a in zip(questions, answers, strict=True)], questions)


def gqa_accuracy(questions: list[Question], answers: list[str]) -> Scored:
    """As LLaVA hands answers to GQA's evaluation, which compares them to the letter."""
    right = [a.rstrip(".").lower() == q.reference for q, a in zip(questions, answers, strict=True)]
    return _per_question("accuracy", right, questions)


def vqa_accuracy(questions: list[Question], answers: list[str]) -> Scored:
    """reference: people's answers, as in VQAv2's file. Punctuation is taken from them only where they differ."""

    def score(answer: str, people: list[str]) -> float:
        spelled = [vqa_punctuation(each) for each in people] if len(set(people)) > 1 else people
        return _leave_one_out(vqa_answer(answer), spelled)

    return _per_question(
        "accuracy", [score(a, q.reference) for q, a in zip(questions, answers, strict=True)], questions
    )


def textvqa_accuracy(questions: list[Question], answers: list[str]) -> Scored:
    """reference: people's answers, which are spelled by EvalAI's rules like the model's."""
    scores = [
        _leave_one_out(evalai_answer(a), [evalai_answer(each) for each in q.reference])
        for q, a in zip(questions, answers, strict=True)
    ]
    return _per_question("accuracy", scores, questions)


def _leave_one_out(answer: str, people: list[str]) -> float:
    """The mean, over the people, of min(1, how many of the others said the same / 3).

    Source: VQA (arXiv 1505.00468), section 3.2, as its evaluation code averages it.
    """
    same = people.count(answer)
    return sum(min(1, float(same - (each == answer)) / 3) for each in people) / len(people)


def yes_no(questions: list[Question], answers: list[str]) -> Scored:
    """reference: "yes" or "no". A yes is what precision and recall count, as POPE does."""
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
    """0 where there is nothing to divide by: no yes among answers, or labels."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def multiple_choice(questions: list[Question], answers: list[str]) -> Scored:
    """reference: [index of the right option, number of options]."""
    right = [named_letter(a, q.reference[1]) == q.reference[0] for q, a in zip(questions, answers, strict=True)]
    return _per_question("accuracy", right, questions)


def circular_choice(questions: list[Question], answers: list[str]) -> Scored:
    """reference: [question, right letter, options by letter]; a question counts if all its rounds are right.

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
    """reference: captions of the same image."""
    captions = [caption_words(answer) for answer in answers]
    references = [[caption_words(each) for each in question.reference] for question in questions]
    columns = np.stack([cider(captions, references), rouge_l(captions, references)], axis=1)
    metrics = {"cider": _mean(0), "rouge_l": _mean(1)}
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
}


def metric_of(name: str) -> Callable[[list[Question], list[str]], Scored]:
    """The metric of a name: of METRICS, or path.py:function, a function as --reward_funcs takes them.

    Raises ConfigError where there is none.
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
    """A question's reference as a person reads it: of a multiple-choice question, its letter."""
    if metric == "choice":
        return LETTERS[reference[0]]
    return reference[1] if metric == "circular" else reference


def reference_for(metric: str, texts: list[str]) -> object:
    """References of a LLaVA-format record as a metric wants them. Raises DataError for what it can't compare with."""
    if metric == "caption":
        return texts
    if metric == "vqa":
        if len(texts) < LEAST_REFERENCES:
            raise DataError(
                f"has {len(texts)} reference answers, and VQA accuracy needs {LEAST_REFERENCES} or more (VQAv2 has "
                '10): list them under "references", or use another --metric'
            )
        return texts
    if len(texts) != 1:
        raise DataError(f"has {len(texts)} references, and --metric {metric} compares with one")
    text = texts[0]
    if metric == "yes_no":
        word = plain_answer(text).split(",")[0].split(" ")[0].rstrip(".")
        if word not in ("yes", "no"):
            raise DataError(f"has the reference {text[:60]!r}, expected yes or no, for --metric yes_no")
        return word
    if metric == "choice":
        letter = named_letter(text.strip().removesuffix("."), len(LETTERS))
        if letter is None:
            raise DataError(f"has the reference {text[:60]!r}, expected a letter from A to E, for --metric choice")
        return [letter, len(LETTERS)]
    return text
