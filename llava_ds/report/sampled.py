"""The questions that were asked while it trained, with their pictures and how the answers changed."""

import base64
import dataclasses
import io
import re
from pathlib import Path

from PIL import Image

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.images import load_image
from llava_ds.data.sample import FileRef
from llava_ds.report.markup import esc, sentence

MOST_QUESTIONS, MOST_ANSWERS = 24, 12
PICTURE_SIDE = 320  # pixels of the longer side


def sampled_answers(rows: list[dict], output_dir: Path) -> str:
    """Cards of questions, as HTML. rows: of samples.jsonl; relative paths of pictures are below output_dir."""
    questions: dict[str, list[dict]] = {}
    for row in rows:
        questions.setdefault(str(row.get("id")), []).append(row)
    shown = list(questions.values())[:MOST_QUESTIONS]
    more = len(questions) - len(shown)
    cards = "".join(_card(asked, output_dir) for asked in shown)
    note = "" if more <= 0 else sentence(f"{more:,} more questions are in samples.jsonl.", "note")
    return f'<div class="samples">{cards}</div>{note}'


def _card(asked: list[dict], output_dir: Path) -> str:
    asked = sorted(asked, key=lambda row: row["step"])
    last = asked[-1]
    paths = last.get("images") if isinstance(last.get("images"), list) else []
    pictures = "".join(shown_image(place, output_dir) for place in paths)
    reference = last.get("reference")
    question = str(last.get("question", "")).replace(IMAGE_TOKEN, "").strip()  # what it marks is seen
    question = re.sub(r"^(\w+:)\s+", r"\1 ", question)  # and left a line of its own behind
    lines = []
    if reference is not None:
        lines.append(f"<dt>reference</dt><dd>{esc(reference)}</dd>")
    for first, last_step, answer in _spread(_stretches(asked), MOST_ANSWERS):
        same = reference is not None and answer.strip() == str(reference).strip()
        text = f'<span class="same">{esc(answer)}</span>' if same else esc(answer)
        steps = f"step {first:,}" if first == last_step else f"steps {first:,} to {last_step:,}"
        lines.append(f"<dt>{steps}</dt><dd>{text}</dd>")
    return f'<div class="sample">{pictures}<p class="question">{esc(question)}</p><dl>{"".join(lines)}</dl></div>'


def shown_image(place: object, output_dir: Path) -> str:
    """An image as HTML, or a sentence where it can't be read. place: of EncodedDataset.pictures_of, as JSON."""
    try:
        ref = FileRef(**place) if isinstance(place, dict) else FileRef(str(place))
        picture = load_image(dataclasses.replace(ref, path=str(output_dir / ref.path)))
        return f'<img src="{data_uri(picture, PICTURE_SIDE, "JPEG")}" alt="">'
    except (DataError, TypeError) as error:
        return sentence(f"The picture can't be shown: {error}")


def _stretches(asked: list[dict]) -> list[tuple[int, int, str]]:
    """(first step, last step, answer) of neighbours that are the same."""
    found: list[tuple[int, int, str]] = []
    for row in asked:
        answer = str(row.get("answer", ""))
        if found and found[-1][2] == answer:
            found[-1] = (found[-1][0], row["step"], answer)
        else:
            found.append((row["step"], row["step"], answer))
    return found


def _spread(rows: list, most: int) -> list:
    """So many of them, evenly, the first and the last included."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def data_uri(picture: Image.Image, side: int, form: str = "PNG") -> str:
    """A picture as an address that holds it, no side longer than so many pixels."""
    picture = picture.copy()
    picture.thumbnail((side, side))
    stream = io.BytesIO()
    picture.save(stream, form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(stream.getvalue()).decode()
