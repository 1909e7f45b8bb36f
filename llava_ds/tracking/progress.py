"""What a person sees while it trains, and the files that hold the same: the bar, metrics.jsonl and .csv, loss.png."""

import dataclasses
import math
import resource
import time
from pathlib import Path

import torch
from tqdm import tqdm

from llava_ds.data.loader import Counts
from llava_ds.data.sources.source import means_by_source
from llava_ds.files.jsonl import MetricsLog, read_metrics
from llava_ds.model.flops import ModelFlops
from llava_ds.runtime.ranks import Ranks, all_sum, progress_bar
from llava_ds.tracking.metrics_csv import MetricsTable
from llava_ds.tracking.page import leave_report
from llava_ds.tracking.plots import LossPlot
from llava_ds.tracking.series import Smoothed
from llava_ds.tracking.trackers import Trackers


class Progress:
    """Takes every step's result, reads the device only every logging_steps, and writes on rank 0."""

    def __init__(
        self,
        output_dir: Path,
        title: str,
        *,
        resume_step: int,
        max_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        logging_steps: int,
        sources: list[str],
        flops: ModelFlops,
        peak_flops: float,
        skipped,
        skipped_steps,
        spikes,
        ranks: Ranks,
        monitor,
        trackers: Trackers,
    ) -> None:
        """title: of loss.png; batch_size: samples of an optimizer step; sources: the data's names; peak_flops: of this
        rank's device, per second; monitor: the engine's, which feeds what the DeepSpeed JSON switches on (TensorBoard,
        CSV, W&B, Comet); trackers: what --report_to switches on."""
        self.batch_size, self.monitor, self.trackers = batch_size, monitor, trackers
        self.output_dir, self.ranks = output_dir, ranks
        self.max_steps, self.steps_per_epoch, self.logging_steps = max_steps, steps_per_epoch, logging_steps
        # Of long runs every n-th step has a loss for each source, so that logs of mixtures stay small.
        self.sources, self.source_steps = sources, trackers.every
        self.flops, self.peak_flops = flops, peak_flops * ranks.world_size
        self.skipped, self.skipped_steps, self.spikes = skipped, skipped_steps, spikes
        self.pending: list = []
        self.waited_s = 0.0  # for the device when it was last read, which is in the time of the step that followed
        self.smoothed, self.bad_samples = Smoothed(), 0
        if ranks.is_first:
            metrics = output_dir / "metrics.jsonl"
            self.log = MetricsLog(metrics, resume_step)
            self.table = MetricsTable(output_dir / "metrics.csv", metrics)
            self.plot = LossPlot(output_dir / "loss.png", title, read_metrics(metrics))
        self.bar = progress_bar(total=max_steps, initial=resume_step, desc=output_dir.name, unit="step")

    def after_step(self, result, flush: bool = False) -> None:
        """result: a StepResult of the loop; flush: whether to write at once, so that the log does not lag behind a
        checkpoint, whose time is not a step's."""
        self.pending.append(result)
        if flush or result.step % self.logging_steps == 0 or result.step == self.max_steps:
            self.flush()
        if flush:
            self.trackers.flush()
            self.waited_s = 0.0

    def flush(self) -> None:
        """Write what is pending. All ranks call it together."""
        if not self.pending:
            return
        started = time.perf_counter()
        read = [_on_host(result, *values) for result, values in zip(self.pending, self._values())]
        waited_s = time.perf_counter() - started
        # Steps are queued faster than the device takes them: only those read together have a time of their own.
        seconds = sum(result.step_time_s for result in read) - self.waited_s + waited_s
        self.waited_s = waited_s
        tokens = sum(result.counts.tokens for result in read)
        flops = sum(self.flops.of(c.tokens, c.pairs, c.tiles, c.targets) for c in (result.counts for result in read))
        rates = {"tokens_per_s": round(tokens / seconds, 1), "mfu": round(flops / seconds / self.peak_flops, 6)}
        rows = [self._row(result, rates) for result in read]
        if self.ranks.is_first:
            self._write(rows)
            self._show(rows, wait=sum(result.data_wait_s for result in read) / seconds)
        self.skipped.add(read)
        self.skipped_steps.add(read, [result.loss for result in self.pending])
        self.spikes.add(read)
        self.pending.clear()

    def close(self) -> None:
        """End the bar, draw the curve, and leave the report."""
        self.flush()
        self.bar.close()
        if self.ranks.is_first:
            for other in (self.skipped, self.skipped_steps, self.spikes):
                other.log.write([])  # what waits for room on the disk
            self.plot.close()
            self.log.close()
            leave_report(self.output_dir)

    def _write(self, rows: list[dict]) -> None:
        self.log.write(rows)
        self.table.write(rows)
        self.plot.write(rows)
        self.trackers.write(rows)
        if self.monitor.enabled:
            # DeepSpeed's own name and axis for the loss, which its engine does not write.
            name = "Train/Samples/train_loss"
            self.monitor.write_events([(name, row["loss"], row["step"] * self.batch_size) for row in rows])

    def _show(self, rows: list[dict], wait: float) -> None:
        """wait: the part of the time that went by without data, on this rank."""
        for row in rows:
            self.smoothed.add(row["loss"])
        last = rows[-1]
        bad = [f"{last['skipped_steps']:,} steps skipped"] if last["skipped_steps"] else []
        self.bad_samples += sum(row["broken_samples"] for row in rows)
        bad += [f"{self.bad_samples:,} samples broken"] if self.bad_samples else []
        loss, speed = f"loss {self.smoothed.value:.4f}", f"{last['tokens_per_s']:,.0f} tokens/s"
        rate, memory = f"lr {max(last['lr']):.2e}", f"{last['peak_memory_bytes'] / 1e9:.1f} GB"
        wait = f"{max(0.0, wait):.1%}"
        update_bar(
            self.bar,
            len(rows),
            [loss, rate, speed, f"MFU {last['mfu']:.1%}", f"waiting for data {wait}", memory, *bad],
            [loss, speed, f"waiting {wait}", *bad],
        )

    def _values(self) -> list[list]:
        """Loss, gradient norm, skipped steps, counts and means of what is pending, in one look at the device."""
        results, device = self.pending, self.ranks.device
        several = len(self.sources) > 1
        sums = [result.loss.reshape(1) for result in results]
        sums += [result.by_source.flatten() for result in results if several]
        rest = [value for result in results for value in (result.grad_norm, result.skipped_steps)]
        on_device = [value for value in rest if isinstance(value, torch.Tensor)]
        # The counts are float64, so all of it will be.
        table = [all_sum(torch.cat(sums)), *(result.counts for result in results)]
        table += [value.to(device).reshape(1) for value in on_device]
        numbers = iter(torch.cat(table).tolist())
        losses = [next(numbers) for _ in results]
        by_source = [[[next(numbers) for _ in self.sources] for _ in range(2)] if several else None for _ in results]
        counts = [Counts(*(int(next(numbers)) for _ in Counts._fields)) for _ in results]
        rest = iter([next(numbers) if isinstance(value, torch.Tensor) else value for value in rest])
        means = [None if result.means is None else self._means_of_all(result.means) for result in results]
        return [[loss, next(rest), next(rest), *others] for loss, *others in zip(losses, counts, means, by_source)]

    def _means_of_all(self, means: torch.Tensor) -> list[list[float]]:
        """(ranks, micro-batches) of each rank's (micro-batches,)."""
        table = means.new_zeros(self.ranks.world_size, len(means))
        table[self.ranks.rank] = means
        return all_sum(table).tolist()

    def _row(self, result, rates: dict[str, float]) -> dict:
        norm = result.grad_norm
        row = {
            "step": result.step,
            "epoch": round(result.step / self.steps_per_epoch, 5),
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
        if result.by_source is not None and (result.step % self.source_steps == 0 or result.step == self.max_steps):
            row["source_losses"] = means_by_source(self.sources, *result.by_source)
        return row if result.means is None else {**row, "micro_batch_losses": result.means}


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


def _on_host(
    result,
    loss: float,
    grad_norm: float | None,
    skipped_steps: float,
    counts: Counts,
    means: list | None,
    by_source: list | None,
):
    """A StepResult with numbers in the place of tensors."""
    values = {"loss": loss, "counts": counts, "skipped_steps": skipped_steps, "means": means, "by_source": by_source}
    return dataclasses.replace(result, **values, grad_norm=None if grad_norm is None else float(grad_norm))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank used so far: on its GPU, or of the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
