"""The numbers of a run as it trains: the bar, metrics.jsonl and .csv, loss.png, and the trackers of --report_to."""

import dataclasses
import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from llava_ds.data.loader import Counts
from llava_ds.data.sources.source import means_by_source
from llava_ds.data.step_plan import StepPlan
from llava_ds.files.jsonl import MetricsLog, read_metrics
from llava_ds.model.flops import ModelFlops
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import Ranks, progress_bar
from llava_ds.tracking.metrics_csv import MetricsTable
from llava_ds.tracking.plots import LossPlot
from llava_ds.tracking.series import Smoothed
from llava_ds.tracking.trackers import Trackers


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its log. title: of loss.png; resumed_step: steps that were done before this start;
    peak_flops: of one rank's device, per second; num_units: what the objective's metrics are means over."""

    title: str
    output_dir: Path
    logging_steps: int
    resumed_step: int
    flops: ModelFlops
    peak_flops: float
    num_units: Callable[[Counts], float]


class Progress:
    """Takes the result of every step, reads the device only every --logging_steps, and writes on rank 0.

    A new number in the log is one line in _row, or one entry of the objective's metrics.
    """

    def __init__(self, run: RunFacts, plan: StepPlan, trackers: Trackers, ranks: Ranks, mesh: Mesh) -> None:
        """trackers: what --report_to switches on. All ranks call it together."""
        self.run, self.plan, self.trackers, self.ranks, self.mesh = run, plan, trackers, ranks, mesh
        self.sources = plan.dataset.sources
        self.pending: list = []
        self.waited_s = 0.0  # for the device when it was last read, which is in the time of the step that followed
        self.smoothed, self.num_broken = Smoothed(), 0
        if ranks.is_first:
            metrics = run.output_dir / "metrics.jsonl"
            self.log = MetricsLog(metrics, run.resumed_step)
            self.table = MetricsTable(run.output_dir / "metrics.csv", metrics)
            self.plot = LossPlot(run.output_dir / "loss.png", run.title, read_metrics(metrics))
        name = run.output_dir.name
        self.bar = progress_bar(total=plan.num_steps, initial=run.resumed_step, desc=name, unit="step")

    def after_step(self, result, flush: bool = False) -> tuple[list, list[dict]]:
        """Take a StepResult of the loop. Return the results that were read from the device, and their rows.

        flush: write at once, so that the log does not lag behind a checkpoint, whose time is not a step's.
        """
        self.pending.append(result)
        read = [], []
        if flush or result.step % self.run.logging_steps == 0 or result.step == self.plan.num_steps:
            read = self.flush()
        if flush:
            self.waited_s = 0.0
        return read

    def flush(self) -> tuple[list, list[dict]]:
        """Write what is pending, and return it as after_step does. All ranks call it together."""
        if not self.pending:
            return [], []
        started = time.perf_counter()
        read = self._read()
        waited_s = time.perf_counter() - started
        # Steps are queued faster than the device takes them: only those read together have a time of their own.
        seconds = sum(result.step_time_s for result in read) - self.waited_s + waited_s
        self.waited_s = waited_s
        rates = self._rates(read, seconds)
        rows = [self._row(result, rates) for result in read]
        if self.ranks.is_first:
            for log in (self.log, self.table, self.plot, self.trackers):
                log.write(rows)
            self._show(rows, wait=sum(result.data_wait_s for result in read) / seconds)
        self.pending.clear()
        return read, rows

    def close(self) -> None:
        """End the bar and draw the curve."""
        self.flush()
        self.bar.close()
        if self.ranks.is_first:
            self.plot.close()
            self.log.close()

    def _read(self) -> list:
        """Return what is pending with numbers in place of tensors, in one look at the device."""
        several = len(self.sources) > 1
        parts = [{"loss": r.loss, **({"by_source": r.by_source} if several else {}), **r.metrics} for r in self.pending]
        same = [
            {"counts": r.counts, "grad_norm": r.grad_norm, "skipped_steps": r.skipped_steps, "own_loss": r.loss}
            for r in self.pending
        ]
        both = [{**a, **b} for a, b in zip(summed(parts, self.mesh), same)]
        read = []
        for result, found in zip(self.pending, to_host(both, self.ranks.device)):
            counts = Counts(*map(int, found["counts"]))
            changed = dataclasses.replace(
                result,
                **{name: found[name] for name in ("loss", "grad_norm", "skipped_steps", "own_loss")},
                counts=counts,
                by_source=found.get("by_source"),
                metrics={name: found[name] / max(1, self.run.num_units(counts)) for name in result.metrics},
                means=None if result.means is None else self._means_of_all(result.means),
            )
            read.append(changed)
        return read

    def _means_of_all(self, means: torch.Tensor) -> list[list[float]]:
        """(ranks, micro-batches) of each rank's (micro-batches,)."""
        table = means.new_zeros(self.mesh.dp, len(means))
        table[self.mesh.dp_rank] = means
        return sum_over(self.mesh.data_group, table).tolist()

    def _rates(self, read: list, seconds: float) -> dict[str, float]:
        """Tokens per second and MFU of the steps that were read together."""
        counts = [result.counts for result in read]
        flops = sum(self.run.flops.of(c.tokens, c.pairs, c.tiles, c.targets) for c in counts)
        peak, tokens = self.run.peak_flops * self.ranks.world_size, sum(c.tokens for c in counts)
        return {"tokens_per_s": round(tokens / seconds, 1), "mfu": round(flops / seconds / peak, 6)}

    def _row(self, result, rates: dict[str, float]) -> dict:
        norm = result.grad_norm
        row = {
            "step": result.step,
            "epoch": round(result.step / self.plan.steps_per_epoch, 5),
            "loss": result.loss,
            "lr": [float(f"{rate:.7g}") for rate in result.lr],  # more digits say nothing and fill the disk
            "grad_norm": None if norm is None or not math.isfinite(norm) else float(f"{norm:.7g}"),
            "samples": result.counts.samples,
            "tokens": result.counts.tokens,
            "supervised_tokens": result.counts.targets,
            "step_time_s": round(result.step_time_s, 6),
            "data_wait_s": round(result.data_wait_s, 6),
            **rates,
            "peak_memory_bytes": peak_memory_bytes(self.ranks.device),
            "skipped_steps": int(result.skipped_steps),
            "broken_samples": result.num_planned - result.counts.samples,
        }
        assert not row.keys() & result.metrics.keys(), "an objective's metric has the name of a column"
        row.update(result.metrics)
        # Of long runs every n-th step has a loss for each source, so that logs of mixtures stay small.
        shown = result.step % self.trackers.every == 0 or result.step == self.plan.num_steps
        if result.by_source is not None and shown:
            row["source_losses"] = means_by_source(self.sources, *result.by_source)
        return row if result.means is None else {**row, "micro_batch_losses": result.means}

    def _show(self, rows: list[dict], wait: float) -> None:
        """wait: the part of the time that went by without data, on this rank."""
        for row in rows:
            self.smoothed.add(row["loss"])
        last = rows[-1]
        bad = [f"{last['skipped_steps']:,} steps skipped"] if last["skipped_steps"] else []
        self.num_broken += sum(row["broken_samples"] for row in rows)
        bad += [f"{self.num_broken:,} samples broken"] if self.num_broken else []
        loss, speed = f"loss {self.smoothed.value:.4f}", f"{last['tokens_per_s']:,.0f} tokens/s"
        rate, memory = f"lr {max(last['lr']):.2e}", f"{last['peak_memory_bytes'] / 1e9:.1f} GB"
        wait = f"{max(0.0, wait):.1%}"
        update_bar(
            self.bar,
            len(rows),
            [loss, rate, speed, f"MFU {last['mfu']:.1%}", f"waiting for data {wait}", memory, *bad],
            [loss, speed, f"waiting {wait}", *bad],
        )


