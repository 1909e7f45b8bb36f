"""Flags of preference objectives and reward models."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from llava_ds.config.arguments import trains_projector_only
from llava_ds.config.bounds import Bounds, Rate
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags, Number, ObjectiveTraits

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_pairs, _ = flags_of("preference", goes_with="dpo kto reward")
_reference, _ = flags_of("preference", goes_with="dpo kto")
_kto, _ = flags_of("preference", goes_with="kto")
_dpo, _ = flags_of("preference", goes_with="dpo")
_reward, _ = flags_of("preference", goes_with="reward")

# Maps flags to the values of --loss_type that read them. Flags that are not listed apply to every value.
LOSS_TYPES = {
    "label_smoothing": ("sigmoid", "simpo", "cpo"),
    "rpo_alpha": ("sigmoid", "hinge", "ipo", "simpo"),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo",),
    "ref_model_name_or_path": ("sigmoid", "hinge", "ipo"),
}

# Metrics besides the loss, under TRL's names. reward shares dpo's names for equal meanings, else RewardTrainer's.
METRICS = {
    "dpo": (
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
        *("logps/chosen", "logps/rejected"),
    ),
    "kto": ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"),
    "reward": (
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
        *("mean_reward", "min_reward", "max_reward"),
    ),
}


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags for preference training."""

    other_names: ClassVar = {"--loss_type": "--pref_loss", "--beta": "--dpo_beta --pref_beta"}
    numbers: ClassVar = {
        "rewards/accuracies": Number("Share of pairs whose chosen answer is ahead", "accuracy {:.1%}"),
        "rewards/margins": Number("Margin of the chosen answer"),
        "rewards/chosen": Number("Reward of chosen answers"),
        "rewards/rejected": Number("Reward of rejected answers"),
        "logps/chosen": Number("Log-probability of chosen answers"),
        "logps/rejected": Number("Log-probability of rejected answers"),
    }

    beta: Rate = _reference(
        0.1,
        "dpo and kto: weight that keeps the model close to the reference model, its starting point; with orpo the "
        "weight of the odds, λ in its paper.",
    )
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "cpo", "orpo"] = _dpo(
        "sigmoid",
        "dpo: the loss of a pair. sigmoid: DPO; hinge: SLiC; ipo: IPO, over mean log-probabilities; without a "
        "reference model: simpo: SimPO, over means; cpo: CPO; orpo: ORPO, odds of mean log-probabilities.",
    )
    label_smoothing: Annotated[float, Bounds(0, 0.5)] = _dpo(
        0.0, "dpo with sigmoid, simpo or cpo: the share of pairs that may be mislabelled."
    )
    rpo_alpha: Rate = _dpo(
        0.0, "dpo: weight of the chosen answer's own loss per token: it keeps its probability from falling."
    )
    simpo_gamma: Rate = _dpo(0.5, "dpo with simpo: target margin of the chosen answer.")
    cpo_alpha: Rate = _dpo(1.0, "dpo with cpo: weight of the chosen answer's own loss per token.")
    desirable_weight: Rate = _kto(1.0, "kto: weight of the loss of good answers.")
    undesirable_weight: Rate = _kto(1.0, "kto: weight of the loss of bad answers.")
    share_prompts: bool = _pairs(
        True,
        "dpo, kto and reward: compute a prompt with its images once for its answers in a micro-batch; the loss is the "
        "same. False: once for each answer.",
        resume="layout",
    )
    ref_model_name_or_path: str | None = _reference(
        None,
        "dpo and kto: folder of the reference model. Absent: the model that the run starts from. It is in memory, "
        "whole on every rank, until its log-probabilities are computed, at every start.",
        path="model",
    )
    reward_loss: Literal["last", "tokens"] = _reward(
        "last",
        "reward: compare the scores of two answers at their last tokens, or at every token from the first difference "
        "on (DeepSpeed-Chat's).",
    )
    center_rewards_coefficient: Rate = _reward(
        0.0, "reward: weight of (chosen + rejected score)²: it keeps scores around zero (0.01 in TRL)."
    )

    def traits(self, objective: str) -> ObjectiveTraits | None:
        """Return the traits. All objectives train on pairs, kto also on single answers. Reward models don't
        generate."""
        if objective not in METRICS:
            return None
        scores, needs = (
            objective == "reward",
            {
                "known_samples": "pairs are encoded first",
                "dense_mlps": "it is untested with these experts",
            },
        )
        if self.ref_model_name_or_path is not None:
            needs["whole_layers"] = "another reference model is whole on every rank, but only one stage has images"
        if objective == "kto":
            needs["whole_layers"] = "another pass estimates the KL before every step"
        if scores:
            needs["whole_sample"] = "its answers are scored there"
        return ObjectiveTraits(
            one_answer=True,
            pairs=True,
            labels=objective == "kto",
            scores=scores,
            metrics=METRICS[objective],
            learning_rate=1e-4 if scores else 1e-6,
            needs=needs,
        )

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for every flag that the chosen loss ignores, and for every missing requirement."""
        objective = args.training.objective
        for name, known in LOSS_TYPES.items():
            if name in args.given and objective == "dpo" and self.loss_type not in known:
                yield f"--{name} has no effect with --loss_type {self.loss_type}: it is for {' and '.join(known)}"
        if args.data.data_path is None:
            yield (
                f"--objective {objective} needs --data_path with preferences: the generated scenes have one answer each"
            )
        if objective == "reward" and trains_projector_only(args.model):
            yield (
                "--objective reward trains a value head on the language model, but a projector's file can't contain "
                "it: train the language model as well"
            )
