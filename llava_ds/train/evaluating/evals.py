"""Evaluation during training: the loss on held-out samples, and measures of extensions.

Evaluation uses no random numbers and leaves the engine unchanged, so it doesn't affect later steps.
"""

import dataclasses
import itertools
import time

import torch

from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.loader import micro_batches
from llava_ds.data.step_plan import Packing, steps_between
from llava_ds.engine.runner import Runner
from llava_ds.extensions.base import Hook, Measure, StepEnd
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import Ranks, broadcast_from_first, print_first
from llava_ds.runtime.waiting import queuing, waiting
from llava_ds.tracking.eval_log import EvalLoss, Evals
from llava_ds.tracking.series import means_by_source
from llava_ds.tracking.trackers import Trackers
from llava_ds.train.objectives.objective import Objective, check_metrics, unseen
from llava_ds.train.plan import Plan


@torch.no_grad()
def eval_loss(
    runner: Runner, dataset: EncodedDataset, packing: Packing, num_workers: int, objective: Objective, mesh: Mesh
) -> EvalLoss:
    """Measure the objective's loss and metrics over a data set. Collective.

    The data set is packed like one large optimizer step, because ZeRO-3 needs equally many micro-batches on all ranks.
    """
    dataset.wait_for(range(len(dataset)))
    of_ranks = packing.lay_out_all(dataset)
    engine = runner.engine
    engine.eval()
    num_sources = len(dataset.sources)
    objective = dataclasses.replace(objective, num_sources=num_sources)
    sums: dict[str, torch.Tensor | int] = {"samples": 0, "targets": 0}
    for micro in micro_batches(dataset, of_ranks[mesh.dp_rank], num_workers, engine.device, mesh):
        with queuing():
            loss = runner.forward(engine, micro.batch, objective.forward)
        if loss is None:  # another rank has the loss
            loss = unseen(objective, engine.device)
        if not runner.every_rank_sees:
            check_metrics(objective, [loss])
        counted = {"samples": micro.counts.samples, "targets": micro.counts.targets}
        found = {**counted, "by_source": loss.by_source, **loss.metrics}
        sums = {name: sums.get(name, 0) + value for name, value in found.items()}
    engine.train()
    with waiting("the eval loss"):
        tensors = [torch.as_tensor(value, dtype=torch.float64, device=engine.device) for value in sums.values()]
        total = sum_over(mesh.data_group, torch.cat([tensor.flatten() for tensor in tensors]))
        total = iter(runner.agree(total).tolist())
    found = {name: list(itertools.islice(total, tensor.numel())) for name, tensor in zip(sums, tensors)}
    (samples,), (targets,), by_source = found.pop("samples"), found.pop("targets"), found.pop("by_source")
    losses, units = by_source[:num_sources], by_source[num_sources:]
    means = means_by_source(dataset.sources, losses, units) if num_sources > 1 else {}
    number = max(1.0, sum(units))
    metrics = {name: value / number for name, (value,) in found.items()}
    return EvalLoss(sum(losses) / number, int(targets), int(samples), means, metrics)


def numbers_of(plan: Plan) -> list[str]:
    """Return the names of all metrics that a run's evaluations report."""
    eval_set, known = plan.evals.eval_set, [name for own in plan.own.values() for name in getattr(own, "numbers", ())]
    if eval_set is not None:
        known += ["loss", *plan.args.traits.metrics]
        known += [f"loss/{name}" for name in eval_set.sources] if len(eval_set.sources) > 1 else []
    return known


