"""Numbers and names of a run as a person would write them."""

from pathlib import Path

from llava_ds.arguments import ModelArguments, trained_parts
from llava_ds.report.run_files import RunFiles, is_number

PARTS = {
    "vision_tower": "the vision tower",
    "projector": "the projector",
    "language_model": "the language model",
    "output_layer": "the language model's output layer",
}


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 5 h 7 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))
    first = next(i for i, (count, _) in enumerate(units) if count)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count)


def num_bytes(count: float) -> str:
    """In decimal units, as disks and this program's flags have them."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def model_of(run: RunFiles) -> str:
    """What was trained on what, in a sentence. Of paths, the last part."""
    flags = run.flags
    base = _last_part(flags.get("model_name_or_path")) or "the tiny model that ships with llava_ds"
    tower = _last_part(flags.get("vision_tower"))
    data = _last_part(flags.get("data_path")) or "generated scenes of coloured shapes"
    try:
        known = {name: flags[name] for name in ModelArguments.__dataclass_fields__ if name in flags}
        parts = trained_parts(ModelArguments(**known))
    except (TypeError, AttributeError):
        parts = frozenset()
    trained = [text for part, text in PARTS.items() if part in parts]
    how = " with LoRA" if flags.get("lora_enable") else ""
    shown = base + (f" with {tower}" if tower else "")
    if not trained:
        return f"{shown}, trained on {data}."
    listed = trained[0] if len(trained) == 1 else f"{', '.join(trained[:-1])} and {trained[-1]}"
    return f"{shown}: {listed} trained{how} on {data}."


def shown_score(value: object) -> str | None:
    """A number, or (right, asked) as its quotient; "" for None; None for what is neither."""
    if value is None:
        return ""
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(n, int) for n in value)
        and 0 <= value[0] <= value[1]
    ):
        right, asked = value
        return f"{right / asked:.3f} ({right:,} of {asked:,})" if asked else "0 of 0"
    return None


def _last_part(path: object) -> str:
    return Path(str(path)).name if path else ""
