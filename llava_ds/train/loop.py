"""The training loop."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llava_ds.data.loader import Window
from llava_ds.engine.non_finite import skipped_steps
from llava_ds.engine.runner import Runner
from llava_ds.extensions.base import Hook, StepEnd
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.waiting import queuing
from llava_ds.train.objectives.objective import MicroLoss, Objective, check_metrics, unseen
from llava_ds.train.session import Session
from llava_ds.train.state import StepResult, TrainState


def train(session: Session, hooks: Sequence[Hook]) -> None:
    """Train until the last step or a stop request. After every step, run the hooks in order.

    Raises DataError on every rank if hooks report a problem.
    """
    plan, state, watchdog = session.plan, session.state, session.watchdog
    num_steps = plan.steps.num_steps

    def after_step(result: StepResult) -> float:
        end = StepEnd(result, finished=result.step == num_steps)
        for hook in hooks:
            hook.after_step(end)
        if end.problems:
            for hook in hooks:
                hook.flush()
        end.raise_problems()
        watchdog.set_phase("step", result.step + 1)
        return end.paused_s()

    steps = session.windows()
    with session.memory:
        for hook in hooks:
            hook.begin()
        watchdog.set_phase("step", state.step + 1)
    with session.memory, session.stop.training(plan.args.training.max_run_time, session.ranks):
        run_steps(session.runner, steps, state, num_steps, session.objective, session.mesh, after_step)
    watchdog.set_phase("export", state.step)
    for hook in reversed(hooks):  # Log closes last: its report shows files of the other hooks
        hook.close()


def run_steps(
    runner: Runner,
    windows: Iterator[Window],
    state: TrainState,
    num_steps: int,
    objective: Objective,
    mesh: Mesh,
    after_step: Callable[[StepResult], float],
) -> None:
    """Run optimizer steps until num_steps, state.stops or state.is_over. Does not wait for the device.

    after_step: called after every step on every rank; returns the seconds, such as those of a save, that are not part
    of the step time. A step's time starts when the previous step ends, so work queued on the device is counted once.
    """
    engine = runner.engine
    engine.train()
    started = time.perf_counter()
    while state.step < num_steps and not (state.stops or state.is_over):
        window = next(windows)  # this rank's micro-batches of one optimizer step
        lr = [group["lr"] for group in engine.optimizer.param_groups]
        # Count the samples that the ranks have loaded: fewer than planned if an image broke after it was checked.
        counts = sum_over(mesh.data_group, _on_device(window.counts, engine.device))
        with queuing():
            passes = [micro_steps(runner, window, counts, objective) for _ in range(window.passes)]
            sums = passes[0] if len(passes) == 1 else average_passes(passes)
        state.step += 1
        finished = time.perf_counter()
        result = StepResult(
            step=state.step,
            counts=counts,
            grad_norm=engine.get_global_grad_norm(),
            skipped_steps=skipped_steps(engine),
            lr=lr,
            num_planned=window.num_planned,
            broken=window.broken,
            data_wait_s=window.data_wait_s,
            step_time_s=finished - started,
            **vars(sums),
        )
        started = finished + after_step(result)


@dataclass(frozen=True)
class StepSums:
    """Sums over this rank's micro-batches of one step. For the fields see StepResult."""

    loss: torch.Tensor
    by_source: torch.Tensor
    metrics: dict[str, torch.Tensor]
    means: torch.Tensor | None


def micro_steps(runner: Runner, window: Window, counts: torch.Tensor, objective: Objective) -> StepSums:
    """Run forward, backward and engine step for every micro-batch of one optimizer step.

    counts: Window.counts summed over the data group, a tensor in the order of Counts.
    """
    scales = objective.scales(window, counts)

    def loss_of(i: int, micro: MicroLoss) -> tuple[torch.Tensor, MicroLoss]:
        return micro.loss_sum * scales[i].float(), micro._replace(loss_sum=None)

    done = runner.train(window.batches, objective.forward, loss_of)
    if not runner.every_rank_sees:
        check_metrics(objective, done)
    if not done:  # another rank has the results
        done = [unseen(objective, runner.engine.device)] * len(scales)
    by_source = runner.agree(torch.stack([micro.by_source for micro in done]))  # (micro-batches, 2, sources)
    losses, units = by_source.sum(2).unbind(1)  # the objective's losses, summed in float64
    factors = torch.stack(scales)
    # Multiply by the step's number of units, because the log divides every metric by it.
    weights = units * factors * objective.num_units(counts) / objective.grad_ranks
    return StepSums(
        loss=losses.dot(factors) / objective.grad_ranks,
        by_source=by_source.sum(0),
        metrics={
            **window.metrics,
            **_metrics(runner, done),
            **{name: torch.stack([micro.means[name] for micro in done]).dot(weights) for name in done[0].means},
        },
        means=_means(losses, window) if objective.logs_means else None,
    )


def average_passes(passes: list[StepSums]) -> StepSums:
    """Average several passes over a window."""
    number = len(passes)
    return StepSums(
        loss=sum(each.loss for each in passes) / number,
        by_source=sum(each.by_source for each in passes) / number,
        metrics={name: sum(each.metrics[name] for each in passes) / number for name in passes[0].metrics},
        means=None,
    )


def _on_device(numbers: tuple, device: torch.device) -> torch.Tensor:
    """Copy numbers (n,) to the device as float64, from pinned memory: a pageable copy waits for all queued work."""
    values = torch.tensor(numbers, dtype=torch.float64)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _metrics(runner: Runner, done: list[MicroLoss]) -> dict[str, torch.Tensor]:
    """Sum the metrics of all micro-batches, by name."""
    names = list(done[0].metrics)
    if not names:
        return {}
    sums = torch.stack([torch.stack([micro.metrics[name] for micro in done]).sum() for name in names])
    return dict(zip(names, runner.agree(sums)))


def _means(losses: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the mean loss of each micro-batch from its summed loss; both (micro-batches,)."""
    return torch.stack([total / max(1, micro.num_targets) for total, micro in zip(losses, window.micro_batches)])