class Evaluation:
    """Measures the eval loss and runs the extensions' measures when due.

    measures: the extensions' measures; log: writes evals.jsonl.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        objective: Objective,
        own: list[Measure],
        trackers: Trackers,
        ranks: Ranks,
        mesh: Mesh,
    ) -> None:
        """own: measures whose scores are logged with the eval loss at every evaluation. Collective."""
        args, training, num_steps = plan.args, plan.args.training, plan.steps.num_steps
        self._eval_steps = steps_between(training.eval_steps, num_steps)
        self._runner, self._ranks, self._mesh, self._packing = runner, ranks, mesh, plan.steps.packing
        self._objective, self._own = objective, own
        self._precision = plan.resolved.autocast(ranks.device)
        self._num_workers, self._eval_set = args.data.dataloader_num_workers, plan.evals.eval_set
        self.log = Evals(plan.run_folder, plan.resumed_step, ranks, trackers)
        self._num_steps, self._last_s = num_steps, 0.0  # duration of the last evaluation
        self.measures: list[Measure] = [*own]

    def is_due(self, step: int, last: bool) -> bool:
        """True if an evaluation is due at a step. last: True if it is the run's last step."""
        return self._measures(step, last) or any(each.is_due(step, last) for each in self.measures)

    def was_missed(self, step: int, last: bool) -> bool:
        """True if an evaluation was due at the step of the checkpoint, but the run stopped before it. Collective."""

        def was_done() -> bool:
            return self.log.has(step) or any(each.was_done(step) for each in self.measures)

        return self.is_due(step, last) and not broadcast_from_first(self._ranks, was_done)

    def ahead_s(self, step: int) -> float:
        """Estimate the seconds of an evaluation due at this step or the next, from the last one; 0.0 if none."""
        due = any(self.is_due(at, at == self._num_steps) for at in (step, step + 1))
        return self._last_s if due else 0.0

    def is_over(self) -> bool:
        """True if a measure decides, from the evaluations so far, to end the run. Collective."""
        if not self.measures:
            return False
        why = broadcast_from_first(self._ranks, lambda: [each.why_over() for each in self.measures])
        print_first(*filter(None, why))
        return any(why)

    def run(self, step: int, last: bool) -> bool:
        """Run the measures that are due. Returns True if the run ends after this step. Collective."""
        began = time.perf_counter()
        if self._measures(step, last):
            self._measure(step)
            last = self.is_over() or last
        for each in self.measures:
            if each.is_due(step, last):
                each.run(step)
        self._last_s = time.perf_counter() - began
        return last

    def _measure(self, step: int) -> None:
        """Measure and log the eval loss and the extensions' numbers."""
        began, loss, scores = time.perf_counter(), None, {}
        if self._eval_set is not None:
            loss = eval_loss(
                self._runner, self._eval_set, self._packing, self._num_workers, self._objective, self._mesh
            )
        measured = time.perf_counter()
        for each in self._own:
            scores |= each.scores(self._precision)
        broken = 0 if loss is None else len(self._eval_set) - loss.samples
        seconds = measured - began, time.perf_counter() - measured
        self.log.add(step, loss, scores, broken=broken, seconds=seconds)

    def _measures(self, step: int, last: bool) -> bool:
        has_any = self._eval_set is not None or self._own
        return bool(has_any) and is_at(step, self._eval_steps, last)


class Evaluate(Hook):
    """Runs the evaluation when due."""

    def begin(self) -> None:
        """Run the evaluation that the previous start skipped because it stopped at this step."""
        state, evaluation = self.session.state, self.session.evaluation
        finished = state.step == self.session.plan.steps.num_steps
        if state.step and evaluation.was_missed(state.step, finished):
            self._run(state.step, finished)
        elif state.step and not finished:  # an evaluation at this step may have ended the previous start
            state.is_over = evaluation.is_over()

    def after_step(self, end: StepEnd) -> None:
        if not end.stops and not end.at_checkpoint and self.session.evaluation.is_due(end.step, end.finished):
            end.paused = True
            end.finished = self._run(end.step, end.finished)

    def _run(self, step: int, finished: bool) -> bool:
        """Evaluate. Returns True if the run ends after this step."""
        self.session.watchdog.set_phase("evaluation", step)
        is_last = self.session.evaluation.run(step, finished)
        self.session.state.is_over = is_last and not finished
        return is_last


def is_at(step: int, every: int | None, last: bool) -> bool:
    """True at multiples of `every` (None: no such steps), and at the last step."""
    return last or (every is not None and step % every == 0)
