"""Convert records with a label to conversations whose answer is not learned."""

import json
from collections.abc import Mapping

from llava_ds.constants import DataError
from llava_ds.data.unlearned_answer import code_of, with_answer
from llava_ds.extensions.plugin_slots import RecordFields

NO_LABEL = "none"
CLASS = "class"  # key of the labels in a converted record


class LabelField(RecordFields):
    """The labels of a record, in ms-swift's field `label`: a string, an integer, a boolean, or a list of these."""

    names = (CLASS,)
    columns = ("label",)

    def convert(self, record: dict) -> dict:
        """Move the label to the answer. The answer is not learned; the hidden state is read at the token before it, so
        the model can't see the label."""
        record = dict(record)
        given = record.pop("label", None)
        if given is None:
            raise DataError("has no 'label', expected text or a whole number: add it, or leave the record out")
        labels = [_name(each) for each in given] if isinstance(given, list) else [_name(given)]
        return with_answer({**record, CLASS: labels}, ", ".join(labels) or NO_LABEL)

    def load(self, values: Mapping[str, object]) -> dict:
        """Return the integer code of each label, (labels,) int64."""
        import torch

        return {CLASS: torch.tensor([code_of(each) for each in values[CLASS]], dtype=torch.int64)}


def _name(label: object) -> str:
    if isinstance(label, str) and label.strip():
        return label.strip()
    if isinstance(label, int):
        return json.dumps(label)
    raise DataError(f"has {label!r:.80} under 'label', expected text, a whole number, or a list of them")
