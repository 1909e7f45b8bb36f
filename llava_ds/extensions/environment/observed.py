# n tiles of an image, S side of a tile
"""Token ids and tiles of what an environment shows, in the form of the conversations that train."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.dataset import encoding_options
from llava_ds.data.encode import encoder_of
from llava_ds.data.end_markers import end_markers
from llava_ds.data.images.decode import aspect_ratio_of, check_resized, to_rgb
from llava_ds.data.images.resize import cut_by, to_tile
from llava_ds.data.sample import FileRef, Media, Message, Transcript
from llava_ds.extensions.environment.user_class import FLAG, Observation
from llava_ds.geometry import ImageOptions, media_layout, tiled_cut
from llava_ds.layouts import ImageText, MediaLayout
from llava_ds.train.plan import Plan

EXCHANGE = (Message("human", "x"), Message("gpt", "y"))
SEVERAL = 2  # images of a conversation: a single one may get another layout
NO_FILE = FileRef("the image")


class ObservationEncoder:
    """Encodes observations: as the first question, or as the text between two answers."""

    def __init__(self, plan: Plan) -> None:
        version = plan.args.model.version
        self._encoder = encoder_of(plan.model.tokenizer, encoding_options(plan.args), plan.images)
        ids, start = self._encoded(EXCHANGE)
        ends = np.flatnonzero(np.isin(ids[start:], end_markers(version, plan.model.tokenizer)))
        if not len(ends):
            raise ConfigError(f"{FLAG} can't be used with --version {version}, whose answers end by several tokens")
        self._opened = start + ends[0] + 1  # ids of a question and its answer, up to the end marker
        answer, between = ids[start : self._opened], self.between(Observation("x"), ())
        expected = np.concatenate([ids[: self._opened], between, answer, between, answer])
        if not np.array_equal(self._encoded(3 * EXCHANGE)[0][: len(expected)], expected):
            raise ConfigError(
                f"{FLAG} can't be used with this chat template (--version {version}): it writes an answer in another "
                "way once a question follows, so that a drawn answer can't be continued"
            )

    def first(self, shown: Observation, marks: Sequence[int | ImageText]) -> list[int]:
        """Return the ids of a conversation that begins with an observation, up to the start of the answer."""
        ids, start = self._encoded((_question(shown), EXCHANGE[1]), marks)
        return ids[:start].tolist()

    def between(self, shown: Observation, marks: Sequence[int | ImageText]) -> list[int]:
        """Return the ids from an answer's end marker to the start of the next answer."""
        ids, start = self._encoded((*EXCHANGE, _question(shown), EXCHANGE[1]), marks)
        return ids[self._opened : start].tolist()

    def _encoded(self, messages: tuple[Message, ...], marks: Sequence[int | ImageText] = ()) -> tuple[np.ndarray, int]:
        """Return the ids of a conversation, and the position where its last answer starts."""
        self._encoder.refuse_without_rows([message.text for message in messages])
        encoded = self._encoder.encode_whole(Transcript(messages), marks)
        return encoded.input_ids, int(np.flatnonzero(encoded.labels != IGNORE_INDEX)[0])


def _question(shown: Observation) -> Message:
    return Message("human", f"{IMAGE_TOKEN}\n" * len(shown.images) + shown.text)


def tiles_of(image: Image.Image, options: ImageOptions) -> tuple[torch.Tensor, MediaLayout]:
    """Return an image's tiles (n, 3, S, S) uint8 and its layout. Raises DataError for a size that can't be used."""
    size = image.size
    if size[0] * size[1] > options.max_pixels:
        raise DataError(f"an image has {size[0]} x {size[1]} pixels, more than --max_image_pixels {options.max_pixels}")
    layout, shown = media_layout("image", (size,), SEVERAL, options), to_rgb(image, options.value_range)
    if options.tiling is not None:
        return cut_by(shown, tiled_cut("image", (size,), options), options.size, options.resample), layout
    ratio = aspect_ratio_of(Media("image", (NO_FILE,)), options)
    check_resized(NO_FILE, size, ratio, options)
    return torch.stack([to_tile(shown, ratio, options)]), layout
