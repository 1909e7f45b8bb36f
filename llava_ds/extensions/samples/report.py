"""Add a section on sample questions to the report, with images and how the answers changed."""

import itertools
import re
from pathlib import Path

from llava_ds.constants import IMAGE_TOKEN
from llava_ds.extensions.base import ReportPart
from llava_ds.tracking.blocks import Block, note, styled
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.series import is_number
from llava_ds.tracking.shown_images import shown_image, spread
from llava_ds.tracking.wording import duration

MOST_QUESTIONS, MOST_ANSWERS = 24, 12


class Report(ReportPart):
    """The report's section on sample questions."""

    def __init__(self, run: RunFiles) -> None:
        self.blocks = run.blocks_of("samples.jsonl", sampled_answers)

    def sections(self) -> dict[str, list[Block]]:
        """Return the section: a card for each question."""
        return {"Answers while training": self.blocks}


def sampled_answers(rows: list[dict], output_dir: Path) -> list[Block]:
    """Build cards of the questions. rows: of samples.jsonl; relative image paths are below output_dir."""
    questions: dict[str, list[dict]] = {}
    for row in rows:
        questions.setdefault(str(row.get("id")), []).append(row)
    shown = list(questions.values())[:MOST_QUESTIONS]
    more = len(questions) - len(shown)
    blocks: list[Block] = [{"kind": "cards", "cards": [_card(asked, output_dir) for asked in shown]}]
    if more > 0:
        blocks.append(note(f"{more:,} more questions are in samples.jsonl.", "note"))
    seconds = {row["step"]: row["seconds"] for row in rows if is_number(row.get("seconds"))}
    if seconds:
        times = "once" if len(seconds) == 1 else f"{len(seconds):,} times"
        total = duration(sum(seconds.values()))
        blocks.append(note(f"Asked {times} during training. The answers took {total} in total.", "note"))
    return blocks


def _card(asked: list[dict], output_dir: Path) -> dict[str, object]:
    asked = sorted(asked, key=lambda row: row["step"])
    last = asked[-1]
    places = last.get("images") if isinstance(last.get("images"), list) else []
    reference = last.get("reference")
    question = plain_question(str(last.get("question", "")))
    *earlier, final = [_answer_line(*stretch, reference) for stretch in spread(_stretches(asked), MOST_ANSWERS)]
    return {
        "images": [shown_image(place, output_dir) for place in places],
        "question": question,
        "note": "",
        "lines": [final] if reference is None else [final, ("reference", reference)],
        "folded": "Earlier answers",
        "others": earlier,
    }


def _answer_line(first: int, last: int, answer: str, reference: object) -> tuple[str, object]:
    """Return the first and last step of an answer, and the answer, marked if it equals the reference."""
    same = reference is not None and answer.strip() == str(reference).strip()
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return steps, styled(answer, "same") if same else answer


def _stretches(asked: list[dict]) -> list[tuple[int, int, str]]:
    """Join equal consecutive answers: (first step, last step, answer)."""
    found = []
    for answer, same in itertools.groupby(asked, key=lambda row: str(row.get("answer", ""))):
        steps = [row["step"] for row in same]
        found.append((steps[0], steps[-1], answer))
    return found


def plain_question(text: str) -> str:
    """Return a prompt without image tokens and LLaVA's speaker labels."""
    return re.sub(r"^USER:\s*|\s*ASSISTANT:$", "", text.replace(IMAGE_TOKEN, "").strip())
