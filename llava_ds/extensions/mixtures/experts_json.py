"""Problems of the DeepSpeed JSON beside mixtures of experts."""

from collections.abc import Iterator

from llava_ds.engine.ds_config.activation import SECTION, switched_on
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.zero import OFFLOADED, offload_device


def problems(config: dict, has_router_loss: bool, upcycles: bool, ep_size: int) -> Iterator[str]:
    """A line for everything but the optimizer. config: with its values filled in."""
    if has_router_loss and (switch := switched_on(config)) is not None:
        yield (
            f"{SECTION}.{switch} is set in the DeepSpeed JSON, whose checkpointing keeps no gradient of what routers "
            "choose, but --router_aux_loss_coef needs it: remove the section, and give --gradient_checkpointing all"
        )
    flag = "--moe_enable is True" if ep_size == 1 else f"--ep_size is {ep_size}"
    if (upcycles or ep_size > 1) and value_at(config, "zero_optimization.stage") == 3:
        yield f"{flag}, but DeepSpeed's layer of experts works at ZeRO 0 to 2: give ds_configs/zero2.json"
    if ep_size > 1:
        yield from _problems_of_sharing(config, flag)


def _problems_of_sharing(config: dict, flag: str) -> Iterator[str]:
    """A line for all with another norm of the gradients over ranks that share experts than on one."""
    for part in OFFLOADED:
        if offload_device(config, part) != "none":
            yield f"{flag}, but zero_optimization.{part} steps outside the check of all ranks' norm: remove it"
    if value_at(config, "zero_optimization.compute_grad_norm") is False:
        yield f"{flag}, which needs the norm of gradients: remove zero_optimization.compute_grad_norm"
    for section in ("fp16", "torch_autocast"):
        if value_at(config, f"{section}.enabled") is True:
            yield f"{flag}, but with {section} each rank would look for its own loss scale: write bf16"


def optimizer_problems(resolved: ResolvedConfig) -> Iterator[str]:
    """A line for an optimizer that ranks which share experts don't go with."""
    if (ep_size := resolved.args.size_of("ep")) == 1:
        return
    flag = f"--ep_size is {ep_size}"
    if (optim := resolved.args.training.optim) != "adamw_torch":
        yield f"{flag}, which needs torch's AdamW: leave out --optim {optim}"
    elif "optimizer" in resolved.config:
        why = "with any other DeepSpeed averages norms of experts over the ranks that share them"
        yield f"{flag}, which needs torch's AdamW, by flags ({why}): leave optimizer out of the JSON"
