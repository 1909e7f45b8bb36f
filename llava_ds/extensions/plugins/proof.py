"""Check plugins on a few samples before the first step, with gradients that never reach the optimizer.

The check finds losses and gradients that depend on packing, parameters without a gradient, modules that change when
saved and loaded, and logits that the exported model won't reproduce. It changes no results of the run.
"""

import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.config.plugin_calls import described, error_of_plugin, last_returned, place, returned
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.loader import Window, micro_batches
from llava_ds.engine.runner import Runner
from llava_ds.engine.warm_up import discard_gradients
from llava_ds.extensions.active import plugins
from llava_ds.extensions.plugins.hidden_loss import HiddenLoss
from llava_ds.extensions.plugins.isolation import Isolation, Owners, name_of, watching
from llava_ds.extensions.plugins.stored_modules import StoredModules, is_own, slot_of
from llava_ds.model.heads import Logits
from llava_ds.runtime.device_memory import is_out_of_memory
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import Ranks, gather
from llava_ds.tracking.series import COLUMNS
from llava_ds.train.objectives.objective import SFT, MicroLoss, Objective, Wrapped
from llava_ds.train.plan import Plan

TRIED, SEEN = 3, 256  # number of samples to try, and of samples of each kind to choose them from
# Largest relative difference by compute dtype, because rounding depends on the layout of a pack.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
FOR_GRADIENTS = 5  # factor on TOLERANCE
LEAVE_OUT = "or give --check_plugin False to train without this check"
NONE_READS = "; no sample depends on the others of its pack"
NO_OTHERS = "a sample's part must not depend on the others (Batch.cu_seqlens has their starts); fix it"


def prove(plan: Plan, runner: Runner, objective: Objective, ranks: Ranks, mesh: Mesh) -> list[str]:
    """Try the plugins of a run; returns a line. Collective. Raises ConfigError that names the slot at fault."""
    dataset, traits = plan.steps.dataset, plan.args.traits
    if ranks.world_size > mesh.dp or not dataset.is_whole or traits.draws:
        return ["plugins are not checked before training: the samples are not known before, or ranks share them"]
    samples = _different(dataset)
    _check_scales(
        objective, Window([next(micro_batches(dataset, [samples], 0, ranks.device, mesh))], len(samples), 0.0)
    )
    trial = Trial(plan, runner, objective, ranks, mesh, list(_batches(dataset, samples, ranks, mesh)))
    model = runner.engine.module
    with _blaming(plan), _without_dropout(model), _same_buffers(model), StoredModules.of(plan, model, ranks) as stored:
        packed, alone, compared = trial.check_packing()
        reached = {name for each in (packed, alone) for name in each.gradients if is_own(name)}
        stored.check()
        trial.check_logits()
    trains = {name: each.requires_grad for name, each in model.named_parameters() if is_own(name)}
    watched = {name for name, is_trained in trains.items() if is_trained}
    if missing := sorted(watched.difference(*gather(reached, ranks))):
        raise ConfigError(
            f"--plugin {slot_of(missing[0])}: the loss does not reach {', '.join(missing[:8])}: use these parameters, "
            f"freeze them with requires_grad_(False), {LEAVE_OUT}"
        )
    names = " and ".join(f"{name}.py" for name in plugins())
    frozen = f", {len(trains) - len(watched)} are frozen ({', '.join(sorted(trains.keys() - watched)[:4])})"
    frozen = frozen if len(trains) > len(watched) else ""
    return [
        f"{names}: {' and '.join(packed.numbers)} of {len(samples)} samples {compared}; "
        f"the loss reaches all {len(watched)} trained parameters{frozen}; {stored.line} (--check_plugin)"
    ]


