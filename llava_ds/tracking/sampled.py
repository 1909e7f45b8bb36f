"""The sample questions of a run, with their images and how the answers changed."""

import base64
import dataclasses
import io
import itertools
import re
from pathlib import Path

from PIL import Image

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.images.decode import load_image
from llava_ds.data.sample import FileRef
from llava_ds.tracking.blocks import Block, note, styled
from llava_ds.tracking.series import is_number
from llava_ds.tracking.wording import duration

MOST_QUESTIONS, MOST_ANSWERS = 24, 12
IMAGE_SIDE = 320  # pixels of the longer side


def sampled_answers(rows: list[dict], output_dir: Path) -> list[Block]:
    """Cards of questions. rows: of samples.jsonl; relative paths of images are below output_dir."""
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
        blocks.append(note(f"Asked {times} while training, which took {total} in all.", "note"))
    return blocks


def _card(asked: list[dict], output_dir: Path) -> dict[str, object]:
    asked = sorted(asked, key=lambda row: row["step"])
    last = asked[-1]
    places = last.get("images") if isinstance(last.get("images"), list) else []
    reference = last.get("reference")
    question = str(last.get("question", "")).replace(IMAGE_TOKEN, "").strip()  # the image is shown
    question = re.sub(r"^USER:\s*|\s*ASSISTANT:$", "", question)  # LLaVA's words for who speaks
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
    """The steps at which an answer was given, and the answer, marked if it is the reference."""
    same = reference is not None and answer.strip() == str(reference).strip()
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return steps, styled(answer, "same") if same else answer


def shown_image(place: object, output_dir: Path) -> dict[str, str | None]:
    """An image as an address that holds it, or the problem of reading it. place: of EncodedDataset.images_of."""
    try:
        ref = FileRef(**place) if isinstance(place, dict) else FileRef(str(place))
        image = load_image(dataclasses.replace(ref, path=str(output_dir / ref.path)))
        return {"uri": data_uri(image, IMAGE_SIDE, "JPEG"), "problem": None}
    except (DataError, TypeError) as error:
        return {"uri": None, "problem": str(error)}


def _stretches(asked: list[dict]) -> list[tuple[int, int, str]]:
    """Join equal neighbours: (first step, last step, answer)."""
    found = []
    for answer, same in itertools.groupby(asked, key=lambda row: str(row.get("answer", ""))):
        steps = [row["step"] for row in same]
        found.append((steps[0], steps[-1], answer))
    return found


def spread(rows: list, most: int) -> list:
    """Choose at most so many rows, evenly, the first and the last included."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def data_uri(image: Image.Image, side: int, form: str = "PNG") -> str:
    """An image as an address that holds it, no side longer than so many pixels."""
    image = image.copy()
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(stream.getvalue()).decode()
