"""Compare several runs side by side: their results, and the settings in which they differ."""

import json
from collections import Counter
from pathlib import Path

from llava_ds.runtime.ranks import printable
from llava_ds.tracking.blocks import COLOURS, charts, note, render, table
from llava_ds.tracking.chart import Series, line_chart
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.series import running_mean
from llava_ds.tracking.wording import NUMBERS, model_of, shown_score

# Settings that are not compared, because they differ between any two runs.
PLACES = ("output_dir", "run_name", "cache_dir", "resume")
CURVES = {
    "loss": "Loss per supervised token (running mean)",
    "lr": "Learning rate of the first group",
    "grad_norm": "Gradient norm (running mean)",
    "tokens_per_s": "Throughput, tokens/s (running mean)",
}
LINEAR = ("lr", "tokens_per_s")


def names_of(runs: list[RunFiles]) -> list[str]:
    """Return a unique name per run, with the folder or a number added if names repeat."""
    counts = Counter(run.name for run in runs)
    names = [run.name if counts[run.name] == 1 else f"{run.name} ({run.output_dir})" for run in runs]
    return [name if names.count(name) == 1 else f"{name} #{i + 1}" for i, name in enumerate(names)]


def numbers_table(runs: list[RunFiles]) -> list[list[str]]:
    """Return rows (label, value of each run) for every number that at least one run has, scores first."""
    found = [run.numbers for run in runs]
    rows = [
        [shown.label, *(shown.form(numbers[name]) if name in numbers else "" for numbers in found)]
        for name, shown in NUMBERS.items()
        if name != "samples" and any(name in numbers for numbers in found)  # "tokens" measures the data better
    ]
    scores = [_scores(run) for run in runs]
    kinds = dict.fromkeys(kind for each in scores for kind in each)
    return [*([kind, *(each.get(kind, "") for each in scores)] for kind in kinds), *rows]


def differences(runs: list[RunFiles]) -> list[list[str]]:
    """Return rows (name, value of each run) for every flag, DeepSpeed value, version or device that differs."""
    return [
        [name, *("" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values)]
        for name, values in _side_by_side(runs)
        if any(value != values[0] for value in values)
    ]


def in_terminal(runs: list[RunFiles]) -> list[str]:
    """Return the tables as lines of text with aligned columns."""
    names = names_of(runs)
    lines = _aligned([["", *names], *numbers_table(runs)])
    if differing := differences(runs):
        lines += ["", *_aligned([["differs", *names], *differing])]
    else:
        lines += ["", "all flags and DeepSpeed values agree"]
    return lines + [f"{name}: {problem}" for name, run in zip(names, runs) for problem in run.problems.values()]


def comparison_page(runs: list[RunFiles]) -> str:
    """Return compare.html: the same tables as in_terminal, and charts with the curves of all runs."""
    names = names_of(runs)
    curves = [
        line_chart(
            title,
            [_series(run, name, label, i) for i, (run, label) in enumerate(zip(runs, names))],
            log=name not in LINEAR,
        )
        for name, title in CURVES.items()
    ]
    if any(run.evals for run in runs):
        eval_losses = [
            Series(label, *run.column("loss", run.evals), colour=i % len(COLOURS), dots=True)
            for i, (run, label) in enumerate(zip(runs, names))
        ]
        curves.insert(1, line_chart("Eval loss", eval_losses))
    differing = differences(runs)
    problems = [f"{name}: {text}" for name, run in zip(names, runs) for text in run.problems.values()]
    lines = [(name, model_of(run) if run.flags else "", run.output_dir.resolve()) for name, run in zip(names, runs)]
    numbers = table(["", *names], numbers_table(runs), range(1, len(names) + 1), stacks=True, named=True)
    same = note("All flags and DeepSpeed values agree.", "note")
    sections = {
        "Result": [numbers],
        "Curves": [charts(curves)],
        "What differs": [table(["", *names], differing, stacks=True, named=True) if differing else same],
        "Runs": [table(["run", "what", "folder"], lines, stacks=True)],
    }
    return render(
        "page.html.j2",
        title=f"{', '.join(names)}: side by side",
        name=" · ".join(names),
        first=[note(text, "warn") for text in problems],
        sections=sections,
        navigates=False,
    )


def _series(run: RunFiles, name: str, label: str, index: int) -> Series:
    steps, values = run.column(name)
    return Series(label, steps, values if name == "lr" else running_mean(values), colour=index % len(COLOURS))


def _side_by_side(runs: list[RunFiles]) -> list[tuple[str, list[object]]]:
    """Return (name, value of each run) of all settings: flags, then DeepSpeed's values, versions, and the rest."""
    each = []
    for run in runs:
        told = {f"--{name}": value for name, value in run.flags.items() if name not in PLACES}
        told |= {f"ds_config: {key}": value for key, value in _flat(run.ds_config)}
        versions = run.record.get("versions")
        told |= {f"version of {name}": text for name, text in (versions if isinstance(versions, dict) else {}).items()}
        told |= {name: run.record.get(name) for name in ("world_size", "device", "git_revision")}
        each.append(told)
    order = ("--", "ds_config: ", "version of ", "")
    names = dict.fromkeys(name for told in each for name in told)
    names = sorted(names, key=lambda name: next(i for i, start in enumerate(order) if name.startswith(start)))
    return [(name, [told.get(name) for told in each]) for name in names]


def _flat(value: object, path: str = ""):
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}" if path else str(name))
    elif path:
        yield path, value


def _scores(run: RunFiles) -> dict[str, str]:
    """Return the overall scores in run/evaluate.py's files as text, or all scores if none is an overall score."""
    found = {}
    for file, content in run.evaluations.items():
        scores = content.get("scores", content)
        for path, value in _flat(scores):
            shown = shown_score(value)
            if shown:
                found[f"{Path(file).stem}: {path}"] = shown
    overall = {name: text for name, text in found.items() if name.endswith((".overall", " overall"))}
    return overall or found


def _aligned(rows: list[list[str]]) -> list[str]:
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
