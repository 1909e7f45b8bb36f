"""What a person sees while it trains, and the files that hold the same: the bar, metrics.jsonl, loss.png."""

import resource
from pathlib import Path

import torch

from llava_ds.distributed import Ranks, progress_bar
from llava_ds.report.metrics import MetricsLog, read_metrics
from llava_ds.report.plots import plot_loss
from llava_ds.report.skipped import SkippedLog


class Progress:
    """Takes every step's result, reads the device only every logging_steps, and writes on rank 0."""

    def __init__(
        self,
        output_dir: Path,
        *,
        resume_step: int,
        max_steps: int,
        steps_per_epoch: int,
        batch_size: int,
        logging_steps: int,
        skipped: SkippedLog,
        ranks: Ranks,
        monitor,
    ) -> None:
        """batch_size: samples of an optimizer step; monitor: the engine's, which feeds what the DeepSpeed JSON
        switches on (TensorBoard, CSV, W&B, Comet)."""
        self.batch_size, self.monitor = batch_size, monitor
        self.output_dir, self.ranks = output_dir, ranks
        self.max_steps, self.steps_per_epoch, self.logging_steps = max_steps, steps_per_epoch, logging_steps
        self.skipped = skipped
        self.pending: list = []
        self.log = MetricsLog(output_dir / "metrics.jsonl", resume_step) if ranks.is_first else None
        self.bar = progress_bar(total=max_steps, initial=resume_step, desc=output_dir.name, unit="step")

    def after_step(self, result, skipped_steps: int, flush: bool = False) -> None:
        """result: a StepResult of the loop; skipped_steps: the engine's count of steps without an update.

        flush: whether to write at once, so that the log does not lag behind a checkpoint.
        """
        self.pending.append((result, skipped_steps))
        if flush or len(self.pending) == self.logging_steps or result.step == self.max_steps:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        rows = [self._row(result, skipped) for result, skipped in self.pending]
        if rows and self.ranks.is_first:
            self.log.write(rows)
            if self.monitor.enabled:
                # DeepSpeed's own name and axis for the loss, which its engine does not write.
                name = "Train/Samples/train_loss"
                self.monitor.write_events([(name, row["loss"], row["step"] * self.batch_size) for row in rows])
            self.bar.set_postfix_str(
                f"loss {rows[-1]['loss']:.4f}, lr {max(rows[-1]['lr']):.2e}, {rows[-1]['tokens_per_s']:,.0f} tokens/s",
                refresh=False,
            )
            self.bar.update(len(rows))
        self.skipped.add([result for result, _ in self.pending])
        self.pending.clear()

    def close(self, title: str) -> None:
        """End the bar and draw the curve."""
        self.flush()
        self.bar.close()
        if self.ranks.is_first:
            rows = read_metrics(self.output_dir / "metrics.jsonl")
            if rows:
                plot_loss(rows, self.output_dir / "loss.png", title)

    def _row(self, result, skipped_steps: int) -> dict:
        samples, tokens, targets, _ = map(int, result.counts)
        row = {
            "step": result.step,
            "epoch": result.step / self.steps_per_epoch,
            "loss": float(result.loss),
            "lr": result.lr,
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "samples": samples,
            "tokens": tokens,
            "supervised_tokens": targets,
            "step_time_s": round(result.step_time_s, 6),
            "data_wait_s": round(result.data_wait_s, 6),
            "tokens_per_s": round(tokens / result.step_time_s, 1),
            "peak_memory_bytes": peak_memory_bytes(self.ranks.device),
            "skipped_steps": skipped_steps,
            "broken_samples": result.num_planned - samples,
        }
        return row if result.means is None else {**row, "micro_batch_losses": result.means.tolist()}


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank used so far: on its GPU, or of the whole process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
