"""Format a run's numbers and names for reports."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llava_ds.config.arguments import adapted_parts, trained_parts
from llava_ds.constants import DataError
from llava_ds.tracking.chart import short
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.run_record import arguments_of
from llava_ds.tracking.series import is_number

PARTS = {
    "vision_tower": "the vision tower",
    "projector": "the projector",
    "language_model": "the language model",
    "output_layer": "the language model's output layer",
}


def duration(seconds: float) -> str:
    """Format seconds: 12 s, 3 min 20 s, 5 h 7 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))
    first = next(i for i, (count, _) in enumerate(units) if count)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count)


def num_bytes(count: float) -> str:
    """Format a number of bytes in decimal units: 12.3 GB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


class Number(NamedTuple):
    """Label and format of one of RunFiles.numbers."""

    label: str
    form: Callable[[float], str]


NUMBERS = {
    "steps": Number("optimizer steps", "{:,.0f}".format),
    "epoch": Number("epochs", "{:.2f}".format),
    "loss": Number("loss at the end (running mean)", "{:.4f}".format),
    "held_out_loss": Number("eval loss, last", "{:.4f}".format),
    "samples": Number("samples", "{:,.0f}".format),
    "tokens": Number("tokens", short),
    "step_time_s": Number("spent in steps", duration),
    "tokens_per_s": Number("tokens/s (median)", "{:,.0f}".format),
    "mfu": Number("MFU (median)", "{:.1%}".format),
    "wait": Number("waiting for data", "{:.1%}".format),
    "peak_memory_bytes": Number("peak memory of rank 0", num_bytes),
    "skipped_steps": Number("steps skipped (not finite)", "{:,.0f}".format),
    "broken_samples": Number("samples that broke", "{:,.0f}".format),
}


def model_of(run: RunFiles) -> str:
    """Return a sentence about the model, its trained parts and its data. Paths are shortened to their last part."""
    flags = run.flags
    given = run.record.get("given")
    if flags.get("model_name_or_path") and not (isinstance(given, list) and "model_name_or_path" not in given):
        base, tower = _last_part(flags["model_name_or_path"]), _last_part(flags.get("vision_tower"))
    else:
        base, tower = "the tiny model that ships with llava_ds", ""
    data = _last_part(flags.get("data_path")) or "generated scenes of coloured shapes"
    try:
        chosen = arguments_of(flags, ())[0].model
        adapted = adapted_parts(chosen)
        parts = trained_parts(chosen) | adapted
    except (DataError, TypeError, AttributeError):
        parts = adapted = frozenset()
    trained = [text for part, text in PARTS.items() if part in parts]
    how = " by adapters" if adapted else ""
    shown = base + (f" with {tower}" if tower else "")
    if not trained:
        return f"{shown}, trained on {data}."
    listed = trained[0] if len(trained) == 1 else f"{', '.join(trained[:-1])} and {trained[-1]}"
    return f"{shown}: {listed} trained{how} on {data}."


def shown_score(value: object) -> str | None:
    """Format a score. Returns "" for None, and None for anything else.

    A score is a number, [sum, number of questions] (shown as their mean), or {value, low, high} (value and interval).
    """
    if value is None:
        return ""
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, list) and len(value) == 2 and all(map(is_number, value)) and isinstance(value[1], int):
        right, asked = value
        return f"{right / asked:.3f} ({right:,g} of {asked:,})" if asked > 0 else "0 of 0"
    if isinstance(value, dict) and all(is_number(value.get(name)) for name in ("value", "low", "high")):
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return None


def _last_part(path: object) -> str:
    return Path(str(path)).name if path else ""
