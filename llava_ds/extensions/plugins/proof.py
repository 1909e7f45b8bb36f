"""Proof of plugins before the first step, on a few samples, with gradients that never reach the optimizer.

It finds losses and gradients that depend on packing, parameters that no loss reaches, modules that a save and a load
change, and logits that the exported model won't give. No number of the run changes.
"""

import itertools
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from llava_ds.config.plugin_calls import error_of_plugin, returned
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.loader import micro_batches
from llava_ds.engine.runner import Runner
from llava_ds.engine.warm_up import discard_gradients
from llava_ds.extensions.active import plugins
from llava_ds.extensions.plugins.stored_modules import StoredModules, is_own, slot_of
from llava_ds.model.heads import Logits
from llava_ds.runtime.device_memory import is_out_of_memory
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.tracking.series import COLUMNS
from llava_ds.train.objectives.objective import MicroLoss, Objective, Wrapped
from llava_ds.train.plan import Plan

TRIED, SEEN = 3, 256  # samples that are tried, and of each kind those that they are chosen from
# Largest relative difference by the dtype of the computation; rounding depends on the layout of a pack.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
FOR_GRADIENTS = 5  # times as much
LEAVE_OUT = "or give --check_plugin False to train without this check"


def prove(plan: Plan, runner: Runner, objective: Objective, ranks: Ranks, mesh: Mesh) -> list[str]:
    """Try the plugins of a run; returns a line about it. Collective. Raises ConfigError with the slot at fault."""
    dataset, traits = plan.steps.dataset, plan.args.traits
    if ranks.world_size > mesh.dp or not dataset.is_whole or traits.draws:
        return ["plugins are not checked before training: the samples are not known before, or ranks share them"]
    samples = _different(dataset)
    trial = Trial(plan, runner, objective, ranks, list(_batches(dataset, samples, ranks, mesh)))
    model = runner.engine.module
    with _blaming(plan), _without_dropout(model), _same_buffers(model), StoredModules.of(plan, model, ranks) as stored:
        packed, alone = trial.layouts()
        trial.compare(packed, alone)
        reached = {name for each in (packed, alone) for name in each.gradients if is_own(name)}
        stored.check()
        trial.check_logits()
    watched = {name for name, each in model.named_parameters() if each.requires_grad and is_own(name)}
    if missing := sorted(watched.difference(*gather(reached, ranks))):
        raise ConfigError(
            f"--plugin {slot_of(missing[0])}: the loss does not reach {', '.join(missing[:8])}: use every parameter, "
            f"freeze it with requires_grad_(False), {LEAVE_OUT}"
        )
    names = " and ".join(f"{name}.py" for name in plugins())
    return [
        f"{names}: {' and '.join(packed.numbers)} of {len(samples)} samples in one pack as in a pack each, and the "
        f"gradients; the loss reaches all {len(watched)} trained parameters; {stored.line} (--check_plugin)"
    ]


