"""Write a sample's boxes and points in the coordinates and words of the model being trained."""

from collections.abc import Sequence
from dataclasses import replace

from llava_ds.boxes import CoordinateFrame, Numbers, coordinate_units
from llava_ds.constants import DataError
from llava_ds.data.sample import BOX_MARK, REF_MARK, Box, Message, Sample
from llava_ds.data.sources.objects import fill_marks
from llava_ds.geometry import ImageOptions, Size, coordinate_frame

TOLERANCE = 1.0  # pixels by which rounding may move a box outside its image


def write_objects(
    sample: Sample, sizes: Sequence[tuple[Size, ...]], options: ImageOptions
) -> tuple[Sample, list[tuple[Numbers, ...]]]:
    """Replace the box and name marks of a sample by text. Returns the sample, and the coordinates written for each
    image or video.

    sizes: upright sizes of the media in pixels. Raises DataError for a box outside its image, or one that the model's
    coordinates can't express.
    """
    written: list[list[Numbers]] = [[] for _ in sample.media]
    images = [i for i, media in enumerate(sample.media) if media.kind == "image"]
    texts = []
    for box in sample.boxes:
        place = images[box.image]
        [size] = sizes[place]
        frame = coordinate_frame(size, len(sample.media), sample.media[place].apply_settings(options))
        numbers = frame.numbers(_in_pixels(box, size))
        written[place].append(numbers)
        texts.append(options.boxes.text(numbers))
    refs = [options.boxes.ref.format(ref) for ref in sample.refs]

    def filled(messages: Sequence[Message]) -> tuple[Message, ...]:
        left = {BOX_MARK: iter(texts), REF_MARK: iter(refs)}
        return tuple(replace(each, text=fill_marks(each.text, lambda mark: next(left[mark]))) for each in messages)

    filled_sample = replace(sample, messages=filled(sample.messages), rejected=filled(sample.rejected))
    return filled_sample, [tuple(numbers) for numbers in written]


def _in_pixels(box: Box, size: Size) -> Numbers:
    """Convert a box to pixels of its image. Raises DataError if it is outside the image or has no area."""
    shown = f"the box {list(box.numbers)} ({box.bbox_type}) on an image of {size[0]} x {size[1]} pixels"
    is_fraction = max(box.numbers) <= 1 and (len(box.numbers) == 4 or any(number % 1 for number in box.numbers))
    if box.bbox_type == "real" and is_fraction:
        raise DataError(f"has {shown}, smaller than a pixel: for fractions, give --bbox_type norm1")
    pixels = CoordinateFrame((0, 0), size, coordinate_units(box.bbox_type, size), None).pixels(box.numbers)
    inside = tuple(min(max(value, 0), size[i % 2]) for i, value in enumerate(pixels))
    if any(abs(value - nearest) > TOLERANCE for value, nearest in zip(pixels, inside)):
        raise DataError(f"has {shown}, outside the image: check --bbox_type and the order of the corners")
    if len(inside) == 4 and not (inside[0] < inside[2] and inside[1] < inside[3]):
        raise DataError(f"has {shown}, expected left, top, right, bottom, with left < right and top < bottom")
    return inside
