"""Hashes of everything that an encoded data set depends on."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from llava_ds.boxes import LLAVA_BOXES
from llava_ds.geometry import BICUBIC, ImageOptions
from llava_ds.tokenizer import first_space_pattern, framing_ids

# Libraries that make ids of records: another version may make others.
ENCODING_LIBRARIES = ("tokenizers", "transformers", "jinja2")

DEEP = "deep"  # in a row's media: descriptions of images that use little of their range
VIDEO_OPTIONS = ("video_fps", "frames_upbound", "pool_stride", "pool_mode", "newline_position")


@dataclass(frozen=True)
class EncodingOptions:
    """Everything that the ids of a sample depend on, besides the sample and the tokenizer."""

    template: str  # a key of TEMPLATES
    max_length: int
    mm_use_im_start_end: bool = False
    supervise_last_turn_only: bool = False
    split_special_tokens: bool = False
    answer_is_reference: bool = False  # the last answer is compared with those that a model draws, and not learned


def digest_of(parts: Iterable[str]) -> str:
    """A hash of all parts in order, usable as a folder's name."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:20]


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything that a tokenizer's ids depend on: itself, what it adds around a text, and what a template may read."""
    first_space = first_space_pattern(tokenizer)
    return [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(sorted(tokenizer.get_added_vocab().items())),
        json.dumps([tokenizer.bos_token, tokenizer.eos_token, str(tokenizer.chat_template)]),
        json.dumps([framing_ids(tokenizer), first_space and first_space.pattern]),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
    ]


def versions_of(packages: Iterable[str]) -> list[str]:
    """A text with the installed version of every package."""
    return [f"{name} {_version(name)}" for name in packages]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def options_part(options: ImageOptions) -> str:
    """All fields as text. The class's earlier name is in fingerprints of earlier runs, and stays; later fields are in
    none of them while they change nothing."""
    text = repr(options).replace(ImageOptions.__name__, "PictureOptions", 1)
    return text.replace(", value_range=None", "", 1).replace(f", short_side=None, square_resample={BICUBIC}", "", 1)


def has_videos(media: pa.ChunkedArray) -> bool:
    """True if a table's column of media has a video."""
    # A path may hold these words too, but not these quotes: JSON escapes them.
    found = [pa.compute.any(pa.compute.match_substring(media, f'["{kind}", [')) for kind in ("frames", "video")]
    return any(each.as_py() for each in found)


def has_boxes(media: pa.ChunkedArray) -> bool:
    """True if a table's column of media has boxes or points."""
    return bool(pa.compute.any(pa.compute.match_substring(media, '{"boxes": [')).as_py())


def deep_rows(media: pa.ChunkedArray) -> np.ndarray:
    """Rows whose column of media describes images that use little of their range, ascending."""
    found = pa.compute.match_substring(media, f'{{"{DEEP}": [')
    return pa.compute.indices_nonzero(found).to_numpy().astype(np.int64)


def box_parts(options: ImageOptions) -> list[str]:
    """How boxes are written, of models that don't write them as LLaVA does."""
    return [] if options.boxes == LLAVA_BOXES else [repr(options.boxes)]


def video_parts(options: ImageOptions) -> list[str]:
    """What an architecture's rule makes of videos."""
    return [] if options.video is None else [repr(options.video), repr(options.force_sample)]


def options_that_matter(image_options: ImageOptions, videos: bool) -> ImageOptions:
    """The options, with defaults for those that change no sample of a table. videos: it has some.

    max_pixels is such an option, as the rows already show which images were too large.
    """
    unused = {"max_pixels"} if videos else {"max_pixels", *VIDEO_OPTIONS}
    defaults = {field.name: field.default for field in dataclasses.fields(image_options) if field.name in unused}
    return dataclasses.replace(image_options, **defaults)
