"""Convert a record of a query, its positive and its negatives to conversations whose answer is not learned."""

import json
import re
from collections.abc import Mapping

from llava_ds.constants import DataError
from llava_ds.data.unlearned_answer import IMAGES, QUESTIONS, TURNS, code_of, with_answer
from llava_ds.extensions.plugin_slots import RecordFields

UNREAD = "."  # the answer of a part
PART = "part"  # key of the part's value in a converted record, see PartField


class PartField(RecordFields):
    """Splits a record into its query, positive and hard negatives. Formats: ms-swift's messages, positive_messages and
    negative_messages with images, positive_images and negative_images; sentence-transformers' anchor, positive and
    negative, each a text or {"text": ..., "image": ...}.

    A part's value is [number of parts in the record (0 if not the query), code of its content, the query's code].
    """

    names = (PART,)
    columns = tuple(f"{role}{kind}" for role in ("positive", "negative") for kind in ("", "_messages", "_images"))
    columns += ("anchor",)

    def convert(self, record: dict) -> list[dict]:
        """Return a record for each part, with an answer that is not learned. Raises DataError for missing parts."""
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
        """Return a part's value, (3,) int64."""
        import torch

        return {PART: torch.tensor(values[PART], dtype=torch.int64)}


def _parts(record: dict, role: str) -> list[dict]:
    """Return the parts with a role ("anchor", "positive" or "negative"), as records without an answer."""
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
        raise DataError(f'has {given!r:.80} as {role}, expected text, or {{"text": …, "image": …}}')
    images = {"images": [given["image"]]} if given.get("image") else {}
    return {"messages": [{"role": "user", "content": given.get("text") or ""}], **images}
