"""The result of a run's page: what run/evaluate.py scored, first in one card and further down with every number."""

import math
from dataclasses import dataclass

from llava_ds.tracking.conditions import conditions_note
from llava_ds.tracking.markup import COLOURS, details, esc, sentence, table
from llava_ds.tracking.run_files import RunFiles, is_number
from llava_ds.tracking.wording import shown_score

MAIN_FILE = "evaluation.json"
OVERALL = "overall"
HOW = "python run/evaluate.py --model_path {folder} --compare_without_image --output {folder}/evaluation.json"


@dataclass(frozen=True)
class Scores:
    """The scores of an evaluation. columns: by condition (with image, without), the first of which is the one that
    counts, by kind of question, [sum, questions]; intervals: by condition, the 95 % interval of the overall score."""

    metric: str
    columns: dict[str, dict[str, tuple[float, int]]]
    intervals: dict[str, tuple[float, float]]

    def mean(self, column: str, kind: str) -> float:
        """The score of a kind of question under a condition; nan where it was not asked."""
        total, asked = self.columns[column].get(kind, (0.0, 0))
        return total / asked if asked else math.nan


def result_card(run: RunFiles) -> str:
    """The score under each condition and by kind of question, as HTML; how to get it where there is none."""
    scores = main_scores(run)
    if scores is None:
        return _not_evaluated(run)
    main, *blind = scores.columns
    figures = "".join(_figure(scores, column, main=column == main) for column in scores.columns)
    kinds = [kind for kind in scores.columns[main] if kind != OVERALL]
    bars = _bars(scores, main, blind, kinds) if kinds else ""
    return f'<div class="result" id="result"><div class="figures">{figures}</div>{bars}</div>'


def main_scores(run: RunFiles) -> Scores | None:
    """Of evaluation.json, or else of the first such file with scores by condition and kind; None if there is none."""
    for name in sorted(run.evaluations, key=lambda name: (name != MAIN_FILE, name)):
        if (scores := _read_scores(run.evaluations[name])) is not None:
            return scores
    return None


def evaluation_part(run: RunFiles) -> str:
    """All scores of all evaluations, as HTML; nothing where the run was not evaluated."""
    parts = []
    for name, content in run.evaluations.items():
        if name in run.problems:
            parts.append(sentence(run.problems[name], "warn"))
            continue
        metric = f": {content['metric']}" if isinstance(content.get("metric"), str) else ""
        parts.append(f"<h3>{esc(name + metric)}</h3>" + _scores_table(content.get("scores", content)))
        parts.append(conditions_note(content.get("scores")))
        if isinstance(content.get("metrics"), dict):
            found, head = list(_flat(content["metrics"])), ["", "value [95 % interval]"]
            parts.append(details("Every metric, with its interval", table(head, found, numbers=(1,))))
    return "".join(parts)


def _not_evaluated(run: RunFiles) -> str:
    if run.flags.get("tune_mm_mlp_adapter"):
        return sentence("Stage 1 leaves a projector: stage 2, which begins with it, leaves the model to score.", "note")
    command = HOW.format(folder=run.output_dir)
    told = sentence("Not evaluated yet. This scores the model with and without the image, and puts it here:", "note")
    return f'<div class="result none" id="result"><div>{told}<pre>{esc(command)}</pre></div></div>'


def _read_scores(content: dict) -> Scores | None:
    """None for what has not the form that run/evaluate.py writes."""
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
    """True for [sum, questions], of at least one question."""
    if not isinstance(pair, list) or len(pair) != 2 or not all(map(is_number, pair)):
        return False
    return isinstance(pair[1], int) and pair[1] > 0 and math.isfinite(pair[0])


def _interval(content: dict, column: str, metric: str) -> tuple[float, float] | None:
    found: object = content.get("metrics")
    for key in (column, OVERALL, metric):
        found = found.get(key) if isinstance(found, dict) else None
    bounds = [found.get(name) for name in ("low", "high")] if isinstance(found, dict) else []
    return tuple(bounds) if len(bounds) == 2 and all(map(is_number, bounds)) else None


def _figure(scores: Scores, column: str, main: bool) -> str:
    """A score in large, what it is of, and how sure it is."""
    _, asked = scores.columns[column][OVERALL]
    bounds = scores.intervals[column]
    sure = f"{asked:,} questions" + (f", 95 % interval {bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "")
    label = f"{scores.metric} {column}" if main else column
    return (
        f'<div class="figure{" main" if main else ""}"><b>{scores.mean(column, OVERALL):.3f}</b>'
        f"<span>{esc(label)}</span><small>{esc(sure)}</small></div>"
    )


def _bars(scores: Scores, main: str, blind: list[str], kinds: list[str]) -> str:
    """A row per kind of question: a bar for the score that counts, a mark on it for every other condition."""
    largest = max(1.0, *(mean for kind in kinds if math.isfinite(mean := scores.mean(main, kind))))
    keys = "".join(
        f'<span class="key s{i % len(COLOURS)}{" mark" if i else ""}">{esc(column)}</span>'
        for i, column in enumerate((main, *blind))
    )
    rows = []
    for kind in kinds:
        of_blind = [scores.mean(column, kind) for column in blind]
        marks = "".join(
            f'<u class="s{(i + 1) % len(COLOURS)}" style="left:{_percent(mean, largest)}"></u>'
            for i, mean in enumerate(of_blind)
            if math.isfinite(mean)
        )
        mean = scores.mean(main, kind)
        others = "".join(f'<span class="blind">{mean:.3f}</span>' for mean in of_blind if math.isfinite(mean))
        rows.append(
            f'<span class="kind">{esc(kind)}</span>'
            f'<span class="track"><i style="width:{_percent(mean, largest)}"></i>{marks}</span>'
            f'<span class="values"><b>{mean:.3f}</b>{others}</span>'
        )
    heading = f'<p class="keys">{esc(scores.metric)} by kind of question, 0 to {largest:.3g}: {keys}</p>'
    return f'<div>{heading}<div class="kinds">{"".join(rows)}</div></div>'


def _percent(value: float, largest: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / largest)):.1f}%"


def _scores_table(scores: object) -> str:
    """A table where every column has the same rows, as run/evaluate.py writes them; else all numbers by their path."""
    if isinstance(scores, dict) and scores and all(isinstance(column, dict) and column for column in scores.values()):
        columns = list(scores)
        rows = list(dict.fromkeys(kind for column in scores.values() for kind in column))
        cells = {(name, kind): shown_score(scores[name].get(kind)) for name in columns for kind in rows}
        if all(isinstance(cell, str) for cell in cells.values()):
            lines = [[kind, *(cells[name, kind] for name in columns)] for kind in rows]
            return table(["", *columns], lines, numbers=range(1, len(columns) + 1), stacks=True, named=True)
    found = list(_flat(scores))
    return table(["", "value"], found, numbers=(1,)) if found else sentence("There are no scores in it.")


def _flat(value: object, path: str = ""):
    """(path, number) of every number or pair within; long lists are left out."""
    shown = shown_score(value)
    if isinstance(shown, str) and value is not None:
        yield path, shown
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{path} {name}".strip())
