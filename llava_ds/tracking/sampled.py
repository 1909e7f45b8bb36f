"""The questions that were asked while it trained, with their pictures and how the answers changed."""

import base64
import dataclasses
import io
import re
from pathlib import Path

from PIL import Image

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.images.decode import load_image
from llava_ds.data.sample import FileRef
from llava_ds.tracking.markup import details, esc, sentence
from llava_ds.tracking.run_files import is_number
from llava_ds.tracking.wording import duration

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
    return f'<div class="samples">{cards}</div>{note}{_cost(rows)}'


def _cost(rows: list[dict]) -> str:
    """Seconds that answering took, where the rows have them."""
    seconds = {row["step"]: row["seconds"] for row in rows if is_number(row.get("seconds"))}
    if not seconds:
        return ""
    times = "once" if len(seconds) == 1 else f"{len(seconds):,} times"
    return sentence(f"Asked {times} while training, which took {duration(sum(seconds.values()))} in all.", "note")


def _card(asked: list[dict], output_dir: Path) -> str:
    asked = sorted(asked, key=lambda row: row["step"])
    last = asked[-1]
    paths = last.get("images") if isinstance(last.get("images"), list) else []
    pictures = "".join(shown_image(place, output_dir) for place in paths)
    reference = last.get("reference")
    question = str(last.get("question", "")).replace(IMAGE_TOKEN, "").strip()  # what it marks is seen
    question = re.sub(r"^USER:\s*|\s*ASSISTANT:$", "", question)  # LLaVA's words for who speaks
    *earlier, final = [_answer_line(*stretch, reference) for stretch in _spread(_stretches(asked), MOST_ANSWERS)]
    told = f'<p class="question">{esc(question)}</p>' if question else ""
    right = "" if reference is None else f"<dt>reference</dt><dd>{esc(reference)}</dd>"
    before = details(f"Earlier answers ({len(earlier):,})", f"<dl>{''.join(earlier)}</dl>") if earlier else ""
    return f'<div class="sample">{pictures}{told}<dl>{final}{right}</dl>{before}</div>'


def _answer_line(first: int, last: int, answer: str, reference: object) -> str:
    """An answer with the steps at which it was given, marked where it is the reference."""
    same = reference is not None and answer.strip() == str(reference).strip()
    text = f'<span class="same">{esc(answer)}</span>' if same else esc(answer)
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return f"<dt>{steps}</dt><dd>{text}</dd>"


def shown_image(place: object, output_dir: Path) -> str:
    """An image as HTML, or a sentence where it can't be read. place: of EncodedDataset.images_of, as JSON."""
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