@dataclass(frozen=True)
class Sums:
    """Sums of a loss and of other numbers, and gradients, over some samples."""

    numbers: dict[str, float]
    gradients: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """The samples to try: all in one batch, and then each alone."""

    plan: Plan
    runner: Runner
    objective: Objective
    ranks: Ranks
    batches: list

    def layouts(self) -> tuple[Sums, Sums]:
        """Return the sums over the pack, and over the samples alone."""
        packed, *alone = map(self._run, self.batches)
        return packed, Sums(
            {name: sum(each.numbers.get(name, 0.0) for each in alone) for name in packed.numbers},
            {
                name: sum(each.gradients[name] for each in alone if name in each.gradients)
                for name in {name: None for each in alone for name in each.gradients}
            },
        )

    def compare(self, packed: Sums, alone: Sums) -> None:
        """Raise ConfigError for numbers or gradients that are not finite, or differ, and for a loss without any."""
        what = f"of {len(self.batches) - 1} samples"
        numbers = [item for each in (packed, alone) for item in reversed(each.numbers.items())]
        if bad := [item for item in numbers if not math.isfinite(item[1])]:
            name, value = bad[0]
            why = f"{name} {what} is not finite, {value:g}: look for a division by zero, also with no positions"
        elif (found := self.difference(packed, alone)) is None:
            return
        elif again := self.difference(packed, self._again()):
            why = f"{again[0]} {what} is {again[1]:g}, and {again[2]:g} when computed again: draw no random numbers"
        else:
            why = (
                f"{found[0]} {what} in one pack is {found[1]:g}, but {found[2]:g} over the same samples alone: a "
                "sample's part must not depend on the others (Batch.cu_seqlens has their starts); mend it"
            )
        raise ConfigError(f"--plugin {self._slot()}: {why}, {LEAVE_OUT}")

    def _again(self) -> Sums:
        """Compute the pack again, with other random numbers."""
        torch.manual_seed(1)  # no run follows
        return self._run(self.batches[0])

    def difference(self, packed: Sums, alone: Sums) -> tuple[str, float, float] | None:
        """Return the name and both values of a number or gradient norm that differs."""
        tolerance = TOLERANCE[self.plan.resolved.compute_dtype]
        tolerance *= 10 if tolerance == 1e-4 and torch.backends.cuda.matmul.allow_tf32 else 1
        for name, value in packed.numbers.items():
            if not abs(value - alone.numbers[name]) <= tolerance * max(abs(value), abs(alone.numbers[name])):
                return name, value, alone.numbers[name]
        # float16's first loss scale may be too high for some
        finite = [name for name, each in packed.gradients.items() if math.isfinite(float(each.sum()))]
        wanted = {name: alone.gradients.get(name, torch.zeros(())) for name in finite}
        norms = {name: norm for name in finite if math.isfinite(norm := float(wanted[name].norm()))}
        least = max(norms.values(), default=0.0) / 100  # smaller ones are rounding
        for name, norm in norms.items():
            limit = FOR_GRADIENTS * tolerance * max(norm, least)
            if not float((packed.gradients[name] - wanted[name].to(packed.gradients[name])).norm()) <= limit:
                return f"the gradient of {name}", float(packed.gradients[name].norm()), norm
        return None

    def check_logits(self) -> None:
        """Raise ConfigError if a plugin's begin() changes the logits, and its flags don't say so."""
        model = self.runner.engine.module
        if "begin" not in vars(model) or any(flags.differs for flags in self.plan.args.own.values()):
            return
        batch, found = self.batches[0], []
        head = Logits(batch.target_positions)
        for context in (_same_buffers(model), _plain_begin(model)):
            with context, torch.no_grad():
                found.append(self.runner.engine(batch, head).float())
        if (
            float((found[0] - found[1]).abs().max())
            > TOLERANCE[self.plan.resolved.compute_dtype] * found[1].abs().max()
        ):
            raise ConfigError(
                f"--plugin {_with_slot(self.plan, 'part')}: model.begin was replaced and gives other logits; "
                "transformers' class opens the export without it: say so in Flags.differs, "
                f"{LEAVE_OUT}"
            )

    def _slot(self) -> str:
        """Name the slot that makes packed samples differ: the one without which they don't."""
        plain = replace(self, objective=_innermost(self.objective))
        if plain.difference(*plain.layouts()) is None:
            slot = "objective" if isinstance(self.objective, Wrapped) else "part"
            slot = "part" if any(each.part for each in self.plan.active.extensions.values()) else slot
            return f"{_with_slot(self.plan, slot)} (the loss)"
        model = self.runner.engine.module
        if "begin" in vars(model):
            with _plain_begin(model):
                if plain.difference(*plain.layouts()) is None:
                    return f"{_with_slot(self.plan, 'part')} (model.begin)"
        return _with_slot(self.plan, "wrap", "choices", "module", "part")

    def _run(self, batch) -> Sums:
        """Run a micro-batch forward and backward; the optimizer sees gradients of zero."""
        engine, seen, hooks = self.runner.engine, {}, []
        numbers: dict[str, float] = {}
        before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}

        def watch(name: str, gradient: torch.Tensor) -> torch.Tensor:
            if is_own(name) or gradient.ndim < 2:  # and a few small ones
                seen[name] = seen.get(name, 0) + gradient.detach().float()
            return torch.zeros_like(gradient)

        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(partial(watch, name)))
        try:
            with discard_gradients(engine):
                micro = self.objective.forward(engine, batch)
                _check_micro(self.objective, micro)
                numbers["loss"] = float(micro.loss_sum.detach())
                metrics = self.plan.args.traits.metrics  # these need not add up
                numbers |= {name: float(value) for name, value in micro.metrics.items() if name not in metrics}
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(micro.loss_sum, scale_wrt_gas=False)
        finally:
            for hook in hooks:
                hook.remove()
        if changed := [name for name, value in before.items() if not torch.equal(value, getattr(batch, name))]:
            slots = _with_slot(self.plan, "part", "objective", "wrap")
            raise ConfigError(f"--plugin {slots}: changes Batch.{changed[0]} in place: clone() it first, {LEAVE_OUT}")
        return Sums(numbers, seen)


