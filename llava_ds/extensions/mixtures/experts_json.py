"""Check the DeepSpeed JSON for a model with experts."""

from collections.abc import Iterator

from llava_ds.engine.ds_config.activation import SECTION, switched_on
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device


def problems(config: dict, has_router_loss: bool, upcycles: bool, ep_size: int) -> Iterator[str]:
    """Yield a line per problem, except for optimizer problems. config: the JSON with "auto" values filled in."""
    if has_router_loss and (switch := switched_on(config)) is not None:
        yield (
            f"{SECTION}.{switch} is set in the DeepSpeed JSON, and its checkpointing keeps no gradient of the routers' "
            "choices, but --router_aux_loss_coef needs it: remove the section, and give --gradient_checkpointing all"
        )
    flag = "--moe_enable is True" if ep_size == 1 else f"--ep_size is {ep_size}"
    if (upcycles or ep_size > 1) and value_at(config, "zero_optimization.stage") == 3:
        yield f"{flag}, but DeepSpeed's expert layer works with ZeRO 0 to 2: give ds_configs/zero2.json"
    if ep_size > 1:
        yield from _problems_of_sharing(config, flag)


def _problems_of_sharing(config: dict, flag: str) -> Iterator[str]:
    """Yield a line per setting that changes the gradient norm when ranks share experts."""
    for part in OFFLOADED:
        if offload_device(config, part) != "none":
            yield (
                f"{flag}, but zero_optimization.{part} steps before the gradient norm over all ranks is checked: "
                "remove it"
            )
    if value_at(config, "zero_optimization.compute_grad_norm") is False:
        yield f"{flag}, but expert parallelism needs the gradient norm: remove zero_optimization.compute_grad_norm"
    for section in ("fp16", "torch_autocast"):
        if value_at(config, f"{section}.enabled") is True:
            yield f"{flag}, but with {section} each rank would choose its own loss scale: use bf16"


def optimizer_problems(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for an optimizer that doesn't work when ranks share experts."""
    if (ep_size := resolved.args.size_of("ep")) == 1:
        return
    flag = f"--ep_size is {ep_size}"
    if (optim := resolved.args.training.optim) != "adamw_torch":
        yield f"{flag}, but expert parallelism needs torch's AdamW: leave out --optim {optim}"
    elif "optimizer" in resolved.config:
        why = "with any other, DeepSpeed averages expert norms over the ranks that share the experts"
        yield (
            f"{flag}, but expert parallelism needs torch's AdamW, set by flags ({why}): leave optimizer out of the JSON"
        )
