# T tokens of all samples laid end to end, D language-model width
"""Pipeline parallelism: micro-batches pass through the stages of stages.py, alternating forward and backward (1F1B).

Every stage has a separate engine, with ZeRO over the ranks of the stage. All ranks of a pipeline load the same
micro-batches, so both sides know the shapes of hidden states and gradients. Shapes need not be sent, and the host never
waits. DeepSpeed's PipelineModule (0.19.8) sends a shape before each tensor, reads it on the host, and scales gradients
differently. Source of the schedule: arXiv 2104.04473, 2.2.1.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from llava_ds.batch import Batch
from llava_ds.config.arguments import ModelArguments
from llava_ds.engine.non_finite import step_with
from llava_ds.engine.placement import Placement, Share
from llava_ds.engine.runner import Forward
from llava_ds.extensions.pipeline.stages import HIDDEN, Stage, keep_stage, owners, stage_of
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import MediaLayout
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.loading import persistent_buffers
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.runtime.mesh import Mesh
from llava_ds.tracking.flops import flops_of_model


@dataclass(frozen=True)
class OwnedByStages(Placement):
    """Placement in which one stage holds each parameter. everything: the complete model's parameters, in order."""

    everything: tuple[Share, ...] = ()
    buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, stages: dict[str, int], mesh: Mesh) -> "OwnedByStages":
        """Build from a model before it is cut. stages: maps parameter names to stages."""
        shares = (Share(n, tuple(p.shape), p.dtype, owner=stages[n]) for n, p in model.named_parameters())
        place, buffers = mesh.at("pp"), {n: tuple(b.shape) for n, b in persistent_buffers(model).items()}
        own = {"everything": tuple(shares), "buffers": tuple(buffers.items())}
        return cls("pp", place.size, place.index, place.group, **own)

    def shares(self, model: nn.Module) -> Iterator[tuple[Share, nn.Parameter | None]]:
        """Yield all parameters, each with this stage's tensor or None."""
        own = dict(model.named_parameters())
        for share in self.everything:
            yield share, own.get(share.name)


def cutting(mesh: Mesh) -> Callable:
    """Return the function that drops a micro-batch's images on stages that don't use them."""
    return with_all if mesh.at("pp").index == 0 else without_images


def with_all(batch: Batch, options: ImageOptions, layouts: Sequence[MediaLayout]) -> tuple[Batch, list[int]]:
    """Return the unchanged micro-batch, and the indices of all its tiles."""
    return batch, list(range(len(batch.pixel_values)))


def without_images(batch: Batch, options: ImageOptions, layouts: Sequence[MediaLayout]) -> tuple[Batch, list[int]]:
    """Return a micro-batch without images, for stages that don't need to decode them."""
    return batch, []


def parallel_unit(mesh: Mesh, model: nn.Module) -> SimpleNamespace:
    """Return the "mpu" object for DeepSpeed, with Megatron's names. Stages count as model parallelism.

    model: this rank's stage.
    """
    for parameter in model.parameters():
        parameter.model_parallel = True  # otherwise DeepSpeed only counts gradients of the first stage
    place = mesh.at("pp")
    return SimpleNamespace(
        get_data_parallel_group=lambda: mesh.data_group,
        get_data_parallel_world_size=lambda: mesh.grad_ranks,
        get_data_parallel_rank=lambda: torch.distributed.get_rank(mesh.data_group),
        get_data_parallel_group_ranks=lambda: torch.distributed.get_process_group_ranks(mesh.data_group),
        get_model_parallel_group=lambda: place.group,
        get_model_parallel_world_size=lambda: place.size,
        get_model_parallel_rank=lambda: place.index,
        get_tensor_model_parallel_world_size=lambda: 1,
        get_tensor_model_parallel_rank=lambda: 0,
        get_pipeline_model_parallel_world_size=lambda: place.size,
    )


