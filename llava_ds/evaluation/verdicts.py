"""One row per question: what was asked, what was answered, and what that is worth."""

from dataclasses import asdict

from llava_ds.data.sample import Media
from llava_ds.evaluation.question import Question
from llava_ds.evaluation.scores import Scored, shown_reference
from llava_ds.infer.generate import Answer


def answer_rows(
    questions: list[Question], answers: list[Answer], scored: Scored, metric: str, model: str
) -> list[dict[str, object]]:
    """The rows of OUTPUT.jsonl, in the questions' order; docs/evaluation.md has their keys.

    question_id, prompt, text and model_id are LLaVA's names, which its scripts and benchmarks' servers read.
    """
    return [
        {
            "question_id": question.id,
            "prompt": question.asked,
            "text": answer.text,
            "model_id": model,
            "kinds": list(question.kinds),
            "reference": shown_reference(metric, question.reference),
            "score": float(score),
            "logprob": answer.logprob,
            "num_tokens": answer.num_tokens,
            "images": [_place(image) for image in question.prompt.images],
            **question.more,
        }
        for question, answer, score in zip(questions, answers, scored.per_question, strict=True)
    ]


def _place(image: str | Media) -> str | dict[str, object]:
    """An image's path, or all that a FileRef has of a slice of a file; of a video, its file or first frame."""
    if isinstance(image, str):
        return image
    ref = image.refs[0]
    return ref.path if ref.num_bytes < 0 else asdict(ref)
