"""Flags of classification and embeddings."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llava_ds.config.arguments import trains_projector_only
from llava_ds.config.bounds import Positive
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags, Number, ObjectiveTraits
from llava_ds.extensions.heads.head_records import LabelField, PartField

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_classify, _ = flags_of("heads", goes_with="classify")
_embed, _ = flags_of("heads", goes_with="embed")

# Metrics besides the loss; candidates: compared with a query, in the mean.
METRICS = {"classify": ("accuracy",), "embed": ("accuracy", "candidates")}

NEEDS = {
    "known_samples": "labels are counted, and parts of a record found, before",
    "whole_sample": "the last token's hidden state is read there",
    "whole_layers": "it is untested with stages",
    "whole_matrices": "it is untested with parts of matrices",
    "dense_mlps": "it is untested with these experts",
}


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of classification and embeddings."""

    of_model: ClassVar = True
    not_here: ClassVar = {
        "name the labels, with --labels": "--num_labels",
        "give --objective classify or embed": "--task_type",
    }
    numbers: ClassVar = {
        "accuracy": Number("Share of samples that are right", "accuracy {:.1%}"),
        "candidates": Number("Candidates that a query is compared with"),
    }

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

    embed_temperature: Positive = _embed(
        0.05,
        "embed: divisor of the cosines; the default is sentence-transformers' scale of 20, VLM2Vec has 0.02. A query "
        "is compared with the positives and negatives of one micro-batch on all ranks.",
    )

    def converted(self) -> "tuple[Flags, list[str]]":
        """Return the flags with the labels of a file."""
        if self.labels is None or not Path(self.labels).is_file():
            return self, []
        try:
            return dataclasses.replace(self, labels=Path(self.labels).read_text(encoding="utf-8").strip()), []
        except (OSError, UnicodeDecodeError) as error:
            return self, [f"--labels {self.labels} can't be read: {error}"]

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits: records have a question and a label, or several parts; no answer is learned."""
        if objective not in METRICS:
            return None
        fields = LabelField() if objective == "classify" else PartField()
        metrics = METRICS[objective]
        return ObjectiveTraits(one_answer=True, metrics=metrics, learning_rate=1e-5, needs=NEEDS, fields=fields)

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield missing and conflicting flags."""
        training = args.training
        if args.data.data_path is None:
            yield f"--objective {training.objective} needs --data_path with its records: generated scenes have none"
        if trains_projector_only(args.model):
            yield (
                f"--objective {training.objective} reads the language model's last hidden state, but trains only the "
                "projector: train the language model as well"
            )
        if training.objective == "embed":
            records = training.per_device_train_batch_size
            if records == 1 and training.tokens_per_micro_batch is None:
                yield (
                    "--objective embed compares a query with the other records of its micro-batch, but "
                    "--per_device_train_batch_size is 1: give more, or --tokens_per_micro_batch"
                )
            return
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
    """Return True if a record has any number of labels."""
    return flags.problem_type == "multi_label_classification"
