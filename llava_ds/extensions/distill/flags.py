"""Flags of distillation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from llava_ds.config.bounds import Count, Part, Positive, Rate
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import Drawing, ExtensionFlags, Number, ObjectiveTraits

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_gkd, _ = flags_of("distill", goes_with="gkd")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of distillation."""

    other_names: ClassVar = {"--teacher_model_name_or_path": "--teacher_model", "--gkd_logits_topk": "--loss_top_k"}
    not_here: ClassVar = {"the teacher samples no answers": "--seq_kd"}
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
    beta: Part = _gkd(0.5, "gkd: divergence. 0: forward, KL(teacher || student); 1: reverse; between: Jensen-Shannon.")
    temperature: Positive = _gkd(1.0, "gkd: divisor of both models' logits in the divergence, and of sampled answers.")
    sft_alpha: Rate = _gkd(0.0, "gkd: weight of the cross-entropy of the records' answers, added to the divergence.")

    gkd_logits_topk: Count | None = _gkd(
        None,
        "gkd: keep this many of the teacher's most probable tokens with the encoded data, computed at the first start, "
        "and train without the teacher in memory; all other tokens count as one. Absent: all tokens, from memory.",
    )
    lmbda: Part = _gkd(0.0, "gkd: share of steps that train on the student's answers instead of the records' (λ).")
    max_completion_length: Count = _gkd(256, "gkd with --lmbda: longest sampled answer in tokens.")
    per_device_generation_batch_size: Count = _gkd(
        32, "gkd with --lmbda: prompts that a rank samples answers to at once.", resume="layout"
    )

    @property
    def frozen_folder(self) -> str | None:
        """The teacher's folder, unless its log-probabilities are on disk."""
        return None if self.gkd_logits_topk else self.teacher_model_name_or_path

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits. Records are the same as in supervised fine-tuning."""
        needs = {"whole_layers": "the teacher is not divided into stages", "dense_mlps": "it is untested with experts"}
        if self.gkd_logits_topk:
            needs |= {"known_samples": "its probabilities are written first", "whole_sample": "as it was read"}
        if self.lmbda:
            needs |= {"known_samples": "prompts are encoded first", "plain_weights": "answers are sampled from them"}
            needs |= dict.fromkeys(("whole_sample", "whole_matrices"), "answers are sampled on one rank")
        return ObjectiveTraits(needs=needs) if objective == "gkd" else None

    def drawing(self, args: "Arguments") -> Drawing | None:
        """Return the amount of sampling in a step; None without --lmbda."""
        size = self.per_device_generation_batch_size
        return Drawing.of(args, self.max_completion_length, size) if self.lmbda else None

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every missing or conflicting flag."""
        if self.teacher_model_name_or_path is None:
            yield "--objective gkd needs --teacher_model_name_or_path: name the folder of the teacher"
        if self.gkd_logits_topk and self.lmbda:
            yield "--gkd_logits_topk has probabilities for the records' answers only: leave --lmbda out"
        if self.lmbda and args.rewinds:
            yield "--on_loss_spike rewind can't be used with --lmbda: leave one of them out"
        if self.lmbda == 1 and self.sft_alpha:
            yield "--sft_alpha has no effect with --lmbda 1 (no record's answer is trained): leave it out"
        for name in ("max_completion_length", "per_device_generation_batch_size"):
            if name in args.given and not self.lmbda:
                yield f"--{name} has no effect without --lmbda: give it, or leave this out"

    def json_problems(self, config: dict) -> Iterator[str]:
        """Yield a line if parameters are offloaded to NVMe, where both models' weights would use the same files."""
        if (config["zero_optimization"].get("offload_param") or {}).get("device") == "nvme":
            yield "offload_param.device is nvme, where the teacher's weights would overwrite the student's: write cpu"
