"""The questions that were asked while it trained, with their pictures and how the answers changed."""

import base64
import io
from pathlib import Path

from PIL import Image

from llava_ds.constants import DataError
from llava_ds.data.images import load_image
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
    pictures = "".join(_picture(output_dir / str(path)) for path in paths)
    reference = last.get("reference")
    lines = [f"<dt>question</dt><dd>{esc(last.get('question', ''))}</dd>"]
    if reference is not None:
        lines.append(f"<dt>reference</dt><dd>{esc(reference)}</dd>")
    for row in _spread(asked, MOST_ANSWERS):
        answer = str(row.get("answer", ""))
        same = reference is not None and answer.strip() == str(reference).strip()
        text = f'<span class="same">{esc(answer)}</span>' if same else esc(answer)
        lines.append(f"<dt>step {row['step']:,}</dt><dd>{text}</dd>")
    return f'<div class="sample">{pictures}<dl>{"".join(lines)}</dl></div>'


def _picture(path: Path) -> str:
    try:
        return f'<img src="{data_uri(load_image(path), PICTURE_SIDE, "JPEG")}" alt="">'
    except DataError as error:
        return sentence(f"The picture can't be shown: {error}")


def _spread(rows: list[dict], most: int) -> list[dict]:
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
