"""Show wrong answers of an evaluation, the most confident first, in the terminal and with images on the page."""

import heapq
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from llava_ds.tracking.blocks import Block, heading, note
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.series import is_number
from llava_ds.tracking.shown_images import shown_image

MOST_SHOWN = 12  # number of mistakes on the page
MOST_IMAGES = 4  # maximum images shown per question
RIGHT = 0.5  # minimum score of a right answer, because VQA's accuracy has values between 0 and 1
LONGEST_TEXT = 200  # characters of a question or an answer in the terminal


def most_confident(rows: Iterable[dict], metric: str, most: int) -> tuple[list[dict], int]:
    """Return the `most` most confident wrong answers, and the number of all wrong answers.

    rows: rows of OUTPUT.jsonl. For a metric other than accuracy, all answers count, and the lowest scores come first.
    """
    count, graded = 0, metric != "accuracy"

    def wrong() -> Iterator[dict]:
        nonlocal count
        for row in rows:
            scored = is_number(row.get("score")) and is_number(row.get("logprob"))
            if scored and (graded or row["score"] < RIGHT):
                count += 1
                yield row

    # Ask for at least one: nsmallest(0) would read no rows, so none would be counted.
    found = heapq.nsmallest(max(1, most), wrong(), key=lambda row: (row["score"] if graded else 0, -row["logprob"]))
    return found[:most], count


def mistake_lines(rows: Iterable[dict], metric: str, most: int) -> list[str]:
    """Return a line with the count, and two lines per mistake, the most confident first. most: 0 to count only."""
    found, count = most_confident(rows, metric, most)
    if count == 0:
        return ["all answers are right"]
    if not found:
        wrong = "wrong answer" if count == 1 else "wrong answers"
        return [f"{count:,} {wrong}: --show_wrong 10 shows some"] if metric == "accuracy" else []
    lines = [f"{_order(len(found), count, metric)}:"]
    for row in found:
        lines.append(
            f"  {percent(row)}  {_quoted(row.get('text'))}, expected {_quoted(reference_text(row.get('reference')))}"
        )
        places = [str(place.get("path") if isinstance(place, dict) else place) for place in row.get("images", ())]
        # A question without kinds has its prompt as its kind; the prompt is shown anyway.
        kinds = [kind for kind in row.get("kinds", ()) if kind != row.get("prompt")]
        about = [f"id {row.get('question_id')}", *kinds, *places]
        lines.append(f"          {_short(row.get('prompt'))}  ({', '.join(about)})")
    return lines


def mistakes_part(run: RunFiles) -> list[Block]:
    """Return blocks with the most confident mistakes of every evaluation in a run's folder."""
    blocks: list[Block] = []
    for name, content in run.evaluations.items():
        path = run.output_dir / Path(name).with_suffix(".jsonl")
        if name in run.problems or not path.is_file():
            continue
        if len(run.evaluations) > 1:
            blocks.append(heading(name))
        try:
            blocks += _cards(path, content, run.output_dir)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            blocks.append(note(f"{path.name} can't be read ({error}).", "warn"))
    return blocks


def _cards(path: Path, content: dict, output_dir: Path) -> list[Block]:
    metric = str(content.get("metric", "accuracy"))
    with path.open(encoding="utf-8") as file:
        rows = (row for line in file if line.strip() and isinstance(row := json.loads(line), dict))
        found, count = most_confident(rows, metric, MOST_SHOWN)
    if not found:
        return [note("All answers are right.", "note")]
    text = (
        f"{_order(len(found), count, metric)}. The percentage is the probability that the model gave to exactly this "
        f"answer. All answers are in {path.name}."
    )
    cards = [_card(row, content.get("turns"), output_dir) for row in found]
    return [note(text, "note"), {"kind": "cards", "cards": cards}]


def _card(row: dict, turns: object, output_dir: Path) -> dict[str, object]:
    images = row.get("images") if isinstance(row.get("images"), list) else []
    earlier = row["turn"] - 1 if turns == "together" and is_number(row.get("turn")) else 0
    kinds = [kind for kind in row.get("kinds") or () if kind != row.get("prompt")]
    return {
        "images": [shown_image(place, output_dir) for place in images[:MOST_IMAGES]],
        "question": row.get("prompt", ""),
        "note": f"after {earlier} earlier turns with their true answers" if earlier > 0 else "",
        "lines": [
            ("answer", str(row.get("text", ""))),
            ("confidence", percent(row)),
            ("reference", reference_text(row.get("reference"))),
            *([("score", f"{row['score']:.3g}")] if row["score"] > 0 else []),
            ("id", ", ".join(map(str, [row.get("question_id", ""), *kinds]))),
        ],
        "folded": "",
        "others": [],
    }


def percent(row: dict) -> str:
    """Format the probability that the model gave to an answer. row: with its logprob."""
    probability = math.exp(min(0.0, row["logprob"]))
    if probability >= 0.9995:
        return ">99.9 %"
    return f"{100 * probability:.1f} %" if probability >= 0.001 else "<0.1 %"


def reference_text(reference: object) -> str:
    """Return a reference answer as text; several references are joined without duplicates."""
    if isinstance(reference, list):
        return " / ".join(dict.fromkeys(map(str, reference)))
    return str(reference)


def _order(shown: int, count: int, metric: str) -> str:
    """Describe the number of answers shown, and their order."""
    number = f"{count:,}" if shown == count else f"{shown:,} of {count:,}"
    if metric != "accuracy":
        return f"{number} answers, the lowest {metric} first"
    return f"{number} wrong answer{'' if count == 1 else 's'}, the most confident first"


def _quoted(text: object) -> str:
    return f'"{_short(text)}"'


def _short(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST_TEXT else f"{line[: LONGEST_TEXT - 3]}..."