def summed(steps: list[dict[str, torch.Tensor]], mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Sum the tensors of some steps over the data group, in one collective, as float64."""
    tensors = [tensor for step in steps for tensor in step.values()]
    flat = sum_over(mesh.data_group, torch.cat([tensor.double().flatten() for tensor in tensors]))
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    return [{name: next(parts).view(tensor.shape) for name, tensor in step.items()} for step in steps]


def to_host(steps: list[dict[str, object]], device: torch.device) -> list[dict[str, object]]:
    """Replace the tensors in some dicts by numbers, or lists of them, in one copy from the device."""
    tensors = [value for step in steps for value in step.values() if isinstance(value, torch.Tensor)]
    flat = torch.cat([tensor.to(device, torch.float64).flatten() for tensor in tensors]).cpu()
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    return [
        {
            name: next(parts).view(value.shape).tolist() if isinstance(value, torch.Tensor) else value
            for name, value in step.items()
        }
        for step in steps
    ]


# What stands before the numbers, with less and less room.
_BARS = (
    "{l_bar}{bar:10}{r_bar}",
    "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{percentage:.0f}% {n_fmt}/{total_fmt} [<{remaining}{postfix}]",
    "{percentage:.0f}% [<{remaining}{postfix}]",
)


def update_bar(bar: tqdm, num_steps: int, everything: list[str], least: list[str]) -> None:
    """Add steps, and show as many numbers behind the bar as its terminal has room for.

    everything: the numbers where there is room for all; least: those that what stands before them makes room for, for
    tqdm cuts a line that is too long at its end, where they are.
    """
    shape = bar.format_dict
    for layout, parts in ((_BARS[0], everything), *((layout, least) for layout in _BARS)):
        bar.set_postfix_str(", ".join(parts), refresh=False)
        if bar.disable or shape["ncols"] is None:
            break
        shape |= {"n": bar.n + num_steps, "bar_format": layout, "postfix": bar.postfix}
        if len(tqdm.format_meter(**{**shape, "ncols": None})) + 2 <= shape["ncols"]:  # digits may be added
            break
    bar.bar_format = None if layout == _BARS[0] else layout
    bar.update(num_steps)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank used so far: on its GPU, or of the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
