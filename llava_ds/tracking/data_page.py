"""What a model will be trained on, for a person to look at: text with the supervised part marked, and pictures."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.preflight import place_of
from llava_ds.runtime.ranks import printable
from llava_ds.tracking.markup import document, esc, navigation, section, table
from llava_ds.tracking.sampled import data_uri

THUMBNAIL = 224  # pixels of the longer side of a picture on the page


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one kind: "image", "supervised" or "context"; an image run's text is empty."""

    kind: str
    num_tokens: int
    text: str


@dataclass(frozen=True)
class ShownSample:
    """A sample as a person sees it. pictures: as they are, before they become tiles; title: where it stands."""

    title: str
    note: str
    runs: tuple[Run, ...]
    pictures: tuple[Image.Image, ...]


def runs_of(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[Run, ...]:
    """The ids of a sample (IMAGE_TOKEN_INDEX at image positions) in runs, whose texts joined are the sample's text."""
    runs, start = [], 0
    kinds = [_kind(token, label) for token, label in zip(input_ids, labels)]
    piece_start, text_before = 0, ""  # a text is decoded together with what stands before it since the last picture
    for end in range(1, len(kinds) + 1):
        if end < len(kinds) and kinds[end] == kinds[start]:
            continue
        if kinds[start] == "image":
            runs.append(Run("image", end - start, ""))
            piece_start, text_before = end, ""
        else:
            text = tokenizer.decode(input_ids[piece_start:end], clean_up_tokenization_spaces=False)
            runs.append(Run(kinds[start], end - start, text.removeprefix(text_before)))
            text_before = text
        start = end
    return tuple(runs)


def supervised_text(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model learns to write: every supervised stretch decoded by itself, joined."""
    stretches: list[list[int]] = []
    before = False
    for token, label in zip(input_ids, labels):
        now = label != IGNORE_INDEX
        if now and not before:
            stretches.append([])
        if now:
            stretches[-1].append(token)
        before = now
    return "".join(tokenizer.decode(stretch, clean_up_tokenization_spaces=False) for stretch in stretches)


def in_terminal(sample: ShownSample, coloured: bool) -> str:
    """A sample as lines of text, the supervised part green, or between >>> and <<< where there are no colours."""
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
    """A self-contained HTML page: summary, samples with their pictures and mask, and rejected records.

    title: the path of the data.
    """
    cards = "".join(map(_card, samples))
    rows = [(f"{place_of(row)}: record {row['index']}", row["id"], row["reason"]) for row in rejected]
    legend = (
        '<p class="note"><mark>Marked</mark> text is supervised: what the model learns to write. '
        '<span class="image">image</span> stands for the features of a picture.</p>'
    )
    parts = {
        "Samples": legend + f'<div class="data">{cards}</div>' if cards else "",
        f"Left out: {len(rows):,}": table(["where", "id", "why"], rows, stacks=True) if rows else "",
    }
    shown = {name: content for name, content in parts.items() if content}
    lead = f'<p class="note">{esc(title)}</p><pre>{esc(chr(10).join(summary))}</pre>'
    return document(
        f"{Path(title).name}: data",
        [
            f"<header><h1>{esc(Path(title).name)}</h1>{lead}</header>",
            navigation(shown),
            *(section(name, content) for name, content in shown.items()),
        ],
    )


def _card(sample: ShownSample) -> str:
    pictures = "".join(f'<img src="{data_uri(picture, THUMBNAIL)}" alt="">' for picture in sample.pictures)
    shown = f'<div class="pictures">{pictures}</div>' if pictures else ""
    text = f"<pre>{''.join(map(_run_html, sample.runs))}</pre>"
    head = f'<h3>{esc(sample.title)}</h3><p class="note">{esc(sample.note)}</p>'
    return f'<article class="datum">{head}<div class="shown">{shown}{text}</div></article>'


def _kind(token: int, label: int) -> str:
    if token == IMAGE_TOKEN_INDEX:
        return "image"
    return "context" if label == IGNORE_INDEX else "supervised"


def _run_html(run: Run) -> str:
    if run.kind == "image":
        return f'<span class="image">{run.num_tokens} image positions</span>'
    text = esc(run.text)
    return f"<mark>{text}</mark>" if run.kind == "supervised" else text