@dataclass(frozen=True)
class Sums:
    """Loss and other numbers, summed over some samples, and gradients of parameters and at inputs."""

    numbers: dict[str, float]
    gradients: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """The samples to try: first all in one batch, then each alone."""

    plan: Plan
    runner: Runner
    objective: Objective
    ranks: Ranks
    mesh: Mesh
    batches: list

    @cached_property
    def _owners(self) -> Owners | None:
        pack, *alone = self.batches
        return None if pack.shared is not None else Owners.of(pack, alone)

    def check_packing(self) -> tuple[Sums, Sums, str]:
        """Return the sums over the pack and over the samples alone, and what was compared.

        Raises ConfigError if a sample depends on other samples only with plugins.
        """
        packed, alone = self._layouts()
        self._check_finite(packed, alone)
        for fails, find in ((Trial._differ, partial(self._why, packed, alone)), (Trial._leak, self._leak)):
            if (why := find()) is None:
                continue
            if self._fails_without_plugins(fails):
                return packed, alone, "not compared between layouts of a pack, as the run's own loss mixes samples"
            raise ConfigError(f"--plugin {self._slot(fails)}: {why}, {LEAVE_OUT}")
        isolated = "" if self._owners is None or self.plan.args.training.objective != "sft" else NONE_READS
        return packed, alone, f"in one pack as in a pack each, and the gradients{isolated}"

    def _fails_without_plugins(self, fails: Callable[["Trial"], object]) -> bool:
        """Return True if the check also fails without plugins: some losses (expert balance) mix samples."""
        plain = SFT(num_sources=self.objective.num_sources, grad_ranks=self.mesh.grad_ranks)
        if type(own_loss := _without_plugins(self.objective, plain)) is SFT:
            return False
        with _plain_begin(self.runner.engine.module):
            return bool(fails(replace(self, objective=own_loss))) and not fails(replace(self, objective=plain))

    def _leak(self) -> str | None:
        """Describe a sample's number or gradient that depends on other samples of its pack; None if there is none."""
        pack, *alone = self.batches
        if self.plan.args.training.objective != "sft" or self._owners is None:
            return None  # other objectives compare answers of several samples
        model = self.runner.engine.module

        def run(batch: Batch) -> tuple[dict, dict]:
            sums = self._run(batch)
            return sums.numbers, sums.inputs

        isolation = Isolation(model, pack, self._owners, run, self._values)
        found = isolation.leak([self._values(batch) for batch in alone], self._tolerance)
        return found and f"{found}: {NO_OTHERS}"

    @property
    def _tolerance(self) -> float:
        """Largest relative difference at which two numbers count as equal."""
        tolerance = TOLERANCE[self.plan.resolved.compute_dtype]
        return tolerance * (10 if tolerance == 1e-4 and torch.backends.cuda.matmul.allow_tf32 else 1)

    def _layouts(self) -> tuple[Sums, Sums]:
        """Return the sums over the pack, and over the samples alone."""
        packed, *alone = map(self._run, self.batches)
        for each in alone:
            if each.numbers.keys() != packed.numbers.keys():
                slots, found = _with_slot(self.plan, "part", "objective"), (packed.numbers, each.numbers)
                names = " and of another ".join(map(", ".join, found))
                raise ConfigError(f"--plugin {slots}: the numbers of a micro-batch are {names}: give the same in each")
        inputs = {name_of(name, i): each.inputs[name] for i, each in enumerate(alone) for name in each.inputs}
        return replace(packed, inputs=self._owners.split(packed.inputs) if self._owners else {}), Sums(
            {name: sum(each.numbers[name] for each in alone) for name in packed.numbers},
            {
                name: sum(each.gradients[name] for each in alone if name in each.gradients)
                for name in {name: None for each in alone for name in each.gradients}
            },
            inputs,
        )

    def _differ(self) -> tuple[str, float, float] | None:
        """Compare the pack with its samples alone. Returns the result of difference()."""
        return self.difference(*self._layouts())

    def _check_finite(self, packed: Sums, alone: Sums) -> None:
        """Raise ConfigError for numbers that are not finite."""
        numbers = [item for each in (packed, alone) for item in reversed(each.numbers.items())]
        if bad := [item for item in numbers if not math.isfinite(item[1])]:
            name, value = bad[0]
            raise ConfigError(
                f"--plugin {self._slot(Trial._differ)}: {name} of {len(self.batches) - 1} samples is not "
                f"finite, {value:g}: look for a division by zero, also with no positions, {LEAVE_OUT}"
            )

    def _why(self, packed: Sums, alone: Sums) -> str | None:
        """Describe a number or gradient that differs; None if all are equal."""
        what = f"of {len(self.batches) - 1} samples"
        if (found := self.difference(packed, alone)) is None:
            return None
        if again := self.difference(replace(packed, inputs={}), self._again()):
            return f"{again[0]} {what} is {again[1]:g}, and {again[2]:g} when computed again: draw no random numbers"
        return (
            f"{found[0]} {what} in one pack is {found[1]:g}, but {found[2]:g} over the same samples alone: {NO_OTHERS}"
        )

    def _again(self) -> Sums:
        """Compute the pack again with another random seed."""
        with torch.random.fork_rng([self.ranks.device] if self.ranks.device.type == "cuda" else []):
            torch.manual_seed(1)
            return self._run(self.batches[0])

    def difference(self, packed: Sums, alone: Sums) -> tuple[str, float, float] | None:
        """Return the name and both values of a number or gradient norm that differs."""
        tolerance = self._tolerance
        for name, value in packed.numbers.items():
            if not abs(value - alone.numbers[name]) <= tolerance * max(abs(value), abs(alone.numbers[name])):
                return name, value, alone.numbers[name]
        for gradients, others in ((packed.gradients, alone.gradients), (packed.inputs, alone.inputs)):
            # float16's initial loss scale may be too high for some gradients
            finite = [name for name, each in gradients.items() if math.isfinite(float(each.sum()))]
            wanted = {name: others.get(name, torch.zeros(())) for name in finite}
            norms = {name: norm for name in finite if math.isfinite(norm := float(wanted[name].norm()))}
            least = max(norms.values(), default=0.0) / 100  # smaller norms may be rounding errors
            for name, norm in norms.items():
                limit = FOR_GRADIENTS * tolerance * max(norm, least)
                if not float((gradients[name] - wanted[name].to(gradients[name])).norm()) <= limit:
                    return f"the gradient of {name}", float(gradients[name].norm()), norm
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

    def _slot(self, fails: Callable[["Trial"], object]) -> str:
        """Return the name of the slot at fault: without it, the trial passes the test."""
        plain = replace(self, objective=_innermost(self.objective))
        if not fails(plain):
            slot = "objective" if isinstance(self.objective, Wrapped) else "part"
            slot = "part" if any(each.part for each in self.plan.active.extensions.values()) else slot
            return f"{_with_slot(self.plan, slot)} (the loss)"
        with _plain_begin(self.runner.engine.module):
            if not fails(plain):
                return f"{_with_slot(self.plan, 'part')} (model.begin)"
        return _with_slot(self.plan, "wrap", "choices", "module", "part")

    def _run(self, batch: Batch) -> Sums:
        """Run a micro-batch forward and backward, and collect gradients. The optimizer only gets zeros."""
        engine, seen, hooks = self.runner.engine, {}, []
        before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}

        def watch(name: str, gradient: torch.Tensor) -> torch.Tensor:
            if is_own(name) or gradient.ndim < 2:  # plugins' parameters, and a few small ones
                seen[name] = seen.get(name, 0) + gradient.detach().float()
            return torch.zeros_like(gradient)

        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(partial(watch, name)))
        try:
            with discard_gradients(engine), self._one_pass(), watching(engine.module, batch) as inputs:
                micro = self.objective.forward(engine, batch)
                _check_micro(self.objective, micro, batch.input_ids.device)
                numbers = self._numbers(micro)
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(micro.loss_sum, scale_wrt_gas=False)
        finally:
            for hook in hooks:
                hook.remove()
        if changed := [name for name, value in before.items() if not torch.equal(value, getattr(batch, name))]:
            slots = _with_slot(self.plan, "part", "objective", "wrap")
            raise ConfigError(f"--plugin {slots}: changes Batch.{changed[0]} in place: clone() it first, {LEAVE_OUT}")
        return Sums(numbers, seen, inputs)

    @contextmanager
    def _one_pass(self) -> Iterator[None]:
        """Raise ConfigError for a second forward pass with gradients that ZeRO-3 couldn't accumulate."""
        passes = []

        def count(*_: object) -> None:
            passes.extend([1] * torch.is_grad_enabled())
            if len(passes) > 1 and self.plan.resolved.zero_stage == 3:
                raise ConfigError(
                    f"--plugin {_with_slot(self.plan, 'objective', 'part')}: runs the model twice with gradients for a "
                    "micro-batch, but ZeRO-3 adds gradients of one pass: put both losses in one (HiddenLoss), run the "
                    f"other under torch.no_grad(), or use ZeRO-2, {LEAVE_OUT}"
                )

        handle = self.runner.engine.module.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()

    def _values(self, batch: Batch) -> dict[str, float]:
        """Compute the numbers of a micro-batch without gradients."""
        engine = self.runner.engine
        with torch.no_grad(), discard_gradients(engine):
            return self._numbers(self.objective.forward(engine, batch))

    def _numbers(self, micro: MicroLoss) -> dict[str, float]:
        """Return the loss, and those metrics that are sums over samples."""
        metrics = {name: value for name, value in micro.metrics.items() if name not in self.plan.args.traits.metrics}
        return {name: float(value.detach()) for name, value in {"loss": micro.loss_sum, **metrics}.items()}


