"""Convert an accepted sample to text and images for display."""

from pathlib import Path

from PIL import Image
from transformers import PreTrainedTokenizerBase

from llava_ds.boxes import Numbers
from llava_ds.constants import IGNORE_INDEX, DataError
from llava_ds.data.dataset import EncodedDataset
from llava_ds.data.encoded_rows import SizedMedia, media_from_text, place_of
from llava_ds.data.images.decode import load_images
from llava_ds.geometry import ImageOptions, coordinate_frame
from llava_ds.tracking.data_page import Run, ShownSample, draw_boxes, runs_of


def shown_sample(
    dataset: EncodedDataset, index: int, tokenizer: PreTrainedTokenizerBase, with_images: bool = False
) -> ShownSample:
    """Return an accepted sample for display. If images can't be decoded, the note says so, and they are left out."""
    row = dataset.row(int(dataset.rows[index]))
    note = f"{row['length']:,} tokens, {row['num_targets']:,} supervised" + (", cut short" if row["truncated"] else "")
    if row["weights"] is not None:
        weights = {weight for weight, label in zip(row["weights"], row["labels"]) if label != IGNORE_INDEX}
        note += f", weights of the loss {', '.join(f'{weight:g}' for weight in sorted(weights))}"
    images = []
    if with_images:
        try:
            media = media_from_text(row["media"])
            for one in media:
                shown = load_images(one.media, one.sizes, dataset.image_options)
                images += [draw_boxes(image, _on(image, one, len(media), dataset.image_options)) for image in shown]
        except DataError as error:
            note += f"; {error}"
    return ShownSample(
        title=f"{row['id']} ({Path(place_of(row)).name}, record {row['index']})",
        note=note,
        runs=_runs(row, tokenizer),
        images=tuple(images),
    )


def _on(image: Image.Image, one: SizedMedia, num_media: int, options: ImageOptions) -> list[Numbers]:
    """Return the boxes and points that a sample's text has for an image, in its pixels."""
    if not one.boxes:
        return []
    frame = coordinate_frame(image.size, num_media, one.media.apply_settings(options))
    return [frame.pixels(numbers) for numbers in one.boxes]


def _runs(row: dict[str, object], tokenizer: PreTrainedTokenizerBase) -> tuple[Run, ...]:
    """Return the runs of a sample. A pair of answers gives the runs with the chosen, then with the rejected answer."""
    ids, labels = row["input_ids"], row["labels"]
    if (length := row.get("chosen_length")) in (None, len(ids)):
        return runs_of(ids, labels, tokenizer)
    between = Run("context", 0, "\n--- the same with the rejected answer ---\n")
    parts = (runs_of(ids[part], labels[part], tokenizer) for part in (slice(length), slice(length, None)))
    chosen, rejected = parts
    return (*chosen, between, *rejected)
