"""Results as a person reads them: a table in markdown, and a plot."""

from dataclasses import dataclass
from pathlib import Path

from benchmark.comparison import Spread


@dataclass(frozen=True)
class Row:
    """One result: what, its values over the rounds, how to write them ({} is a number), and the least that is asked."""

    what: str
    values: Spread
    form: str = "{:.2f}×"
    asked: float | None = None

    def cells(self) -> list[str]:
        """what, median, spread, what is asked for."""
        median, least, most = (self.form.format(v) for v in (self.values.median, self.values.least, self.values.most))
        spread = "" if least == most == median else f"{least} to {most}"
        return [self.what, median, spread, "" if self.asked is None else self.form.format(self.asked)]


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    lines = [["", "median", "lowest to highest", "asked for"], *(row.cells() for row in rows)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(4)]
    written = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths))} |" for cells in lines]
    rule = f"| {' | '.join('-' * width for width in widths)} |"
    return "\n".join([written[0], rule, *written[1:]])


def plot_steps(cases: dict[str, dict[str, list[list[float]]]], path: Path) -> None:
    """Seconds per optimizer step: a chart per case, a dot per step of every run, a line at each side's median."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(cases), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(cases), squeeze=False)
    for axis, (name, sides) in zip(axes[0], cases.items()):
        for place, times in enumerate(sides.values()):
            values = [t for run in times for t in run]
            shift = [place + 0.5 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
            axis.plot(shift, values, ".", markersize=4)
            axis.hlines(Spread.of(values).median, place - 0.3, place + 0.3, colors="black")
        axis.set_xticks(range(len(sides)), [side.replace(", ", ",\n") for side in sides], fontsize=8)
        axis.set_ylim(bottom=0)
        axis.set_title(name, fontsize=9)
        axis.set_ylabel("seconds per optimizer step")
    figure.savefig(path, dpi=120)
