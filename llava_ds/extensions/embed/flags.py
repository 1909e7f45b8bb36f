"""Flags for training embeddings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.arguments import trains_projector_only
from llava_ds.config.bounds import Positive
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags, Number, ObjectiveTraits
from llava_ds.extensions.embed.part_records import PartField

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_embed, _ = flags_of("embed", goes_with="embed")

METRICS = ("accuracy", "candidates")  # in addition to the loss; candidates: mean number of candidates per query
NEEDS = {
    "known_samples": "labels and parts of records are counted first",
    "whole_sample": "the last token's hidden state is read there",
    "whole_layers": "it is untested with stages",
    "whole_matrices": "it is untested with parts of matrices",
    "dense_mlps": "it is untested with these experts",
}


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags for training embeddings."""

    of_model: ClassVar = True
    numbers: ClassVar = {
        "accuracy": Number("Share of correct samples", "accuracy {:.1%}"),
        "candidates": Number("Candidates that a query is compared with"),
    }

    embed_temperature: Positive = _embed(
        0.05,
        "embed: divisor of the cosines; the default is sentence-transformers' scale of 20, VLM2Vec has 0.02. A query "
        "is compared with the positives and negatives of one micro-batch on all ranks.",
    )

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits of an objective whose records have several parts, and no answer to learn."""
        if objective != "embed":
            return None
        return ObjectiveTraits(one_answer=True, metrics=METRICS, learning_rate=1e-5, needs=NEEDS, fields=PartField())

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every missing or conflicting flag."""
        if args.data.data_path is None:
            yield "--objective embed needs --data_path with its records: generated scenes have none"
        if trains_projector_only(args.model):
            yield (
                "--objective embed reads the language model's last hidden state, but trains only the projector: train "
                "the language model as well"
            )
        if args.training.per_device_train_batch_size == 1 and args.training.tokens_per_micro_batch is None:
            yield (
                "--objective embed compares a query with the other records of its micro-batch, but "
                "--per_device_train_batch_size is 1: give more, or --tokens_per_micro_batch"
            )
