"""Flags of classification."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llava_ds.config.arguments import trains_projector_only
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags, Number, ObjectiveTraits
from llava_ds.extensions.classify.label_records import LabelField

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_classify, _ = flags_of("classify", goes_with="classify")

METRICS = ("accuracy",)  # in addition to the loss
NEEDS = {
    "known_samples": "labels and parts of records are counted first",
    "whole_sample": "the last token's hidden state is read there",
    "whole_layers": "it is untested with stages",
    "whole_matrices": "it is untested with parts of matrices",
    "dense_mlps": "it is untested with these experts",
}


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of classification."""

    of_model: ClassVar = True
    not_here: ClassVar = {
        "name the labels, with --labels": "--num_labels",
        "give --objective classify or embed": "--task_type",
    }
    numbers: ClassVar = {"accuracy": Number("Share of correct samples", "accuracy {:.1%}")}

    labels: str | None = _classify(
        None,
        "classify: the labels of the records, in the order of the head's outputs: cat,dog,bird, or a file with one "
        "on each line.",
    )
    problem_type: Literal["single_label_classification", "multi_label_classification"] = _classify(
        "single_label_classification",
        "classify: transformers' names. single_label: one label for a record, cross-entropy; multi_label: a list of "
        "any number, binary cross-entropy of every label.",
    )

    def converted(self) -> "tuple[Flags, list[str]]":
        """Return the flags, with the labels read from the file if --labels names one."""
        if self.labels is None or not Path(self.labels).is_file():
            return self, []
        try:
            return dataclasses.replace(self, labels=Path(self.labels).read_text(encoding="utf-8").strip()), []
        except (OSError, UnicodeDecodeError) as error:
            return self, [f"--labels {self.labels} can't be read: {error}"]

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits of an objective whose records have a question and a label, and no answer to learn."""
        if objective != "classify":
            return None
        return ObjectiveTraits(one_answer=True, metrics=METRICS, learning_rate=1e-5, needs=NEEDS, fields=LabelField())

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every missing or conflicting flag."""
        if args.data.data_path is None:
            yield "--objective classify needs --data_path with its records: generated scenes have none"
        if trains_projector_only(args.model):
            yield (
                "--objective classify reads the language model's last hidden state, but trains only the projector: "
                "train the language model as well"
            )
        names = names_of(self)
        if len(set(names)) < 2:
            yield (
                f"--objective classify needs two labels or more, but --labels has {names}: name them like cat,dog, or "
                "give a file with one on each line"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"--labels has {', '.join(twice)} more than once: give each label once"
        if any(own.adapted_parts for own in args.own.values()):
            yield "--objective classify trains a head, but an adapter's folder can't contain it: leave the adapter out"


def names_of(flags: Flags) -> list[str]:
    """Return the labels, in the order of the head's outputs."""
    text = flags.labels or ""
    return [name.strip() for name in text.split("\n" if "\n" in text else ",") if name.strip()]


def is_multiple(flags: Flags) -> bool:
    """Return True if records may have any number of labels."""
    return flags.problem_type == "multi_label_classification"
