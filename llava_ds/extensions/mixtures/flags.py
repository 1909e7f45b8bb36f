"""Flags of mixtures of experts."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from llava_ds.config.bounds import Bounds, Count, NotNegative, Positive, Rate
from llava_ds.config.flags import flags_of, joined
from llava_ds.extensions.base import Axis, ExtensionFlags, Number

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_mixtures, _ = flags_of("mixtures")
_OF_UPCYCLING = ("num_experts", "top_k_experts", "moe_mode", "moe_layers_idx", "use_residual")
_SIZES = ("ep", "ep_size", "expert_model_parallel_size", "expert_parallel_size", "moe_ep_size")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of mixtures of experts."""

    of_model: ClassVar = True
    numbers: ClassVar = {
        "experts/max_over_mean": Number(
            "Tokens of the busiest expert, divided by the mean over experts", "busiest expert {:.1f}x"
        ),
        "experts/entropy": Number("Entropy of the experts' load; 1 is even"),
        "experts/aux_loss": Number("Load-balancing loss of the routers"),
    }
    keys: ClassVar = {"moe_expert_parallel_size": "ep_size"}
    other_keys: ClassVar = dict.fromkeys(
        _SIZES, ((1,), 'write "moe_expert_parallel_size": {size}, which divides experts over ranks')
    )
    other_names: ClassVar = {
        "--ep_size": "--expert_model_parallel_size --expert_model_parallel --moe_ep_size --ep",
    }
    not_here: ClassVar = {"eval and inference drop no tokens": "--eval_capacity_factor"}

    moe_enable: bool = _mixtures(
        False,
        "Upcycle the dense language model of --model_name_or_path: MLPs become mixtures of experts, and each expert "
        "starts as a copy of the MLP (docs/mixtures.md).",
    )
    num_experts: Annotated[int, Bounds(2, 1024)] = _mixtures(4, "Number of experts per layer.")
    top_k_experts: Annotated[int, Bounds(1, 64)] = _mixtures(
        2, "Number of experts per token. With 1, the expert's output is scaled by the router's probability."
    )
    moe_mode: Literal["first_half", "second_half", "sparse", "dense"] = _mixtures(
        "second_half",
        "Layers that get experts: the first or second half, every second layer from the first on, or all.",
    )
    moe_layers_idx: str | None = _mixtures(
        None, "Numbers of the layers that get experts, counted from 0. Replaces --moe_mode.", argparse={"nargs": "*"}
    )
    use_residual: bool = _mixtures(
        False, "Keep the MLP as well, and add its output to the experts' with weights that depend on the token."
    )
    capacity_factor: Positive | None = _mixtures(
        None,
        "Most tokens that an expert takes in training, as a multiple of an even share; the rest are dropped, so "
        "results depend on the samples of a micro-batch. Absent: no token is dropped.",
        of_micro_batch=True,
    )
    min_capacity: NotNegative = _mixtures(
        0, "Number of tokens that each expert accepts at least, with --capacity_factor."
    )
    train_modules: str | None = _mixtures(
        None,
        "Parts of parameter names to train in the language model, like gate_proj up_proj down_proj wg (the "
        "routers). Absent: train all of it.",
        argparse={"nargs": "*"},
    )
    router_aux_loss_coef: Rate = _mixtures(
        0.0,
        "Mixtures of experts: weight of the load-balancing loss. It is transformers' loss over all layers "
        "and tokens of a micro-batch or, with --moe_enable, MoE-LLaVA's sum over layers. With it, the result "
        "depends on which samples share a micro-batch.",
        of_micro_batch=True,
    )
    ep_size: Count = _mixtures(
        1,
        "Number of ranks that share the experts of a model made with --moe_enable: each rank holds a part, and tokens "
        "are sent to the ranks with their experts. ZeRO 0 to 2.",
        aliases=("--expert_parallel_size", "--moe_expert_parallel_size"),
        resume="placement",
    )
    experts_implementation: Literal["grouped_mm", "batched_mm", "eager"] | None = _mixtures(
        None,
        "Mixtures of experts: compute a layer's experts in one grouped matrix product, separately for each token, "
        "or one after the other. Absent: transformers' choice, grouped_mm if torch has it.",
    )

    @property
    def axis(self) -> Axis:
        """Expert-parallel axis: neighbouring ranks of the data axis."""
        return Axis("ep", "ep_size", self.ep_size, order=0, divides_model=True, in_data=True)

    def features(self) -> Iterator[tuple[str, Mapping[str, str], tuple[str, ...]]]:
        """Yield the features in use: upcycling, and the routers' loss."""
        if self.moe_enable or self.ep_size > 1:
            name = "--moe_enable True" if self.moe_enable else f"--ep_size {self.ep_size}"
            yield name, {}, ("routerless_mlps", "sharded_weights", *(("offload",) if self.ep_size > 1 else ()))
        if self.router_aux_loss_coef:
            needs = {"whole_sample": "it balances experts over all tokens of a micro-batch"}
            yield f"--router_aux_loss_coef {self.router_aux_loss_coef:g}", needs, ()

    def converted(self) -> "tuple[Flags, list[str]]":
        """Return the flags with lists of words joined by commas, and problems."""
        lists = {name: joined(getattr(self, name)) for name in ("moe_layers_idx", "train_modules")}
        return dataclasses.replace(self, **lists), []

    @classmethod
    def inactive_problems(cls, args: "Arguments") -> Iterator[str]:
        """Yield a line if flags describe experts without --moe_enable."""
        values = {**vars(cls()), **args.as_dict()}
        given = [name for name in _OF_UPCYCLING if name in args.given and values[name] is not None]
        if given and "moe_enable" not in args.given:
            yield (
                f"{', '.join(f'--{name}' for name in given)} without --moe_enable would train a dense model: give "
                "--moe_enable True, or --moe_enable False to train it dense"
            )

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line per flag that needs or contradicts another one."""
        from llava_ds.config.arguments import trains_projector_only

        if self.moe_enable:
            if self.top_k_experts > self.num_experts:
                yield f"--top_k_experts {self.top_k_experts} must be at most --num_experts {self.num_experts}: lower it"
            if trains_projector_only(args.model):
                yield (
                    "--moe_enable True, but only the projector is trained: experts are for a later stage, leave one out"
                )
        else:
            yield from self.inactive_problems(args)
        if self.moe_layers_idx is not None and "moe_mode" in args.given:
            yield "--moe_mode and --moe_layers_idx both choose the layers that get experts: give one of them"
        if "min_capacity" in args.given and self.min_capacity and self.capacity_factor is None:
            yield "--min_capacity has no effect without --capacity_factor: give that, or leave it out"
        if args.model.unfreeze_topk_llm and self.train_modules is not None:
            yield "--unfreeze_topk_llm and --train_modules both select language model parameters: give one of them"

    def json_problems(self, config: dict) -> Iterator[str]:
        """Yield a line per setting that conflicts with DeepSpeed's expert layer or the routers' loss."""
        from llava_ds.extensions.mixtures.experts_json import problems

        return problems(config, self.router_aux_loss_coef > 0, self.moe_enable, self.ep_size)

    @classmethod
    def saving_memory(cls, args: "Arguments", tokens: int, is_one_sample: bool) -> Iterator[str]:
        """Suggest more expert-parallel ranks for a model with experts."""
        flags = args.own.get("mixtures", cls())
        if flags.moe_enable or flags.ep_size > 1:
            yield f"--ep_size {2 * flags.ep_size}, on several GPUs: fewer experts on each GPU"
