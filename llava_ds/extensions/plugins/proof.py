"""Proof of a plugin before the first step: packed equals unpacked, and its parameters get gradients.

It runs a few samples forward and backward with weight zero, as the warm-up does: no number of the run changes.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.loader import micro_batches
from llava_ds.engine.runner import Runner
from llava_ds.engine.warm_up import discard_gradients
from llava_ds.extensions.active import plugins
from llava_ds.model.open.names import OWN
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.train.objectives.objective import Objective
from llava_ds.train.plan import Plan

WITH_IMAGES, WITHOUT = 2, 1  # samples that are tried
# Largest relative difference by the dtype of the computation; rounding depends on the layout of a pack.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
LEAVE_OUT = "or give --check_plugin False to train without this check"


def prove(plan: Plan, runner: Runner, objective: Objective, ranks: Ranks, mesh: Mesh) -> list[str]:
    """Try the plugins of a run; returns a line about it. Collective.

    Raises ConfigError if packed samples give another loss than single ones, or other numbers of the plugins, or if the
    loss does not reach a trained parameter.
    """
    dataset, traits = plan.steps.dataset, plan.args.traits
    if ranks.world_size > mesh.dp or not dataset.is_whole or traits.draws:
        return ["plugins are not checked before training: the samples are not known before, or ranks share them"]
    images = itertools.islice(dataset.positions(images=True), WITH_IMAGES)
    samples = [*images, *itertools.islice(dataset.positions(images=False), WITHOUT)]
    model = runner.engine.module
    watched = {name: parameter for name, parameter in model.named_parameters() if _is_own(name, parameter)}
    reached: set[str] = set()
    hooks = [each.register_hook(lambda _, name=name: reached.add(name)) for name, each in watched.items()]
    try:
        with _without_dropout(model):
            packed, *alone = (_numbers(runner, objective, batch) for batch in _batches(dataset, samples, ranks, mesh))
    finally:
        for hook in hooks:
            hook.remove()
    packed = {name: value for name, value in packed.items() if name not in traits.metrics}  # these need not add up
    summed = {name: sum(each.get(name, 0.0) for each in alone) for name in packed}
    tolerance = TOLERANCE[plan.resolved.compute_dtype]
    names = " and ".join(f"{name}.py" for name in plugins())
    for name, value in packed.items():
        if not abs(value - summed[name]) <= tolerance * max(abs(value), abs(summed[name])):
            raise ConfigError(
                f"--plugin {names}: {name} of {len(samples)} samples in one pack is {value:g}, but {summed[name]:g} "
                "over packs of one: a sample's part must not depend on the others (Batch.cu_seqlens has their starts); "
                f"mend it, {LEAVE_OUT}"
            )
    missing = sorted(set(watched).difference(*gather(reached, ranks)))
    if missing:
        raise ConfigError(
            f"--plugin {names}: the loss does not reach {', '.join(missing[:8])}: use every parameter, freeze it with "
            f"requires_grad_(False), {LEAVE_OUT}"
        )
    return [
        f"{names}: {' and '.join(packed)} of {len(samples)} samples in one pack as in a pack each; the loss reaches "
        f"all {len(watched)} trained parameters (--check_plugin)"
    ]


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, which would differ between a pack and its samples."""
    names = [(each, "p") for each in model.modules() if isinstance(each, nn.Dropout)]
    rate = "attention_dropout"
    names += [(each, rate) for each in model.modules() if isinstance(getattr(each, rate, None), float)]
    before = [getattr(*each) for each in names]
    for each in names:
        setattr(*each, 0.0)
    yield
    for each, value in zip(names, before):
        setattr(*each, value)


def _is_own(name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and name.startswith((OWN, "projector.layers.own."))


def _batches(dataset: EncodedDataset, samples: list[int], ranks: Ranks, mesh: Mesh):
    """Yield all samples as one micro-batch, and then each alone."""
    layouts = [samples, *([sample] for sample in samples)]
    return (micro.batch for micro in micro_batches(dataset, layouts, 0, ranks.device, mesh))


def _numbers(runner: Runner, objective: Objective, batch) -> dict[str, float]:
    """Run a micro-batch forward and backward, and return its loss and further sums."""
    found = {}

    def summed(engine, batch) -> torch.Tensor:
        micro = objective.forward(engine, batch)
        found["loss"] = float(micro.loss_sum.detach())
        found.update((name, float(value)) for name, value in micro.metrics.items())
        return micro.loss_sum

    with discard_gradients(runner.engine):
        runner.warm_up(batch, summed, accumulates=False)
    return found