def _check_micro(objective: Objective, micro: object, device: torch.device) -> None:
    """Raise ConfigError for a value that is not a MicroLoss, and for metrics named like a column."""
    expected = (
        f"a MicroLoss with a scalar loss_sum that has a gradient, by_source (2, {objective.num_sources}), and metrics "
        f"and means of scalar tensors by name, on {device}"
    )
    if not isinstance(micro, MicroLoss):
        raise returned(type(objective).forward, micro, expected)
    dicts = [each if isinstance(each, Mapping) else {0: None} for each in (micro.metrics, micro.means)]
    tensors = [micro.loss_sum, micro.by_source, *(value for each in dicts for value in each.values())]
    shapes = [(), (2, objective.num_sources), *[()] * (len(tensors) - 2)]
    is_right = all(
        isinstance(each, torch.Tensor) and each.shape == shape and each.device == device
        for each, shape in zip(tensors, shapes)
    )
    if not (is_right and micro.loss_sum.requires_grad and all(isinstance(key, str) for each in dicts for key in each)):
        raise returned(type(objective).forward, micro, expected)
    if taken := COLUMNS & micro.metrics.keys():
        raise ConfigError(f"--plugin: a number of the log is named {min(taken)}, like a column: give it another name")


def _check_scales(objective: Objective, window: Window) -> None:
    """Raise ConfigError if an objective's scales() or num_units() returns unusable values."""
    counts = torch.tensor(window.counts, dtype=torch.float64, device=window.batches[0].input_ids.device)
    scales, units = objective.scales(window, counts), objective.num_units(counts)
    if not (isinstance(scales, list) and [getattr(each, "shape", None) for each in scales] == [()]):
        raise returned(objective.scales, scales, "a list with a factor for each micro-batch, scalar tensors")
    if getattr(units, "shape", None) != ():
        raise returned(objective.num_units, units, "the number of units in the step, from its Counts")


