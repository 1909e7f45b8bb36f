"""Add a section on generated answers, with images and rewards, to the report."""

from pathlib import Path

from llava_ds.extensions.base import ReportPart
from llava_ds.tracking.blocks import Block, note, styled
from llava_ds.tracking.run_files import RunFiles
from llava_ds.tracking.series import is_number
from llava_ds.tracking.shown_images import shown_image, spread

MOST_STEPS, MOST_ANSWERS = 8, 6


class Report(ReportPart):
    """Builds the report's section on generated answers."""

    def __init__(self, run: RunFiles) -> None:
        self.blocks = run.blocks_of("rollouts.jsonl", rewarded_answers)

    def sections(self) -> dict[str, list[Block]]:
        """Return the section: cards with the answers to some prompts."""
        return {"Rewarded answers": self.blocks}


def rewarded_answers(rows: list[dict], output_dir: Path) -> list[Block]:
    """Build cards for some steps, each with one prompt and its answers.

    rows: of rollouts.jsonl; relative image paths are below output_dir.
    """
    shown = spread(rows, MOST_STEPS)
    blocks: list[Block] = [{"kind": "cards", "cards": [_card(row, output_dir) for row in shown]}]
    if more := len(rows) - len(shown):
        blocks.append(note(f"{more:,} more are in rollouts.jsonl: one prompt of every step.", "note"))
    return blocks


def _card(row: dict, output_dir: Path) -> dict[str, object]:
    answers = row.get("answers") if isinstance(row.get("answers"), list) else []
    answers = [answer for answer in answers if isinstance(answer, dict)]
    images = row.get("images") if isinstance(row.get("images"), list) else []
    lines = [_line(answer) for answer in answers]
    return {
        "images": [shown_image(place, output_dir) for place in images],
        "question": str(row.get("prompt", "")),
        "note": f"step {row['step']:,}",
        "lines": [*lines[:MOST_ANSWERS], ("reference", styled(row.get("reference", ""), "same"))],
        "folded": "More answers",
        "others": lines[MOST_ANSWERS:],
    }


def _line(answer: dict) -> tuple[str, object]:
    """Return an answer's label (reward and count) and its text."""
    reward, times = answer.get("reward"), answer.get("times")
    label = f"{reward:.2f}" if is_number(reward) else "?"
    return f"{label} × {times}" if is_number(times) and times > 1 else label, str(answer.get("text", ""))
