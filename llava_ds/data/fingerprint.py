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

# Libraries that produce the ids of records: other versions may produce other ids.
ENCODING_LIBRARIES = ("tokenizers", "transformers", "jinja2")

DEEP = "deep"  # key in a row's media: descriptions of images that use little of their range
VIDEO_OPTIONS = ("video_fps", "frames_upbound", "pool_stride", "pool_mode", "newline_position")


@dataclass(frozen=True)
class EncodingOptions:
    """Everything that a sample's ids depend on, except the sample and the tokenizer."""

    template: str  # a key of TEMPLATES
    max_length: int
    mm_use_im_start_end: bool = False
    supervise_last_turn_only: bool = False
    split_special_tokens: bool = False
    answer_is_reference: bool = False  # the last answer is not learned, only compared with sampled ones


def digest_of(parts: Iterable[str]) -> str:
    """Hash all parts in order to a string usable as a folder name."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:20]


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Everything that a tokenizer's ids depend on: its files, the tokens it adds around a text, and the variables that
    templates may read."""
    first_space = first_space_pattern(tokenizer)
    return [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(sorted(tokenizer.get_added_vocab().items())),
        json.dumps([tokenizer.bos_token, tokenizer.eos_token, str(tokenizer.chat_template)]),
        json.dumps([framing_ids(tokenizer), first_space and first_space.pattern]),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
    ]


def versions_of(packages: Iterable[str]) -> list[str]:
    """The installed version of every package, as text."""
    return [f"{name} {_version(name)}" for name in packages]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def options_part(options: ImageOptions) -> str:
    """Serialize the options. To keep the fingerprints of earlier runs, this uses the class's former name, and omits
    fields added later if they have their defaults."""
    text = repr(options).replace(ImageOptions.__name__, "PictureOptions", 1)
    return text.replace(", value_range=None", "", 1).replace(f", short_side=None, square_resample={BICUBIC}", "", 1)


def has_videos(media: pa.ChunkedArray) -> bool:
    """True if a table's media column contains a video."""
    # A path can't contain this text, because JSON escapes quotes.
    found = [pa.compute.any(pa.compute.match_substring(media, f'["{kind}", [')) for kind in ("frames", "video")]
    return any(each.as_py() for each in found)


def has_boxes(media: pa.ChunkedArray) -> bool:
    """True if a table's media column contains boxes or points."""
    return bool(pa.compute.any(pa.compute.match_substring(media, '{"boxes": [')).as_py())


def deep_rows(media: pa.ChunkedArray) -> np.ndarray:
    """Ascending rows whose media column describes images that use little of their range."""
    found = pa.compute.match_substring(media, f'{{"{DEEP}": [')
    return pa.compute.indices_nonzero(found).to_numpy().astype(np.int64)


def box_parts(options: ImageOptions) -> list[str]:
    """Return the form in which boxes are written; empty if it is LLaVA's form."""
    return [] if options.boxes == LLAVA_BOXES else [repr(options.boxes)]


def video_parts(options: ImageOptions) -> list[str]:
    """Return the video options; empty unless the architecture has its own rule for videos."""
    return [] if options.video is None else [repr(options.video), repr(options.force_sample)]


def options_that_matter(image_options: ImageOptions, videos: bool) -> ImageOptions:
    """Reset options that don't affect a table's samples to their defaults. videos: True if the table has videos.

    max_pixels is also reset, because the rows already show which images were too large.
    """
    unused = {"max_pixels"} if videos else {"max_pixels", *VIDEO_OPTIONS}
    defaults = {field.name: field.default for field in dataclasses.fields(image_options) if field.name in unused}
    return dataclasses.replace(image_options, **defaults)