def build(model: LlavaModel, plan: ModelPlan, args: ModelArguments, mesh: Mesh) -> list[str]:
    """Reduce a model without weights to this rank's stage."""
    place = mesh.at("pp")
    flops = flops_of_model(model, plan.text_config, plan.tower, args)
    counts, stages = owners(model, flops, plan.tower, place.size)
    model.placement = OwnedByStages.of(model, stages, mesh)
    keep_stage(model, counts, place.index, place.group)
    return [f"layers of the pipeline's stages: {', '.join(map(str, counts))}"]


def options(model: nn.Module, mesh: Mesh) -> dict[str, object]:
    """Return the arguments of deepspeed.initialize for stages."""
    return {"mpu": parallel_unit(mesh, model)}


def started(engine, mesh: Mesh) -> None:
    """Run one collective per pipeline, and make the gradient norm a sum over its stages.

    NCCL connects all ranks of a group in the first collective. It must not be a send.
    """
    torch.distributed.all_reduce(torch.zeros(1, device=engine.device), group=mesh.at("pp").group)
    sum_norm_over_stages(engine.optimizer, mesh)


def sum_norm_over_stages(optimizer, mesh: Mesh) -> None:
    """Make the optimizer compute the gradient norm over all stages of a pipeline, with a single sum.

    At ZeRO-1, and at ZeRO-0 in bf16, DeepSpeed 0.19.8 sums over stages once per parameter group. The first stage has
    more groups, for tower and projector, so ranks would deadlock. DeepSpeed's other optimizers compute one norm over
    all groups.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        _sum_norm_of_zero(optimizer, mesh)
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        device = optimizer.fp32_groups[0][0].device

        def of_all(norm_list: list) -> float:
            squares = torch.as_tensor(of_groups(norm_list), dtype=torch.float32, device=device).square()
            torch.distributed.all_reduce(squares, group=mesh.at("pp").group)
            return squares.sqrt().item()  # sync is fine: the optimizer step reads this on the host anyway

        of_groups, of_group = unfused_optimizer.get_global_norm, unfused_optimizer.get_weight_norm
        own = {"get_weight_norm": lambda tensors, mpu: of_group(tensors), "get_global_norm": of_all}
        step_with(optimizer, unfused_optimizer, **own)


def _sum_norm_of_zero(optimizer: DeepSpeedZeroOptimizer, mesh: Mesh) -> None:
    of_stage = optimizer.scaled_global_norm

    def of_all(norm_type: int = 2) -> torch.Tensor:
        assert optimizer.model_parallel_group is mesh.at("pp").group, "ZeRO sums over other ranks than a pipeline's"
        optimizer.model_parallel_group = None  # compute the norm of this stage only
        squares = of_stage(norm_type).square()  # inf if a gradient is not finite
        optimizer.model_parallel_group = mesh.at("pp").group
        torch.distributed.all_reduce(squares, group=mesh.at("pp").group)
        return squares.sqrt()

    optimizer.scaled_global_norm = of_all


class Pipelined:
    """The runner of a rank with a pipeline stage. Only the last stage returns results."""

    every_rank_sees = False

    def __init__(self, engine) -> None:
        self.engine, self.stage = engine, stage_of(engine)

    def train(
        self, batches: Sequence[Batch], forward: Forward, loss_of: Callable[[int, Any], tuple[torch.Tensor, Any]]
    ) -> list[Any]:
        """Implement Runner.train. Stages synchronize in the last micro-batch's step, when weights are updated."""
        refresh_tied(self.engine.module, batches[0].input_ids.device)
        found = forward_and_backward(self.engine, batches, forward, loss_of)
        self.engine.step()
        return found

    def warm_up(self, batch: Batch, forward: Forward, accumulates: bool) -> None:
        """Implement Runner.warm_up, with as many concurrent micro-batches as a stage can have."""
        micro_steps = self.engine.micro_steps
        refresh_tied(self.engine.module, batch.input_ids.device)
        batches = [batch] * (self.stage.size if accumulates else 1)
        forward_and_backward(self.engine, batches, forward, lambda _, loss_sum: (loss_sum * 0, None))
        self.engine.micro_steps = micro_steps

    def forward(self, model: Any, batch: Batch, forward: Forward) -> Any | None:
        """Implement Runner.forward."""
        refresh_tied(getattr(model, "module", model), batch.input_ids.device)
        neighbours = _Neighbours(self.stage, batch.input_ids.device)
        hidden, _ = neighbours.exchange(wants_before=_shape(batch, self.stage))
        batch = _with_hidden(batch, hidden)
        if self.stage.is_last:
            return forward(model, batch)
        neighbours.exchange(after=model(batch))
        return None

    def agree(self, value: torch.Tensor) -> torch.Tensor:
        """Implement Runner.agree: returns the last stage's value."""
        torch.distributed.broadcast(value, group=self.stage.group, group_src=self.stage.size - 1)
        return value


