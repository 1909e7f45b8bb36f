"""Embed images of questions in a page."""

import base64
import dataclasses
import io
from pathlib import Path

from PIL import Image

from llava_ds.constants import DataError
from llava_ds.data.images.decode import load_image
from llava_ds.data.sample import FileRef

IMAGE_SIDE = 320  # longer side in pixels


def shown_image(place: object, output_dir: Path) -> dict[str, str | None]:
    """Return {"uri", "problem"}: an image as a data URI, or why it can't be read. place: from images_of."""
    try:
        ref = FileRef(**place) if isinstance(place, dict) else FileRef(str(place))
        image = load_image(dataclasses.replace(ref, path=str(output_dir / ref.path)))
        return {"uri": data_uri(image, IMAGE_SIDE, "JPEG"), "problem": None}
    except (DataError, TypeError) as error:
        return {"uri": None, "problem": str(error)}


def spread(rows: list, most: int) -> list:
    """Choose at most `most` rows, evenly spaced, including the first and the last."""
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def data_uri(image: Image.Image, side: int, form: str = "PNG") -> str:
    """Return an image as a data URI, with no side longer than `side` pixels."""
    image = image.copy()
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, form)
    return f"data:image/{form.lower()};base64," + base64.b64encode(stream.getvalue()).decode()
