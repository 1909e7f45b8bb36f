"""Records of classification and embeddings, as conversations whose answer is not learned."""

import hashlib
import json
import re
from collections.abc import Mapping

from llava_ds.constants import DataError
from llava_ds.extensions.plugin_slots import RecordFields

TURNS, QUESTIONS, IMAGES = (
    ("messages", "conversations"),
    ("prompt", "query", "question", "instruction"),
    ("image", "images"),
)
MODEL_ROLES = ("assistant", "gpt")
NO_LABEL = "none"
UNREAD = "."  # the answer of a part
CLASS, PART = "class", "part"  # keys of a converted record: its labels; see PartField


def code_of(text: str) -> int:
    """Return a number of 63 bits that stands for a text in tensors."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def with_answer(record: dict, answer: str) -> dict:
    """Add an answer to a record that ends with a question, or has images alone. Raises DataError."""
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


class LabelField(RecordFields):
    """The labels of a record: ms-swift's `label`, a text, a whole number, a truth value, or a list of them."""

    names = (CLASS,)
    columns = ("label",)

    def convert(self, record: dict) -> dict:
        """Take the label out of the record. It becomes the answer, which is not learned and follows the last token
        that is read."""
        record = dict(record)
        given = record.pop("label", None)
        if given is None:
            raise DataError("has no 'label', expected a text or a whole number: add it, or leave the record out")
        labels = [_name(each) for each in given] if isinstance(given, list) else [_name(given)]
        return with_answer({**record, CLASS: labels}, ", ".join(labels) or NO_LABEL)

    def load(self, values: Mapping[str, object]) -> dict:
        """Return the numbers of the labels' texts, (labels,) int64."""
        import torch

        return {CLASS: torch.tensor([code_of(each) for each in values[CLASS]], dtype=torch.int64)}


def _name(label: object) -> str:
    if isinstance(label, str) and label.strip():
        return label.strip()
    if isinstance(label, int):
        return json.dumps(label)
    raise DataError(f"has {label!r:.80} under 'label', expected a text, a whole number, or a list of them")


class PartField(RecordFields):
    """A query, its positive, and hard negatives, each a record: ms-swift's messages, positive_messages and
    negative_messages with images, positive_images and negative_images; or sentence-transformers' anchor, positive and
    negative, each a text or {"text": ..., "image": ...}.

    A part's value: [the number of the record's parts for its query, else 0, the content's number, the query's].
    """

    names = (PART,)
    columns = tuple(f"{role}{kind}" for role in ("positive", "negative") for kind in ("", "_messages", "_images"))
    columns += ("anchor",)

    def convert(self, record: dict) -> list[dict]:
        """Return a record for each part; their answers are not learned. Raises DataError."""
        of_query = {name: record[name] for name in (*TURNS, *QUESTIONS, *IMAGES) if record.get(name)}
        queries = _parts(record, "anchor") or ([of_query] if of_query else [])
        positives, negatives = _parts(record, "positive"), _parts(record, "negative")
        for role, found in (("query", queries), ("positive", positives)):
            if len(found) != 1:
                raise DataError(
                    f"has {len(found)} parts for its {role}, expected one: give ms-swift's messages and "
                    "positive_messages, or sentence-transformers' anchor and positive, and a record for each positive"
                )
        parts = [*queries, *positives, *negatives]
        codes = [code_of(json.dumps(part, sort_keys=True)) for part in parts]
        rest = {"id": record["id"]} if "id" in record else {}
        return [
            with_answer({**rest, **part, PART: [0 if i else len(parts), code, codes[0]]}, UNREAD)
            for i, (part, code) in enumerate(zip(parts, codes))
        ]

    def load(self, values: Mapping[str, object]) -> dict:
        """Return the value, (3,) int64."""
        import torch

        return {PART: torch.tensor(values[PART], dtype=torch.int64)}


def _parts(record: dict, role: str) -> list[dict]:
    """Return the parts of a role, as records without an answer. Raises DataError."""
    found = [value for name, value in record.items() if re.fullmatch(rf"{role}(_\d+)?", name) and value]
    said, shown = record.get(f"{role}_messages") or [], record.get(f"{role}_images") or []
    said = [said] if said and isinstance(said[0], dict) else said
    shown = [shown] if shown and not isinstance(shown[0], list) else [*shown]
    found = [each for value in found for each in (value if isinstance(value, list) else [value])]
    shown += [[]] * len(said)
    found += [{"messages": each, **({"images": images} if images else {})} for each, images in zip(said, shown)]
    return [_part(each, role) for each in found]


def _part(given: object, role: str) -> dict:
    """Convert a text, or a dictionary of text and image or of messages and images."""
    if isinstance(given, dict) and isinstance(given.get("messages"), list):
        return given
    given = {"text": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or not (given.get("text") or given.get("image")):
        raise DataError(f'has {given!r:.80} as {role}, expected a text, or {{"text": …, "image": …}}')
    images = {"images": [given["image"]]} if given.get("image") else {}
    return {"messages": [{"role": "user", "content": given.get("text") or ""}], **images}