def forward_and_backward(
    engine,
    batches: Sequence[Batch],
    forward: Forward,
    loss_of: Callable[[int, Any], tuple[torch.Tensor, Any]],
) -> list[Any]:
    """Run forward and backward of every micro-batch of an optimizer step on this stage.

    forward: called on the last stage with the engine and a micro-batch. loss_of: maps a micro-batch's index and
    forward's result to the scalar for backward and a detached value to return (a graph would keep activations alive).
    Returns these values on the last stage, an empty list on others. The caller runs the engine's step of the last
    micro-batch. It updates the weights and synchronizes the stages. Before its first backward, a stage runs one forward
    per later stage, then it alternates.
    """
    stage = stage_of(engine)
    neighbours = _Neighbours(stage, engine.device)
    number, ahead = len(batches), min(stage.size - 1 - stage.index, len(batches))
    waiting: deque[tuple[torch.Tensor | None, Any]] = deque()  # inputs and outputs of micro-batches that await backward
    found, tied = [], _TiedGradient(engine) if stage.is_last and stage.tied_rows else None

    def forward_one(i: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        batch = _with_hidden(batches[i], None if hidden is None else hidden.requires_grad_())
        output = forward(engine, batch) if stage.is_last else engine(batch)
        waiting.append((hidden, output))
        return None if stage.is_last else output.detach()

    def backward_one(i: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        hidden, output = waiting.popleft()
        if i > 0:
            engine.step()  # ends the previous micro-batch
        engine.set_gradient_accumulation_boundary(i == number - 1)
        if stage.is_last:
            loss, kept = loss_of(i, output)
            found.append(kept)
        else:
            loss = backward_from(output, gradient)
        if stage.is_first and stage.tied_rows and i == number - 1:
            loss = loss + _tied_gradient(engine)
        engine.backward(loss, scale_wrt_gas=False)
        if tied is not None:
            tied.add()
        return None if hidden is None else hidden.grad

    for i in range(ahead):
        neighbours.exchange(after=forward_one(i, neighbours.exchange(wants_before=_shape(batches[i], stage))[0]))
    received = None
    if ahead < number:
        received, _ = neighbours.exchange(wants_before=_shape(batches[ahead], stage))
    for i in range(number - ahead):
        output = forward_one(i + ahead, received)
        _, gradient = neighbours.exchange(after=output, wants_after=_shape(batches[i], stage))
        coming = None if i + ahead + 1 == number else _shape(batches[i + ahead + 1], stage)
        received, _ = neighbours.exchange(before=backward_one(i, gradient), wants_before=coming)
    for i in range(number - ahead, number):
        _, gradient = neighbours.exchange(wants_after=_shape(batches[i], stage))
        neighbours.exchange(before=backward_one(i, gradient))
    if tied is not None:
        tied.send(stage)
    return found


def refresh_tied(model: nn.Module, device: torch.device) -> None:
    """Send a tied embedding to the last stage, the output layer's copy: before each step, and once in eval mode."""
    stage = model.stage
    if model.language_model.tied_copy.is_fresh and not model.training:
        return
    model.language_model.tied_copy.is_fresh = True
    if stage.tied_rows and stage.is_first:
        _move(torch.distributed.isend, _embedding(model).detach(), stage, stage.size - 1)
    if stage.tied_rows and stage.is_last:
        output = model.language_model.get_output_embeddings()
        if output.weight is None:
            shape = stage.tied_rows, stage.width
            output.weight = torch.empty(shape, dtype=stage.dtype, device=device, requires_grad=True)
        _move(torch.distributed.irecv, output.weight.detach(), stage, 0)


def _embedding(model: nn.Module) -> nn.Parameter:
    return model.language_model.get_input_embeddings().weight


class _TiedGradient:
    """Sums the gradient of the last stage's output layer over micro-batches, in data_types.grad_accum_dtype.

    The first stage rounds the sum once to the weights' dtype. It also rounds the embedding's gradient per micro-batch.
    """

    def __init__(self, engine) -> None:
        self._weight = engine.module.language_model.get_output_embeddings().weight
        self._dtype = _accumulation_dtype(engine, self._weight)
        self._sum: torch.Tensor | None = None

    def add(self) -> None:
        """Add the gradient from the latest backward."""
        gradient, self._weight.grad = self._weight.grad, None
        if gradient is not None and self._sum is not None:
            self._sum += gradient
        elif gradient is not None:
            self._sum = gradient.to(self._dtype)

    def send(self, stage: Stage) -> None:
        """Send the sum to the first stage, or zeros if the head does not use the output layer."""
        gradient = torch.zeros_like(self._weight, dtype=self._dtype) if self._sum is None else self._sum
        _move(torch.distributed.isend, gradient, stage, 0)


def _accumulation_dtype(engine, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype in which DeepSpeed accumulates a weight's gradients, at least as precise as the weight."""
    return torch.promote_types(weight.dtype, engine.get_data_types()[1])


def _tied_gradient(engine) -> torch.Tensor:
    """Return a scalar whose backward adds the output layer's gradient to the embedding's."""
    stage, weight = stage_of(engine), _embedding(engine.module)
    gradient = torch.empty_like(weight, dtype=_accumulation_dtype(engine, weight), requires_grad=False)
    _move(torch.distributed.irecv, gradient, stage, stage.size - 1)
    return backward_from(weight, gradient.to(weight.dtype))


def _move(operation: Callable, tensor: torch.Tensor, stage: Stage, other: int) -> None:
    """Send a tensor to the stage `other`, or receive it from there. operation: isend or irecv."""
    peer = torch.distributed.get_global_rank(stage.group, other)
    for work in torch.distributed.batch_isend_irecv([torch.distributed.P2POp(operation, tensor, peer, stage.group)]):
        work.wait()


def _with_hidden(batch: Batch, hidden: torch.Tensor | None) -> Batch:
    return batch if hidden is None else batch.with_extra(**{HIDDEN: hidden})


def _shape(batch: Batch, stage: Stage) -> tuple[int, int, int]:
    return 1, batch.input_ids.shape[1], stage.width


def backward_from(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a scalar whose backward continues with the gradient of `output` received from the next stage.

    Ignores DeepSpeed's scaling of the scalar, because the last stage has already applied it.
    """
    return _Resumed.apply(output, gradient)


class _Resumed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


class _Neighbours:
    """Exchanges tensors with the previous and next stages, if there are such stages."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self._stage, self._device = stage, device

    def exchange(
        self,
        before: torch.Tensor | None = None,
        after: torch.Tensor | None = None,
        wants_before: tuple[int, ...] | None = None,
        wants_after: tuple[int, ...] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send tensors to the previous and next stages, and return the received tensors, of the given shapes.

        Sends and receives are batched into one operation, so that neighbours can't deadlock.
        """
        stage, operations, found = self._stage, [], []
        for step, sent, wanted in ((-1, before, wants_before), (1, after, wants_after)):
            if not 0 <= stage.index + step < stage.size:
                found.append(None)
                continue
            peer = torch.distributed.get_global_rank(stage.group, stage.index + step)
            if sent is not None:
                operations.append(
                    torch.distributed.P2POp(torch.distributed.isend, sent.contiguous(), peer, stage.group)
                )
            coming = None
            if wanted is not None:
                coming = torch.empty(wanted, dtype=stage.dtype, device=self._device)
                operations.append(torch.distributed.P2POp(torch.distributed.irecv, coming, peer, stage.group))
            found.append(coming)
        if operations:
            for work in torch.distributed.batch_isend_irecv(operations):
                work.wait()
        return tuple(found)
