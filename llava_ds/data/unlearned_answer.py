"""Records whose answer is not learned, and numbers that stand for texts in tensors."""

import hashlib

from llava_ds.constants import DataError

TURNS, QUESTIONS, IMAGES = (
    ("messages", "conversations"),
    ("prompt", "query", "question", "instruction"),
    ("image", "images"),
)
MODEL_ROLES = ("assistant", "gpt")


def code_of(text: str) -> int:
    """Return a number of 63 bits that represents a text in tensors."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def with_answer(record: dict, answer: str) -> dict:
    """Add an answer to a record that ends with a question, or has only images. Raises DataError."""
    name = next((name for name in TURNS if isinstance(record.get(name), list)), None)
    if name is None:
        asks = any(record.get(name) for name in QUESTIONS) or not any(record.get(name) for name in IMAGES)
        return {**record, "answer": answer} if asks else {**record, "messages": _turns(answer)}
    turns = record[name]
    last = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    if last.get("role", last.get("from")) in MODEL_ROLES:
        raise DataError(f"ends with the model's answer under {name!r}, expected a question: leave the answer out")
    said = {"from": "gpt", "value": answer} if "from" in last else {"role": "assistant", "content": answer}
    return {**record, name: [*turns, said]}


def _turns(answer: str) -> list[dict]:
    return [{"role": "user", "content": ""}, {"role": "assistant", "content": answer}]
