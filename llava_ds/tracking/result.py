"""Show scores on a run's page: a card at the top, and a section with all numbers in run/evaluate.py's files."""

import math
from dataclasses import dataclass

from llava_ds.tracking.blocks import COLOURS, Block, details, heading, note, table
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.series import is_number
from llava_ds.tracking.wording import shown_score

MAIN_FILE = "evaluation.json"  # preferred for the card; without it, the first file with scores by condition and kind
OVERALL = "overall"
# Conditions under which run/evaluate.py repeats the questions (columns in evaluation.json), with their meaning.
CONDITIONS = {
    "blank image": "every image replaced by a plain colour: prompts as in training, without anything to see",
    "without picture": "no image and no image mark: the language model's answer to the bare question, a prompt that "
    "it may never have seen in training",
}


@dataclass(frozen=True)
class Scores:
    """The scores of an evaluation.

    columns: (sum of scores, number of questions) by condition and kind of question; the first condition is the main
    one. intervals: 95 % interval of the overall score by condition, None if missing.
    """

    metric: str
    columns: dict[str, dict[str, tuple[float, int]]]
    intervals: dict[str, tuple[float, float]]

    def mean(self, column: str, kind: str) -> float:
        """Return the mean score of a kind of question under a condition; nan without questions."""
        total, asked = self.columns[column].get(kind, (0.0, 0))
        return total / asked if asked else math.nan


def result_card(run: RunFiles) -> Block | None:
    """Return the card with the scores by condition and by kind of question; None if no file has scores."""
    names = sorted(run.evaluations, key=lambda name: (name != MAIN_FILE, name))
    scores = next(filter(None, (_read_scores(run.evaluations[name]) for name in names)), None)
    if scores is None:
        return None
    main, *blind = scores.columns
    kinds = [kind for kind in scores.columns[main] if kind != OVERALL]
    largest = max([1.0, *(mean for kind in kinds if math.isfinite(mean := scores.mean(main, kind)))])
    return {
        "kind": "result",
        "figures": [_figure(scores, column, main=column == main) for column in scores.columns],
        "axis": f"{scores.metric} by kind of question, 0 to {largest:.3g}",
        "series": (main, *blind),
        "bars": [_bar(scores, kind, main, blind, largest) for kind in kinds],
    }


def evaluation_part(run: RunFiles) -> list[Block]:
    """Return all scores of all evaluations; empty if the run was not evaluated."""
    blocks: list[Block] = []
    for name, content in run.evaluations.items():
        if name in run.problems:
            blocks.append(note(run.problems[name], "warn"))
            continue
        metric = f": {content['metric']}" if isinstance(content.get("metric"), str) else ""
        blocks += [heading(name + metric), _scores_table(content.get("scores", content))]
        blocks += condition_notes(content.get("scores"))
        if isinstance(content.get("metrics"), dict):
            found, head = list(_flat(content["metrics"])), ["", "value [95 % interval]"]
            blocks.append(details("Every metric, with its interval", table(head, found, numbers=(1,))))
    return blocks


def condition_notes(scores: object) -> list[Block]:
    """Return a note that explains each condition in a table of scores."""
    found = scores if isinstance(scores, dict) else {}
    return [note(f"{name}: {meaning}.", "note") for name, meaning in CONDITIONS.items() if name in found]


def _read_scores(content: dict) -> Scores | None:
    """Parse run/evaluate.py's scores; None for other formats."""
    columns = content.get("scores")
    if not isinstance(columns, dict) or not columns:
        return None
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for column, kinds in columns.items():
        pairs = kinds.items() if isinstance(kinds, dict) else ()
        found[column] = {kind: (float(pair[0]), pair[1]) for kind, pair in pairs if _is_score(pair)}
        if OVERALL not in found[column]:
            return None
    metric = content["metric"] if isinstance(content.get("metric"), str) else "score"
    return Scores(metric, found, {column: _interval(content, column, metric) for column in found})


def _is_score(pair: object) -> bool:
    """Return True for [sum, questions], with at least one question."""
    if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_number, pair)):
        return False
    return isinstance(pair[1], int) and pair[1] > 0 and math.isfinite(pair[0])


def _interval(content: dict, column: str, metric: str) -> tuple[float, float] | None:
    found: object = content.get("metrics")
    for key in (column, OVERALL, metric):
        found = found.get(key) if isinstance(found, dict) else None
    bounds = [found.get(name) for name in ("low", "high")] if isinstance(found, dict) else []
    return tuple(bounds) if len(bounds) == 2 and all(map(is_number, bounds)) else None


def _figure(scores: Scores, column: str, main: bool) -> dict[str, object]:
    """Return the overall score of a condition as text, with its label and interval."""
    _, asked = scores.columns[column][OVERALL]
    bounds = scores.intervals[column]
    interval = f", 95 % interval {bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else ""
    return {
        "value": f"{scores.mean(column, OVERALL):.3f}",
        "label": f"{scores.metric} {column}" if main else column,
        "detail": f"{asked:,} questions{interval}",
        "main": main,
    }


def _bar(scores: Scores, kind: str, main: str, blind: list[str], largest: float) -> dict[str, object]:
    """Return the bar of a kind of question: its length is the main score, with a mark for each other condition."""
    others = [
        {"colour": (i + 1) % len(COLOURS), "place": _percent(mean, largest), "value": f"{mean:.3f}"}
        for i, column in enumerate(blind)
        if math.isfinite(mean := scores.mean(column, kind))
    ]
    mean = scores.mean(main, kind)
    return {"kind": kind, "value": f"{mean:.3f}", "width": _percent(mean, largest), "others": others}


def _percent(value: float, largest: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / largest)):.1f}%"


def _scores_table(scores: object) -> Block:
    """Return a table of scores by kind and condition; for other formats, a list of all numbers with their paths."""
    if isinstance(scores, dict) and scores and all(isinstance(column, dict) and column for column in scores.values()):
        columns = list(scores)
        rows = list(dict.fromkeys(kind for column in scores.values() for kind in column))
        cells = {(name, kind): shown_score(scores[name].get(kind)) for name in columns for kind in rows}
        if all(isinstance(cell, str) for cell in cells.values()):
            lines = [[kind, *(cells[name, kind] for name in columns)] for kind in rows]
            return table(["", *columns], lines, numbers=range(1, len(columns) + 1), stacks=True, named=True)
    found = list(_flat(scores))
    return table(["", "value"], found, numbers=(1,)) if found else note("This file has no scores.")


def _flat(value: object, path: str = ""):
    """Yield (path, formatted score) for every score in nested dicts; longer lists are left out."""
    shown = shown_score(value)
    if isinstance(shown, str) and value is not None:
        yield path, shown
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{path} {name}".strip())
