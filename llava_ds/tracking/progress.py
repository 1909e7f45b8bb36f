"""Write the numbers of training to the progress bar, metrics.jsonl, metrics.csv, loss.png and trackers."""

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
    """Properties of a run that its log needs.

    title: title of loss.png. name: label of the bar. folder: folder of the log. resumed_step: number of steps before
    this start. peak_flops: FLOP/s of one rank's device. num_units: function from Counts to the number of units over
    which the objective's metrics are means. reads_late: True to read a step's results after the next step is queued.
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
    """Results of some steps, and their numbers while they are copied from the device."""

    results: list
    numbers: "NumbersFromDevice"


class Progress:
    """Takes the result of every step, reads the device only every --logging_steps, and writes on rank 0.

    With reads_late, the copy of a step's numbers from the device starts when the step is queued, and is read after the
    next step is queued, so the device never idles because of the log. At a save, an eval and the end, it is read at
    once. A new number in the log needs one line in _row, or one entry in the objective's metrics.
    """

    def __init__(self, run: RunFacts, plan: StepPlan, trackers: Trackers, ranks: Ranks, mesh: Mesh) -> None:
        """trackers: the trackers opened for --report_to."""
        self.run, self.plan, self.trackers, self.ranks, self.mesh = run, plan, trackers, ranks, mesh
        self.sources = plan.dataset.sources
        self.pending: list = []  # steps not read yet
        self.readings: list[Reading] = []
        self.elapsed_s = 0.0  # time of the steps since the last write of the log
        self.waited_s = 0.0  # seconds that the last read waited; the next step's time includes them
        self.smoothed, self.num_broken = Smoothed(), 0
        if ranks.is_first:
            metrics = run.folder / "metrics.jsonl"
            self.log = MetricsLog(metrics, run.resumed_step)
            self.table = MetricsTable(run.folder / "metrics.csv", metrics)
            self.plot = LossPlot(run.folder / "loss.png", run.title, read_metrics(metrics))
        self.bar = progress_bar(total=plan.num_steps, initial=run.resumed_step, desc=run.name, unit="step")

    def after_step(self, result, flush: bool = False) -> tuple[list, list[dict]]:
        """Take a StepResult from the loop. Returns the results that were read from the device, and their log rows.

        flush: True to write at once, before a checkpoint; its time does not count as step time.
        """
        self.pending.append(result)
        self.elapsed_s += result.step_time_s
        at_once = flush or result.step == self.plan.num_steps
        read = self._write(at_once or result.step % self.run.logging_steps == 0, at_once or not self.run.reads_late)
        if flush:
            self.waited_s = 0.0
        return read

    def flush(self) -> tuple[list, list[dict]]:
        """Write the pending results, and return them and their log rows. Collective."""
        return self._write(True, True)

    def _write(self, is_due: bool, at_once: bool) -> tuple[list, list[dict]]:
        """Write the steps whose copies an earlier call began, and the pending steps if is_due and at_once."""
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
        # The host queues steps ahead of the device, so only the total time of the steps read together is known.
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
        """Write the pending results, end the bar, and draw the loss curve."""
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
        """Wait for the copies, and return the results with numbers instead of tensors."""
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
        """Gather the micro-batch means of all ranks: (dp, micro-batches) from (micro-batches,). Collective."""
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
            "lr": [float(f"{rate:.7g}") for rate in result.lr],  # more digits would only fill the disk
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
        # Long runs log the sources' losses only at every n-th step, to keep the log of many sources small.
        shown = result.step % self.trackers.every == 0 or result.step == self.plan.num_steps
        if result.by_source is not None and shown:
            row["source_losses"] = means_by_source(self.sources, *result.by_source)
        return row if result.means is None else {**row, "micro_batch_losses": result.means}

    def _show(self, rows: list[dict], wait: float) -> None:
        """Show the rows in the bar. wait: fraction of the time that this rank waited for data."""
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
    """Sum the tensors of some steps over the data group, as float64, in one collective."""
    tensors = [tensor for step in steps for tensor in step.values()]
    flat = sum_over(mesh.data_group, torch.cat([tensor.double().flatten() for tensor in tensors]))
    parts = iter(flat.split([tensor.numel() for tensor in tensors]))
    return [{name: next(parts).view(tensor.shape) for name, tensor in step.items()} for step in steps]


class NumbersFromDevice:
    """Copies all tensors of some dicts from the device, in a single asynchronous copy; read() waits for it."""

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
        """Return True for a tensor on the device; with offload, some tensors are on the host already."""
        return isinstance(value, torch.Tensor) and value.device.type == self._device.type

    def _number(self, value: object, parts: Iterator[torch.Tensor]) -> object:
        if self._is_copied(value):
            return next(parts).view(value.shape).tolist()
        return value.double().tolist() if isinstance(value, torch.Tensor) else value


# Layouts of the bar, from long to short.
_BARS = (
    "{l_bar}{bar:10}{r_bar}",
    "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{percentage:.0f}% {n_fmt}/{total_fmt} [<{remaining}{postfix}]",
    "{percentage:.0f}% [<{remaining}{postfix}]",
)


def update_bar(bar: tqdm, num_steps: int, everything: list[str], least: list[str]) -> None:
    """Advance the bar, and show as many numbers after it as fit into the terminal's width.

    everything: all numbers, shown if they fit. least: the essential numbers, shown otherwise, with a bar short enough
    that tqdm does not truncate them.
    """
    shape = bar.format_dict
    for layout, parts in ((_BARS[0], everything), *((layout, least) for layout in _BARS)):
        bar.set_postfix_str(", ".join(parts), refresh=False)
        if bar.disable or shape["ncols"] is None:
            break
        shape |= {"n": bar.n + num_steps, "bar_format": layout, "postfix": bar.postfix}
        if len(tqdm.format_meter(**{**shape, "ncols": None})) + 2 <= shape["ncols"]:  # 2: room for more digits
            break
    bar.bar_format = None if layout == _BARS[0] else layout
    bar.update(num_steps)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory so far in bytes: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
