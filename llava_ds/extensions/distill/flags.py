"""Flags of distillation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Part, Positive, Rate
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags, Number, ObjectiveTraits

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_gkd, _ = flags_of("distill", goes_with="gkd")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of distillation."""

    other_names: ClassVar = {"--teacher_model_name_or_path": "--teacher_model"}
    not_here: ClassVar = {"the teacher draws no answers": "--seq_kd"}
    numbers: ClassVar = {
        "divergence": Number("Divergence from the teacher, per token", "divergence {:.3g}"),
        "cross_entropy": Number("Cross-entropy of the trained answers, per token"),
    }

    teacher_model_name_or_path: str | None = _gkd(
        None,
        "gkd: folder of the teacher, a model with the same vocabulary and images. It is frozen; at ZeRO-3 it is "
        "sharded, else whole on every rank.",
        path="model",
        only_to_train=True,
    )
    beta: Part = _gkd(
        0.5,
        "gkd: the divergence. 0: forward, KL(teacher || student); 1: reverse; between: generalised Jensen-Shannon.",
    )
    temperature: Positive = _gkd(1.0, "gkd: divisor of both models' logits in the divergence, and of drawn answers.")
    sft_alpha: Rate = _gkd(0.0, "gkd: weight of the cross-entropy of the records' answers, added to the divergence.")

    @property
    def frozen_folder(self) -> str | None:
        """The teacher's folder."""
        return self.teacher_model_name_or_path

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits: the records and answers of supervised fine-tuning."""
        if objective != "gkd":
            return None
        needs = {
            "whole_layers": "the teacher is not divided into stages",
            "dense_mlps": "it is not tried with these experts",
        }
        return ObjectiveTraits(needs=needs)

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield missing flags."""
        if self.teacher_model_name_or_path is None:
            yield "--objective gkd needs --teacher_model_name_or_path: name the folder of the teacher"
