"""Curves of a run's page: learning (losses, learning rate, gradient norm) and the machine (speed, memory)."""

import math

from llava_ds.tracking.blocks import Block, charts, note
from llava_ds.tracking.chart import Series, line_chart
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.series import is_number, known_numbers, objective_numbers, running_mean


def learning_curves(run: RunFiles) -> list[Block]:
    """Return charts of loss, eval loss, learning rate and gradient norm; curves without numbers are left out."""
    if not run.metrics:
        return [note(run.problems.get("metrics.jsonl", "There are no steps."), "warn")]
    # One list of sources for both charts, so that a source has the same colour in both.
    names = list(dict.fromkeys(name for row in (*run.metrics, *run.evals) for name in _by_source(row)))
    curves = [
        line_chart("Loss per supervised token", loss_series(run)),
        _sources("Loss by data source (running mean)", run.metrics, names, smooth=True),
        _sources("Eval loss by data source", run.evals, names, smooth=False),
        line_chart("Learning rate", _rates(run), log=False),
        smoothed(run, "Gradient norm", "grad_norm"),
    ]
    not_finite = sum(not math.isfinite(value) for value in run.column("loss")[1])
    gaps = f"Steps whose loss was not finite, where the curve has gaps: {not_finite:,}."
    return [*([note(gaps, "note")] if not_finite else []), charts(curves)]


def machine_curves(run: RunFiles) -> list[Block]:
    """Return charts of throughput, time per step and memory; empty if no step has these numbers."""
    curves = [smoothed(run, "Throughput, tokens/s", "tokens_per_s", log=False), _times(run), _memory(run)]
    return [charts(curves)] if any(curves) else []


def objective_curves(run: RunFiles) -> list[Block]:
    """Return charts of the objective's numbers that have a title or are one of several means; else no chart."""
    found = dict.fromkeys(name for row in run.metrics for name in objective_numbers(row))
    titles = {name: number.title for name, number in known_numbers().items()} if found else {}
    each = [name for name in found if name.endswith("/mean") and name.count("/") == 2]  # kind/name/mean
    kinds = {name: name.removesuffix("/mean").split("/") for name in each if len(each) > 1}
    titles |= {name: f"{kind.capitalize().removesuffix('s')}: {which}" for name, (kind, which) in kinds.items()}
    curves = [smoothed(run, title, name, log=False) for name, title in titles.items() if name in found]
    return [charts(curves)] if curves else []


def loss_series(run: RunFiles) -> list[Series]:
    """Return the curves of the loss of every step, its running mean, and the eval loss if there is one."""
    steps, losses = run.column("loss")
    eval_loss = run.column("loss", run.evals)
    series = [
        Series("each step", steps, losses, colour=0, faint=True),
        Series("running mean", steps, running_mean(losses), colour=0),
    ]
    return [*series, Series("eval", *eval_loss, colour=1, dots=True)] if eval_loss[0] else series


def _sources(title: str, rows: list[dict], names: list[str], smooth: bool) -> str:
    """Return a chart of each data source's loss; "" if rows have none. Colours repeat after eight sources."""
    series = []
    for i, name in enumerate(names):
        found = {row["step"]: loss for row in rows if is_number(loss := _by_source(row).get(name))}
        if found:
            losses = running_mean(found.values()) if smooth else list(map(float, found.values()))
            series.append(Series(name, list(found), losses, colour=i % 8, dots=not smooth))
    return line_chart(title, series) if series else ""


def _by_source(row: dict) -> dict[str, float]:
    found = row.get("source_losses")
    return found if isinstance(found, dict) else {}


def smoothed(run: RunFiles, title: str, name: str, log: bool = True) -> str:
    """Return a chart of a logged number and its running mean; "" if no step has the number."""
    steps, values = run.column(name)
    if not values:
        return ""
    both = [Series("each step", steps, values, faint=True), Series("running mean", steps, running_mean(values))]
    return line_chart(title, both, log=log)


def _rates(run: RunFiles) -> list[Series]:
    """Return a curve of the learning rate for each set of parameter groups with equal rates."""
    rows = [row for row in run.metrics if isinstance(row.get("lr"), list) and all(map(is_number, row["lr"]))]
    steps, seen = [row["step"] for row in rows], {}
    for group in range(max((len(row["lr"]) for row in rows), default=0)):
        values = tuple(float(row["lr"][group]) if group < len(row["lr"]) else math.nan for row in rows)
        seen.setdefault(values, []).append(str(group))
    named = len(seen) > 1
    return [
        Series(f"group {', '.join(groups)}" if named else "", steps, values, colour=i % 8)
        for i, (values, groups) in enumerate(seen.items())
    ]


def _times(run: RunFiles) -> str:
    steps, times = run.column("step_time_s")
    waiting, waits = run.column("data_wait_s")
    series = [
        Series("step", steps, running_mean(times), colour=0),
        Series("waiting for data", waiting, running_mean(waits), colour=1),
    ]
    return line_chart("Seconds per step (running mean)", series, log=False) if times else ""


def _memory(run: RunFiles) -> str:
    steps, sizes = run.column("peak_memory_bytes")
    series = [Series("", steps, [size / 1e9 for size in sizes])]
    return line_chart("Peak memory of rank 0, GB", series, log=False, from_zero=True) if sizes else ""
