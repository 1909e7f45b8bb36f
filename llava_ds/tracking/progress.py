"""The numbers of a run in training: the progress bar, metrics.jsonl and .csv, loss.png, and --report_to's trackers."""

import dataclasses
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from llava_ds.data.loader import Counts
from llava_ds.data.step_plan import StepPlan
from llava_ds.files.jsonl import MetricsLog, read_metrics
from llava_ds.runtime.mesh import Mesh, sum_over
from llava_ds.runtime.ranks import Ranks, progress_bar
from llava_ds.runtime.waiting import waiting
from llava_ds.tracking.flops import ModelFlops
from llava_ds.tracking.metric_copies import MetricsTable
from llava_ds.tracking.plots import LossPlot
from llava_ds.tracking.series import COLUMNS, Smoothed, bar_parts, means_by_source
from llava_ds.tracking.trackers import Trackers


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its log.

    title: of loss.png; name: of the bar; folder: of the log; resumed_step: number of steps before this start;
    peak_flops: of one rank's device, per second; num_units: from Counts, the number of units that the objective's
    metrics are means over; reads_late: read a step's results only after the next one is queued.
    """

    title: str
    name: str
    folder: Path
    logging_steps: int
    resumed_step: int
    flops: ModelFlops
    peak_flops: float
    num_units: Callable[[Counts], float]
    reads_late: bool = False


class Reading(NamedTuple):
    """Results of some steps, with their numbers being copied from the device."""

    results: list
    numbers: "NumbersFromDevice"


class Progress:
    """Takes the result of every step, reads the device only every --logging_steps, and writes on rank 0.

    With reads_late, a step's numbers are copied from the device when it is done, and read when the next step is queued:
    the device never idles because of the log. Numbers due at a save, an eval or the end are waited for at once. A new
    number in the log needs one line in _row, or one entry in the objective's metrics.
    """

    def __init__(self, run: RunFacts, plan: StepPlan, trackers: Trackers, ranks: Ranks, mesh: Mesh) -> None:
        """trackers: from --report_to. Collective."""
        self.run, self.plan, self.trackers, self.ranks, self.mesh = run, plan, trackers, ranks, mesh
        self.sources = plan.dataset.sources
        self.pending: list = []  # steps not read yet
        self.readings: list[Reading] = []
        self.elapsed_s = 0.0  # time of the steps since the last write of the log
        self.waited_s = 0.0  # device wait of the last read, part of the next step's time
        self.smoothed, self.num_broken = Smoothed(), 0
        if ranks.is_first:
            metrics = run.folder / "metrics.jsonl"
            self.log = MetricsLog(metrics, run.resumed_step)
            self.table = MetricsTable(run.folder / "metrics.csv", metrics)
            self.plot = LossPlot(run.folder / "loss.png", run.title, read_metrics(metrics))
        self.bar = progress_bar(total=plan.num_steps, initial=run.resumed_step, desc=run.name, unit="step")

    def after_step(self, result, flush: bool = False) -> tuple[list, list[dict]]:
        """Take a StepResult from the loop. Returns the results that were read from the device, and their rows.

        flush: write at once, so that the log is as new as a checkpoint; a checkpoint's time is not part of a step.
        """
        self.pending.append(result)
        self.elapsed_s += result.step_time_s
        at_once = flush or result.step == self.plan.num_steps
        read = self._write(at_once or result.step % self.run.logging_steps == 0, at_once or not self.run.reads_late)
        if flush:
            self.waited_s = 0.0
        return read

    def flush(self) -> tuple[list, list[dict]]:
        """Write the pending results, and return them like after_step. Collective."""
        return self._write(True, True)

    def _write(self, is_due: bool, at_once: bool) -> tuple[list, list[dict]]:
        """Write the steps whose reading began before this call and, if at_once, those that are due now."""
        if not self.readings and not (is_due and self.pending):
            return [], []
        started = time.perf_counter()
        ready, self.readings = self.readings, []
        if is_due and self.pending:
            self.readings.append(self._begin(self.pending))
            self.pending = []
        if at_once:
            ready, self.readings = ready + self.readings, []
        if not ready:
            return [], []
        with waiting("the numbers of a step"):
            read = [result for reading in ready for result in self._end(reading)]
        waited_s = time.perf_counter() - started
        # Steps are queued faster than the device runs them: time is known only for all steps read together.
        seconds = self.elapsed_s - self.waited_s + waited_s
        self.elapsed_s, self.waited_s = 0.0, waited_s
        rates = self._rates(read, seconds)
        rows = [self._row(result, rates) for result in read]
        if self.ranks.is_first:
            for log in (self.log, self.table, self.plot, self.trackers):
                log.write(rows)
            self._show(rows, wait=sum(result.data_wait_s for result in read) / seconds)
        return read, rows

    def close(self) -> None:
        """End the bar and draw the curve."""
        self.flush()
        self.bar.close()
        if self.ranks.is_first:
            self.plot.close()
            self.log.close()

    def _begin(self, results: list) -> Reading:
        """Start copying the numbers of some results, without waiting for the device."""
        several = len(self.sources) > 1
        parts = [{"loss": r.loss, **({"by_source": r.by_source} if several else {}), **r.metrics} for r in results]
        same = [
            {
                "counts": r.counts,
                "grad_norm": r.grad_norm,
                "skipped_steps": r.skipped_steps,
                "own_loss": r.loss,
                "means": None if r.means is None else self._gather_means(r.means),
            }
            for r in results
        ]
        both = [{**a, **b} for a, b in zip(summed(parts, self.mesh), same)]
        return Reading(results, NumbersFromDevice(both, self.ranks.device))

    def _end(self, reading: Reading) -> list:
        """Return the results with numbers instead of tensors."""
        read = []
        for result, found in zip(reading.results, reading.numbers.read()):
            counts = Counts(*map(int, found["counts"]))
            changed = dataclasses.replace(
                result,
                **{name: found[name] for name in ("loss", "grad_norm", "skipped_steps", "own_loss", "means")},
                counts=counts,
                by_source=found.get("by_source"),
                metrics={name: found[name] / max(1, self.run.num_units(counts)) for name in result.metrics},
            )
            read.append(changed)
        return read

    def _gather_means(self, means: torch.Tensor) -> torch.Tensor:
        """Return (ranks, micro-batches) from each rank's (micro-batches,)."""
        table = means.new_zeros(self.mesh.dp, len(means))
        table[self.mesh.dp_rank] = means
        return sum_over(self.mesh.data_group, table)

    def _rates(self, read: list, seconds: float) -> dict[str, float]:
        """Return tokens per second and MFU of the steps that were read together."""
        counts = [result.counts for result in read]
        flops = sum(self.run.flops.of(c.tokens, c.pairs, c.tiles, c.targets, c.tile_pairs) for c in counts)
        peak, tokens = self.run.peak_flops * self.ranks.world_size, sum(c.tokens for c in counts)
        return {"tokens_per_s": round(tokens / seconds, 1), "mfu": round(flops / seconds / peak, 6)}

    def _row(self, result, rates: dict[str, float]) -> dict:
        norm = result.grad_norm
        row = {
            "step": result.step,
            "epoch": round(result.step / self.plan.steps_per_epoch, 5),
            "loss": result.loss,
            "lr": [float(f"{rate:.7g}") for rate in result.lr],  # more digits mean nothing and fill the disk
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
        assert row.keys() <= COLUMNS, "a new column is missing in COLUMNS"
        assert not COLUMNS & result.metrics.keys(), "an objective's metric has a column's name"
        row.update(result.metrics)
        # Long runs log the sources' losses of every n-th step only, so that logs of mixtures stay small.
        shown = result.step % self.trackers.every == 0 or result.step == self.plan.num_steps
        if result.by_source is not None and shown:
            row["source_losses"] = means_by_source(self.sources, *result.by_source)
        return row if result.means is None else {**row, "micro_batch_losses": result.means}

    def _show(self, rows: list[dict], wait: float) -> None:
        """Show the rows in the bar. wait: fraction of the time without data, on this rank."""
        for row in rows:
            self.smoothed.add(row["loss"])
        last = rows[-1]
        bad = [f"{last['skipped_steps']:,} steps skipped"] if last["skipped_steps"] else []
        self.num_broken += sum(row["broken_samples"] for row in rows)
        bad += [f"{self.num_broken:,} samples broken"] if self.num_broken else []
        loss, speed = f"loss {self.smoothed.value:.4f}", f"{last['tokens_per_s']:,.0f} tokens/s"
        rate, memory = f"lr {max(last['lr']):.2e}", f"{last['peak_memory_bytes'] / 1e9:.1f} GB"
        wait, numbers = f"{max(0.0, wait):.1%}", bar_parts(last)
        update_bar(
            self.bar,
            len(rows),
            [loss, *numbers, rate, speed, f"MFU {last['mfu']:.1%}", f"waiting for data {wait}", memory, *bad],
            [loss, *numbers[:1], speed, f"waiting {wait}", *bad],
        )


def summed(steps: list[dict[str, torch.Tensor]], mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Sum the tensors of some steps over the data group, in one collective, as float64."""
    tensors = [tensor for step in steps for tensor in step.values()]
    flat = sum_over(mesh.data_group, torch.cat([tensor.double().flatten() for tensor in tensors]))
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    return [{name: next(parts).view(tensor.shape) for name, tensor in step.items()} for step in steps]


class NumbersFromDevice:
    """A single copy of all tensors in some dicts; only read() waits for it."""

    def __init__(self, steps: list[dict[str, object]], device: torch.device) -> None:
        self._steps, self._device = steps, device
        tensors = [value for step in steps for value in step.values() if self._is_copied(value)]
        self._sizes = [tensor.numel() for tensor in tensors]
        flat = torch.cat([tensor.double().flatten() for tensor in tensors])
        self._copied = None
        if device.type == "cuda":
            flat = flat.to("cpu", non_blocking=True)  # into pinned memory
            self._copied = torch.cuda.Event(blocking=True)  # the host sleeps while it waits
            self._copied.record()
        self._flat = flat

    def read(self) -> list[dict[str, object]]:
        """Return the dicts with numbers or lists of numbers instead of tensors."""
        if self._copied is not None:
            self._copied.synchronize()
        parts = iter(self._flat.split(self._sizes))
        return [{name: self._number(value, parts) for name, value in step.items()} for step in self._steps]

    def _is_copied(self, value: object) -> bool:
        """True for tensors on the device; with offload, some are on the host already."""
        return isinstance(value, torch.Tensor) and value.device.type == self._device.type

    def _number(self, value: object, parts: Iterator[torch.Tensor]) -> object:
        if self._is_copied(value):
            return next(parts).view(value.shape).tolist()
        return value.double().tolist() if isinstance(value, torch.Tensor) else value


# Layouts of the bar before the numbers, each shorter than the previous.
_BARS = (
    "{l_bar}{bar:10}{r_bar}",
    "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{percentage:.0f}% {n_fmt}/{total_fmt} [<{remaining}{postfix}]",
    "{percentage:.0f}% [<{remaining}{postfix}]",
)


def update_bar(bar: tqdm, num_steps: int, everything: list[str], least: list[str]) -> None:
    """Advance the bar, and show as many numbers after it as the terminal has room for.

    everything: all numbers, shown if they fit; least: the essential numbers, for which the bar itself is shortened,
    because tqdm truncates a long line at its end.
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
    """Return this rank's peak memory so far: on its GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
