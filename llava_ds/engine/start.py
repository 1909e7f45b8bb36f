"""Start a DeepSpeed engine, and check that it trains as the resolved configuration says."""

from functools import partial

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.draft import value_at
from llava_ds.engine.ds_config.optimizer import BITSANDBYTES, optimizer_name
from llava_ds.engine.ds_config.parallel import for_engine
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.ds_config.scheduler import scheduler_factory
from llava_ds.engine.ds_config.zero import offload_device
from llava_ds.engine.non_finite import guard_steps
from llava_ds.engine.param_groups import num_elements
from llava_ds.engine.placement import divided, placement_of
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.redact import redact


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and DeepSpeed's accelerator on this rank."""
    set_random_seed(seed)


def start_engine(
    model: nn.Module, groups: list[dict], resolved: ResolvedConfig, num_steps: int, mesh: Mesh
) -> deepspeed.DeepSpeedEngine:
    """Initialize DeepSpeed's engine over a model, with the optimizer and the schedule of the resolved JSON.

    groups: parameter_groups() of the model. mesh: the mesh that the model was built for. DeepSpeed builds the optimizer
    that the JSON names (bitsandbytes' is built here); without one, it is torch's AdamW with the flags' values. Raises
    ConfigError if the engine would train different groups.
    """
    config, training = resolved.config, resolved.args.training
    elements = {p: num_elements(p) for p in model.parameters()}
    elements = divided(elements, model, mesh.parts, lambda axis: mesh.at(axis).size)
    meant = [(*_rates(group), sum(elements[p] for p in group["params"])) for group in groups]
    optimizer = _own_optimizer(groups, resolved)
    built: dict[str, object] = {"model_parameters": groups} if optimizer is None else {"optimizer": optimizer}
    peaks: list[dict] = []

    def scheduler(optimizer: torch.optim.Optimizer):
        peaks.extend(dict(group) for group in optimizer.param_groups)  # copied before the schedule changes them
        return scheduler_factory(training, num_steps, config.get("scheduler"))(optimizer)

    own = for_engine(config)
    for part in (part for part in mesh.parts if part.engine is not None):
        options = part.engine(model, mesh)
        own |= options.pop("config", {})
        built |= options
    engine, *_ = deepspeed.initialize(model=model, lr_scheduler=scheduler, config=own, **built)
    engine._config.train_batch_size = config["train_batch_size"]  # DeepSpeed also counts ranks with the same samples
    engine.config = redact(engine.config)  # DeepSpeed writes it, with Comet's API key, into all checkpoints
    _keep_adagrads_groups(engine)
    _take_back_first_step(engine)
    check_groups(engine, peaks, meant)
    for part in (part for part in mesh.parts if part.started is not None):
        part.started(engine, mesh)
    guard_steps(engine, placement_of(engine))
    return engine


def _own_optimizer(groups: list[dict], resolved: ResolvedConfig) -> torch.optim.Optimizer | None:
    """Return torch's or bitsandbytes' AdamW over the groups, or None if DeepSpeed builds the optimizer."""
    config, training = resolved.config, resolved.args.training
    if "optimizer" not in config:
        betas = (training.adam_beta1, training.adam_beta2)
        offloaded = offload_device(config, "offload_optimizer") != "none"
        return torch.optim.AdamW(
            groups, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon, fused=not offloaded
        )
    name = optimizer_name(config["optimizer"])
    if name not in BITSANDBYTES:
        return None
    import bitsandbytes

    return getattr(bitsandbytes.optim, name)(groups, **config["optimizer"]["params"])


