"""Skip optimizer steps whose gradients are not finite, without waiting for the device.

To skip such a step, DeepSpeed 0.19.8 reads the gradient norm on the host, at ZeRO 1 to 3 and at stage 0 in bf16; with
clipping, it reads it again per parameter group. At stage 0 in fp32, and at stages 1 and 2 in bf16 with
bf16.check_grad_overflow false, it checks nothing: one such step ruins all weights. torch's fused Adam accepts a tensor
on the device, found_inf (meant for GradScaler), and leaves weights, moments and step count unchanged if it is 1. With
this optimizer, this module computes the norm in one collective and replaces DeepSpeed's checks. The host does not see
that a step is skipped: the schedule advances, and skipped steps are counted on the device. Every step asserts that the
norm was computed here exactly once, and that Adam stepped after it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from llava_ds.engine.placement import Placement
from llava_ds.runtime.mesh import Group
from llava_ds.runtime.waiting import waiting

SKIPPED = "llava_ds_skipped_steps"  # attribute of the engine: number of steps not yet settled, a tensor on the device
NORM_NUMBERS = 2**24  # most elements of a gradient that are converted to float64 at a time
CLIP_EPSILON = 1e-6  # DeepSpeed and torch add it to the norm before dividing by it


def guard_steps(engine, placement: Placement) -> None:
    """Skip non-finite steps on the device, if the optimizer is torch's fused Adam on the same device as its weights.

    All other optimizers keep DeepSpeed's own check. placement: the placement of the engine's parameters on the ranks.
    """
    optimizer, adam = engine.optimizer, engine.basic_optimizer
    if not _is_fused_adam(adam) or engine.zero_cpu_offload() or _scales_loss(engine):
        return
    if not engine._config.zero_config.compute_grad_norm:
        return  # the JSON disables the norm, and with it the check
    setattr(engine, SKIPPED, torch.zeros((), dtype=torch.int64, device=engine.device))

    assert adam._step_supports_amp_scaling, "torch's fused Adam doesn't read found_inf any more"
    judged = stepped = 0
    adams_own = adam.step

    @functools.wraps(adams_own)  # torch's schedulers look for an attribute of the wrapped step
    def counted(*args, **kwargs):
        nonlocal stepped
        assert getattr(adam, "found_inf", None) is not None, "DeepSpeed lets Adam step before the guard's norm"
        stepped += 1
        return adams_own(*args, **kwargs)

    adam.step = counted

    def judge(norm: torch.Tensor) -> torch.Tensor:
        """Make Adam skip the step if the norm is not finite. Returns the norm."""
        nonlocal judged
        judged += 1
        invalid = ~torch.isfinite(norm)
        adam.found_inf = invalid.float()
        getattr(engine, SKIPPED).add_(invalid)
        return norm

    of_all = _Norm(placement.counted(engine.module), placement.group)
    beside_zero = _Norm(None, None) if placement.in_data else of_all
    if isinstance(optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
        _guard_zero(optimizer, judge, beside_zero)
    elif isinstance(optimizer, BF16_Optimizer):
        _guard_bf16(optimizer, judge, beside_zero, of_all)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        _guard_unfused(optimizer, judge, of_all)
    else:
        _guard_plain(engine, judge, of_all)
    step = optimizer.step

    @functools.wraps(step)
    def asserted(*args, **kwargs):
        before = judged, stepped
        result = step(*args, **kwargs)
        # With bf16.check_grad_overflow true, DeepSpeed may skip the step before computing the norm.
        if not getattr(optimizer, "overflow", False):
            assert judged == before[0] + 1, "DeepSpeed took a step without the guard's norm"
            assert stepped > before[1], "DeepSpeed took a step without the guarded Adam"
        adam.found_inf = None  # valid for this step only
        return result

    optimizer.step = asserted


def skipped_steps(engine) -> int | torch.Tensor:
    """Return the number of skipped steps so far, as a tensor if they are counted on the device."""
    on_device = getattr(engine, SKIPPED, None)
    return engine.skipped_steps if on_device is None else on_device + engine.skipped_steps


def settle_skipped_steps(engine) -> None:
    """Add the device's count to the engine's, to save it in checkpoints. Waits for the device."""
    if hasattr(engine, SKIPPED):
        with waiting("the count of skipped steps"):
            engine.skipped_steps += int(getattr(engine, SKIPPED))
        getattr(engine, SKIPPED).zero_()


def _is_fused_adam(optimizer: object) -> bool:
    return isinstance(optimizer, torch.optim.Adam) and all(group["fused"] for group in optimizer.param_groups)


def _scales_loss(engine) -> bool:
    """True if the loss is scaled: DeepSpeed adjusts the scale on the host after a skipped step."""
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return engine.fp16_enabled() or scaler is not None


class _Norm(NamedTuple):
    """The L2 norm of gradients over the ranks of `group` (None: only this rank). counted: parameters whose gradients
    this rank contributes (None: all)."""

    counted: set[torch.Tensor] | None
    group: Group

    def own(self, gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients that this rank counts."""
        if self.counted is None:
            return gradients
        return [g for g, p in zip(gradients, parameters) if p in self.counted]

    def over(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm over all ranks, from each rank's own norm."""
        if self.group is None:
            return norm
        squares = norm.square()
        torch.distributed.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def of(self, gradients: list[torch.Tensor], parameters: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the norm over all ranks, at stage 0."""
        return self.over(_norm(self.own(gradients, parameters), device)).float()


def _guard_zero(optimizer, judge: Callable[[torch.Tensor], torch.Tensor], norm: _Norm) -> None:
    """Guard stages 1 to 3, at which every rank holds a shard of each gradient."""
    is_stage_3 = hasattr(optimizer, "sub_group_to_group_id")
    parameters = optimizer.fp16_groups if is_stage_3 else optimizer.params_in_partition

    def total_norm() -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for i, params in enumerate(parameters):  # averaged_gradients may contain padding tensors
            own = [g for g in optimizer.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            parts += norm.own(own, params)
        squares = _norm(parts, optimizer.device).square()
        torch.distributed.all_reduce(squares, group=optimizer.dp_process_group)
        return judge(norm.over(squares.sqrt()).float())

    if is_stage_3:  # stage 3 expects a list of norms, and combines it
        optimizer._get_norm_groups = lambda: [total_norm()]
    else:
        optimizer.scaled_global_norm = total_norm
    step_with(optimizer, sys.modules[type(optimizer).__module__], is_invalid_grad_norm=lambda norm: False)


def _guard_bf16(
    optimizer, judge: Callable[[torch.Tensor], torch.Tensor], norm_of_copies: _Norm, norm_of_own: _Norm
) -> None:
    """Guard stage 1 in bf16 with gradients accumulated in fp32, at which every rank holds all reduced gradients.

    DeepSpeed first computes the norm of the gradients that a rank counts. It then adds the norm of groups marked moe,
    whose parameters differ between ranks.
    """
    device = optimizer.fp32_groups_flat_partition[0].device

    def norm_of(input_tensors, **_) -> torch.Tensor:
        norm = norm_of_copies.over(_norm(input_tensors, device))
        return norm if optimizer.has_moe_layers else judge(norm.float())

    def with_marked(norm, by_group, **_) -> torch.Tensor:
        marked = _norm([tensor for tensors in by_group.values() for tensor in tensors], device)
        return judge((norm.square() + norm_of_own.over(marked).square()).sqrt().float())

    step_with(
        optimizer,
        bf16_optimizer,
        get_global_norm_of_tensors=norm_of,
        get_norm_with_moe_layers=with_marked,
        is_invalid_grad_norm=lambda norm: False,
        clip_tensors_by_global_norm=lambda input_tensors, max_norm, global_norm, **_: _clip(
            input_tensors, max_norm, global_norm
        ),
    )


def _guard_unfused(optimizer, judge: Callable[[torch.Tensor], torch.Tensor], norm: _Norm) -> None:
    """Guard stage 0 in bf16 with fp32 copies: replace DeepSpeed's step: it reads every tensor's norm on the host."""

    def step(closure=None) -> None:
        weights = [p for group in optimizer.fp16_groups for p in group]
        copies = [p for group in optimizer.fp32_groups for p in group]
        for weight, copy in zip(weights, copies):
            copy.grad = torch.zeros_like(copy) if weight.grad is None else weight.grad.to(copy.dtype)
        gradients = [copy.grad for copy in copies]
        optimizer._global_grad_norm = judge(norm.of(gradients, weights, copies[0].device))
        if optimizer.clip_grad > 0:
            _clip(gradients, optimizer.clip_grad, optimizer._global_grad_norm)
        optimizer.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, copies)
        for copy in copies:
            copy.grad = None

    optimizer.step = step


def _guard_plain(engine, judge: Callable[[torch.Tensor], torch.Tensor], norm: _Norm) -> None:
    """Guard stage 0 in fp32: clip inside the optimizer's step, and disable the engine's clipping before it."""
    adam, step = engine.optimizer, engine.optimizer.step
    engine.clip_fp32_gradients = lambda: None

    @functools.wraps(step)
    def guarded(*args, **kwargs):
        trained = [p for group in adam.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in trained]
        adam._global_grad_norm = judge(norm.of(gradients, trained, engine.device))  # the engine reads it from there
        if engine.gradient_clipping() > 0:
            _clip(gradients, engine.gradient_clipping(), adam._global_grad_norm)
        return step(*args, **kwargs)

    adam.step = guarded


def step_with(optimizer, module, **others: Callable) -> None:
    """Replace functions in a module while the optimizer's step runs. others: maps their names to the replacements."""
    step = optimizer.step

    def guarded(*args, **kwargs):
        with _replaced(module, others):
            return step(*args, **kwargs)

    optimizer.step = guarded


@contextlib.contextmanager
def _replaced(module, others: dict[str, Callable]) -> Iterator[None]:
    own = {name: getattr(module, name) for name in others}
    vars(module).update(others)
    try:
        yield
    finally:
        vars(module).update(own)


def _norm(tensors: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Return the joint L2 norm of all tensors, a float64 scalar, summed like DeepSpeed's."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    pieces = [piece for tensor in tensors for piece in _pieces(tensor.detach())]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in pieces]))


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a tensor into parts small enough for float64 copies."""
    return (tensor,) if tensor.numel() <= NORM_NUMBERS else tensor.flatten().split(NORM_NUMBERS)


def _clip(tensors: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    torch._foreach_mul_(tensors, (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0))
