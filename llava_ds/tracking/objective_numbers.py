"""The numbers that an objective logs besides the loss: in the progress bar and the trackers' curves.

An objective's new metric is logged and tracked automatically; a Number with its name adds it to the bar, and a chart to
the report.
"""

from llava_ds.extensions.active import flags_class
from llava_ds.extensions.base import Number
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.tracking.series import is_number

# In every row of metrics.jsonl, whatever the objective.
COLUMNS = frozenset(
    {
        "step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "supervised_tokens", "step_time_s",
        "data_wait_s", "tokens_per_s", "mfu", "peak_memory_bytes", "skipped_steps", "broken_samples",
        "source_losses", "micro_batch_losses",
    }
)  # fmt: skip


def known_numbers() -> dict[str, Number]:
    """Return the numbers that have a chart, by name: ExtensionFlags.numbers."""
    return {name: number for flags in map(flags_class, EXTENSIONS) for name, number in flags.numbers.items()}


def objective_numbers(row: dict) -> dict[str, float]:
    """Return the objective's numbers in a row of metrics.jsonl."""
    return {name: value for name, value in row.items() if name not in COLUMNS and is_number(value)}


def bar_parts(row: dict) -> list[str]:
    """Return the texts for the progress bar."""
    numbers = objective_numbers(row)
    known = known_numbers() if numbers else {}
    return [number.bar.format(numbers[name]) for name, number in known.items() if number.bar and name in numbers]
