"""loss.png: the loss curve of a run."""

import math
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from llava_ds.files.writing import write_whole
from llava_ds.tracking.series import running_mean, thinned

EVERY_S = 60.0  # minimum time between two drawings during training
LARGEST_SHARE = 1 / 200  # maximum fraction of the time spent drawing


class LossPlot:
    """Draws loss.png regularly in a thread, so that no step waits for it."""

    def __init__(self, path: Path, title: str, rows: list[dict]) -> None:
        """rows: rows that metrics.jsonl already has when the run resumes."""
        self.path, self.title = path, title
        self.steps, self.losses, self.rates = array("q"), array("d"), array("d")  # 24 bytes per step
        self.thread: threading.Thread | None = None
        self.problem: str | None = None  # error from the last attempt to draw
        self.next_s = time.monotonic() + EVERY_S
        self._take(rows)

    def write(self, rows: list[dict]) -> None:
        """Add rows, and start drawing if it is due."""
        self._take(rows)
        if time.monotonic() >= self.next_s and (self.thread is None or not self.thread.is_alive()):
            self.next_s = math.inf  # _draw sets the next time
            count = len(self.steps)
            self.thread = threading.Thread(target=self._draw, args=(count,), name="loss.png", daemon=True)
            self.thread.start()

    def close(self) -> None:
        """Draw the complete curve."""
        if self.thread is not None:
            self.thread.join()
        if self.steps:
            self._draw(len(self.steps))
        if self.problem is not None:
            print(f"WARNING: {self.path} could not be drawn: {self.problem}", flush=True)

    def _take(self, rows: list[dict]) -> None:
        self.steps.extend(row["step"] for row in rows)
        self.losses.extend(row["loss"] for row in rows)
        self.rates.extend(max(row["lr"]) for row in rows)

    def _draw(self, count: int) -> None:
        """Draw the first `count` rows, because write() may add more meanwhile."""
        started = time.monotonic()
        try:
            plot_loss(self.steps[:count], self.losses[:count], self.rates[:count], self.path, self.title)
            self.problem = None
        except Exception as error:  # usually a full disk; close() reports the last problem
            self.problem = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        self.next_s = ended + max(EVERY_S, (ended - started) / LARGEST_SHARE)


def plot_loss(steps: Sequence[int], losses: Sequence[float], rates: Sequence[float], path: Path, title: str) -> None:
    """Draw the loss, its running mean, and the learning rate to a PNG file that is replaced atomically."""
    figure = loss_figure(steps, losses, rates, title)
    write_whole(path, lambda fresh: figure.savefig(fresh, dpi=120, format="png"))


def loss_figure(steps: Sequence[int], losses: Sequence[float], rates: Sequence[float], title: str):
    """Return the plot as a matplotlib figure with a canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from llava_ds.tracking.chart import is_far_apart, short

    figure = Figure(figsize=(8, 4.5))
    # Fixed margins, because automatic ones would draw the figure twice.
    figure.subplots_adjust(left=0.12, right=0.88, bottom=0.2, top=0.92)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*thinned(steps, losses), color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(*thinned(steps, running_mean(losses)), color="tab:blue", label="loss (running mean)")
    is_log = is_far_apart(losses)
    axes.set(xlabel="optimizer step", ylabel="loss per supervised token" + (" (log scale)" if is_log else ""))
    axes.set_title(title, parse_math=False)
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    rate = axes.twinx()
    rate.plot(*thinned(steps, rates), color="tab:grey", linestyle=":", label="learning rate")
    rate.set_ylabel("learning rate")
    for each in (axes, rate):
        each.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))  # 0.5 instead of 5 x 10^-1
    figure.legend(loc="lower center", ncols=2, frameon=False)
    return figure
