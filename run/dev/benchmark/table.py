"""Format results as a markdown table."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of some values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One result: its name, a value per round, the number format ({} is the value), and the minimum target."""

    what: str
    values: Spread
    form: str = "{:.2f}×"
    asked: float | None = None

    def cells(self) -> list[str]:
        """Return name, median, spread and target."""
        median, least, most = (self.form.format(v) for v in (self.values.median, self.values.least, self.values.most))
        spread = "" if least == most == median else f"{least} to {most}"
        return [self.what, median, spread, "" if self.asked is None else self.form.format(self.asked)]


def markdown(rows: list[Row]) -> str:
    """Format the rows as a markdown table."""
    lines = [["", "median", "lowest to highest", "target"], *(row.cells() for row in rows)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(4)]
    written = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths))} |" for cells in lines]
    rule = f"| {' | '.join('-' * width for width in widths)} |"
    return "\n".join([written[0], rule, *written[1:]])