@contextmanager
def _blaming(plan: Plan) -> Iterator[None]:
    """If other code fails inside the context, name the plugins, whose results it couldn't use."""
    try:
        with last_returned() as last:
            yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        if is_out_of_memory(error) or error_of_plugin(error):
            raise
        after = f", after {place(*last[:2]).removeprefix('--plugin ')} returned {described(last[2])}" if last else ""
        at = [frame for frame in traceback.extract_tb(error.__traceback__) if "llava_ds" in frame.filename][-1]
        raise ConfigError(
            f"--plugin {_with_slot(plan, 'part', 'objective', 'choices', 'wrap', 'module')}: a pass over a few samples "
            f"fails in {at.filename}:{at.lineno}{after}: {type(error).__name__}: {' '.join(str(error).split())}: look "
            f"at the shape, dtype and device of what the plugin returned, {LEAVE_OUT}"
        ) from error


def _innermost(objective: Objective) -> Objective:
    while isinstance(objective, Wrapped):
        objective = objective.objective
    return objective


def _without_plugins(objective: Objective, plain: Objective) -> Objective:
    """Return the objective without plugins' additions. plain: the objective to use if a plugin replaced it."""
    is_own = isinstance(objective, HiddenLoss) or type(objective).__module__.split(".")[2] in plugins()
    if not isinstance(objective, Wrapped):
        return plain if is_own else objective
    inner = _without_plugins(objective.objective, plain)
    return inner if is_own else replace(objective, objective=inner)


def _with_slot(plan: Plan, *slots: str) -> str:
    """Name the plugins that fill one of these slots, each with the first slot it fills."""
    found = {name: [slot for slot in slots if getattr(each, slot)] for name, each in plan.active.extensions.items()}
    named = [f"{name}.py: {slots[0]}" for name, slots in found.items() if slots and name in plugins()]
    return " and ".join(named or [f"{name}.py" for name in plugins()])


@contextmanager
def _plain_begin(model: nn.Module) -> Iterator[None]:
    """Run without a plugin's begin() inside the context."""
    own = vars(model).pop("begin", None)
    try:
        yield
    finally:
        if own is not None:
            model.begin = own


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError if a forward pass changes a buffer of a plugin's module."""
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
    """Disable dropout inside the context, because it would differ between a pack and its samples."""
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
    """Choose short samples with different tokens, supervised tokens and images: equal ones hide a dependence."""
    seen = [i for images in (True, False) for i in itertools.islice(dataset.positions(images), SEEN)]
    index, chosen = dataset.index, [0]
    longest = 2 * np.median(index.lengths[seen])
    seen = [i for i in seen if index.num_targets[i] and index.lengths[i] <= longest] or seen
    numbers = np.log1p(np.stack([index.num_targets, index.lengths, index.num_images.astype(float) * 10], 1)[seen])
    has_images = index.num_images[seen] > 0
    while len(chosen) < min(TRIED, len(seen)):
        nearest = np.abs(numbers[:, None] - numbers[chosen]).sum(2).min(1)
        if len(chosen) == TRIED - 1 and has_images[chosen].sum() < min(2, has_images.sum()):
            nearest[~has_images] = -1  # choose two with images: one alone has no other to depend on
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return [seen[i] for i in chosen]


def _batches(dataset: EncodedDataset, samples: list[int], ranks: Ranks, mesh: Mesh):
    """Yield all samples as one micro-batch, and then each alone."""
    layouts = [samples, *([sample] for sample in samples)]
    return (micro.batch for micro in micro_batches(dataset, layouts, 0, ranks.device, mesh))