def _check_micro(objective: Objective, micro: object) -> None:
    """Raise ConfigError for what is no MicroLoss, and for numbers with the name of a column."""
    expected = "a MicroLoss with a scalar loss_sum that has a gradient, and scalar tensors as metrics"
    scalars = [micro.loss_sum, *micro.metrics.values()] if isinstance(micro, MicroLoss) else [None]
    if not all(isinstance(each, torch.Tensor) and each.ndim == 0 for each in scalars) or not scalars[0].requires_grad:
        raise returned(type(objective).forward, micro, expected)
    if taken := COLUMNS & micro.metrics.keys():
        raise ConfigError(f"--plugin: a number of the log is named {min(taken)}, like a column: give it another name")


@contextmanager
def _blaming(plan: Plan) -> Iterator[None]:
    """Name the plugins for an error that none of their lines led to: they returned what other code can't use."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        if is_out_of_memory(error) or error_of_plugin(error):
            raise
        at = [frame for frame in traceback.extract_tb(error.__traceback__) if "llava_ds" in frame.filename][-1]
        raise ConfigError(
            f"--plugin {_with_slot(plan, 'part', 'objective', 'choices', 'wrap', 'module')}: a pass over a few samples "
            f"fails in {at.filename}:{at.lineno}: {type(error).__name__}: {' '.join(str(error).split())}: look at the "
            f"shape, dtype and device of what the plugin returned, {LEAVE_OUT}"
        ) from error


def _innermost(objective: Objective) -> Objective:
    while isinstance(objective, Wrapped):
        objective = objective.objective
    return objective


def _with_slot(plan: Plan, *slots: str) -> str:
    """Name the plugins that have one of these slots, and the first that they have."""
    found = {name: [slot for slot in slots if getattr(each, slot)] for name, each in plan.active.extensions.items()}
    named = [f"{name}.py: {slots[0]}" for name, slots in found.items() if slots and name in plugins()]
    return " and ".join(named or [f"{name}.py" for name in plugins()])


@contextmanager
def _plain_begin(model: nn.Module) -> Iterator[None]:
    """Take away a plugin's begin()."""
    own = vars(model).pop("begin")
    try:
        yield
    finally:
        model.begin = own


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError for a buffer of a plugin's module that a forward pass changes."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers() if is_own(name)}
    yield
    for name, (buffer, value) in before.items():
        if not torch.equal(buffer, value):
            raise ConfigError(
                f"--plugin {slot_of(name)}: a forward pass changes the buffer {name}, so it depends on packing and "
                f"ranks: keep such numbers in the batch, {LEAVE_OUT}"
            )


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch dropout off: it differs between a pack and its samples."""
    names = [(each, "p") for each in model.modules() if isinstance(each, nn.Dropout)]
    rate = "attention_dropout"
    names += [(each, rate) for each in model.modules() if isinstance(getattr(each, rate, None), float)]
    before = [getattr(*each) for each in names]
    for each in names:
        setattr(*each, 0.0)
    yield
    for each, value in zip(names, before):
        setattr(*each, value)


def _different(dataset: EncodedDataset) -> list[int]:
    """Choose samples, none long, that differ in supervised tokens, tokens and images: equal ones hide a dependence."""
    seen = [i for images in (True, False) for i in itertools.islice(dataset.positions(images), SEEN)]
    index, chosen = dataset.index, [0]
    longest = 2 * np.median(index.lengths[seen])
    seen = [i for i in seen if index.num_targets[i] and index.lengths[i] <= longest] or seen
    numbers = np.log1p(np.stack([index.num_targets, index.lengths, index.num_images.astype(float) * 10], 1)[seen])
    while len(chosen) < min(TRIED, len(seen)):
        nearest = np.abs(numbers[:, None] - numbers[chosen]).sum(2).min(1)
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return [seen[i] for i in chosen]


def _batches(dataset: EncodedDataset, samples: list[int], ranks: Ranks, mesh: Mesh):
    """Yield all samples as one micro-batch, and then each alone."""
    layouts = [samples, *([sample] for sample in samples)]
    return (micro.batch for micro in micro_batches(dataset, layouts, 0, ranks.device, mesh))
