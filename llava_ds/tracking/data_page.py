"""Show samples for inspection: their text with the supervised part marked, and their images."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerBase

from llava_ds.boxes import Numbers
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.encoded_rows import place_of
from llava_ds.runtime.ranks import printable
from llava_ds.tracking.blocks import note, pre, render, table
from llava_ds.tracking.shown_images import data_uri

THUMBNAIL = 224  # longer side of an image on the page, in pixels
BOX_COLOURS = ("red", "lime", "blue", "magenta", "cyan", "orange")  # colours of the boxes on an image, reused in order


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one kind: "image" (with empty text), "supervised" or "context"."""

    kind: str
    num_tokens: int
    text: str


@dataclass(frozen=True)
class ShownSample:
    """A sample for display. title: its id and place in the data; images: whole images with boxes drawn on them."""

    title: str
    note: str
    runs: tuple[Run, ...]
    images: tuple[Image.Image, ...]


def runs_of(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[Run, ...]:
    """Split a sample's ids (IMAGE_TOKEN_INDEX at image positions) into runs of one kind, with their decoded texts."""
    runs, end = [], 0
    piece_start, text_before = 0, ""  # decoding starts at the last image, as a run's text may depend on earlier tokens
    for kind, neighbours in itertools.groupby(map(_kind, input_ids, labels)):
        length = len(list(neighbours))
        end += length
        if kind == "image":
            runs.append(Run("image", length, ""))
            piece_start, text_before = end, ""
        else:
            text = tokenizer.decode(input_ids[piece_start:end], clean_up_tokenization_spaces=False)
            runs.append(Run(kind, length, text.removeprefix(text_before)))
            text_before = text
    return tuple(runs)


def draw_boxes(image: Image.Image, boxes: Iterable[Numbers]) -> Image.Image:
    """Return a copy of an image with boxes and points drawn on it, visible even on a thumbnail. boxes: in pixels."""
    image = image.copy()
    draw, line = ImageDraw.Draw(image), max(1, round(2 * max(image.size) / THUMBNAIL))
    for colour, box in zip(itertools.cycle(BOX_COLOURS), boxes):
        if len(box) == 4:
            draw.rectangle(box, outline=colour, width=line)
        else:
            draw.circle(box, 2 * line, fill=colour)
    return image


def supervised_text(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text that the model learns to write: the supervised stretches, decoded separately and joined."""
    neighbours = itertools.groupby(zip(input_ids, labels), key=lambda pair: pair[1] != IGNORE_INDEX)
    stretches = [[token for token, _ in pairs] for supervised, pairs in neighbours if supervised]
    return "".join(tokenizer.decode(stretch, clean_up_tokenization_spaces=False) for stretch in stretches)


def in_terminal(sample: ShownSample, coloured: bool) -> str:
    """Return a sample as text. The supervised part is green if `coloured`, else between >>> and <<<."""
    opening, closing = ("\x1b[32m", "\x1b[0m") if coloured else (">>>", "<<<")
    parts = [f"--- {printable(sample.title)} ({printable(sample.note)})\n"]
    for run in sample.runs:
        text = printable(run.text, keep="\n\t")
        if run.kind == "image":
            parts.append(f"[{run.num_tokens} image positions]")
        else:
            parts.append(f"{opening}{text}{closing}" if run.kind == "supervised" else text)
    return "".join(parts)


def page(title: str, summary: Iterable[str], samples: Iterable[ShownSample], rejected: Iterable[dict]) -> str:
    """Return a self-contained HTML page with the summary, the samples and their images, and the rejected records.

    title: path of the data.
    """
    cards = [
        {
            "title": sample.title,
            "note": sample.note,
            "images": [data_uri(image, THUMBNAIL) for image in sample.images],
            "runs": sample.runs,
        }
        for sample in samples
    ]
    rows = [(f"{place_of(row)}: record {row['index']}", row["id"], row["reason"]) for row in rejected]
    sections = {
        "Samples": [{"kind": "legend"}, {"kind": "samples", "samples": cards}] if cards else [],
        f"Left out: {len(rows):,}": [table(["where", "id", "why"], rows, stacks=True)] if rows else [],
    }
    return render(
        "page.html.j2",
        title=f"{Path(title).name}: data",
        name=Path(title).name,
        first=[note(title, "note"), pre("\n".join(summary))],
        sections={name: blocks for name, blocks in sections.items() if blocks},
        navigates=True,
    )


def _kind(token: int, label: int) -> str:
    if token == IMAGE_TOKEN_INDEX:
        return "image"
    return "context" if label == IGNORE_INDEX else "supervised"