def check_engine(engine, resolved: ResolvedConfig, mesh: Mesh) -> None:
    """Compare the engine's settings with the resolved JSON. Raises ConfigError on any difference."""
    config = resolved.config
    understood = {
        "ranks": engine.dp_world_size,
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "zero_optimization.stage": engine.zero_optimization_stage(),
        "gradient_clipping": engine.gradient_clipping(),
        "dtype": engine.get_data_types()[0],
        "torch_autocast.enabled": engine.torch_autocast_enabled(),
        "zero_optimization.offload_optimizer.device": _device(engine.zero_offload_optimizer()),
        "zero_optimization.offload_param.device": _device(engine.zero_offload_param()),
    }
    meant = {
        **{key: value_at(config, key) for key in understood},
        "ranks": mesh.grad_ranks,
        "zero_optimization.stage": resolved.zero_stage,
        "zero_optimization.offload_optimizer.device": offload_device(config, "offload_optimizer"),
        "zero_optimization.offload_param.device": offload_device(config, "offload_param"),
        "torch_autocast.enabled": config.get("torch_autocast", {}).get("enabled", False),
        "dtype": resolved.dtype,
    }
    wrong = [
        f"{key}: {got} in the engine, {meant[key]} in the resolved JSON"
        for key, got in understood.items()
        if got != meant[key]
    ]
    if wrong:
        raise ConfigError("DeepSpeed understood its configuration differently:\n" + "\n".join(wrong))


def _device(offload) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def check_groups(engine, peaks: list[dict], meant: list[tuple[float, float, int]]) -> None:
    """Compare the rate, decay and number of parameters of each group in the engine with the intended values.

    peaks: the optimizer's groups before the schedule changed them; meant: (rate, decay, number) per group. Raises
    ConfigError if they differ, or if the schedule changes other groups than those that the engine steps.
    """
    trained = _trained(engine.optimizer)
    held = [(*_rates(group), sum(map(num_elements, params))) for group, params in zip(peaks, trained)]
    used, scheduled = engine.optimizer.param_groups, engine.basic_optimizer.param_groups
    if held != meant or [id(group) for group in used] != [id(group) for group in scheduled]:
        raise ConfigError(
            f"{type(engine.basic_optimizer).__name__} has unexpected parameter groups (rate, decay, parameters): "
            f"{held} instead of {meant}: use another optimizer, and report this"
        )


def _keep_adagrads_groups(engine) -> None:
    """Put torch's Adagrad with the run's groups back into ZeRO's optimizer.

    DeepSpeed 0.19.8 makes a second Adagrad over the shards, with one group at the default rate, which the schedule does
    not change. The states of the second Adagrad are correct, so they are moved to the first; values that stages 1 and 2
    derived from the groups are recomputed. check_groups checks that the engine and the schedule use the same groups.
    """
    zero, basic = engine.optimizer, engine.basic_optimizer
    if isinstance(basic, torch.optim.Adagrad) and zero is not basic and zero.optimizer is not basic:
        basic.state = zero.optimizer.state
        zero.optimizer = basic
        if engine.zero_optimization_stage() < 3:
            zero._link_all_hp_params()
            zero._param_slice_mappings = zero._create_param_mapping()


def _take_back_first_step(engine) -> None:
    """Undo the step on zero gradients by which DeepSpeed 0.19.8 allocates optimizer states at stage 0 in bfloat16.

    The step applies weight decay to the fp32 weights, and sets Adam's step count to 1.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "refresh_fp32_params") and not engine.zero_optimization():
        optimizer.refresh_fp32_params()
        optimizer.optimizer.state.clear()
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups)
            same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
            assert all(same(p.float(), copy) for ps, copies in pairs for p, copy in zip(ps, copies))


def _rates(group: dict) -> tuple[float, float]:
    return group["lr"], group.get("weight_decay", 0.0)


def _trained(optimizer) -> list[list[nn.Parameter]]:
    """Return the model's parameters in each group (param_groups of DeepSpeed's optimizers hold flat fp32 copies)."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [group["params"] for group in optimizer.param_groups]
    names = ("bit16_groups", "bf16_groups", "fp16_groups")
    lists = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
    if not hasattr(optimizer, "sub_group_to_group_id"):
        return lists
    merged: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]  # stage 3 splits groups into smaller ones
    for index, params in enumerate(lists):
        merged[optimizer.sub_group_to_group_id[index]] += params
    return merged
