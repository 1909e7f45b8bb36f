"""The encoded data set: every sample tokenized once, kept in Arrow, read through the page cache."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow.compute
import torch
from transformers import PreTrainedTokenizerBase

from llava_ds.constants import DataError
from llava_ds.data.collator import LoadedSample
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.images import load_image, to_pixels
from llava_ds.data.sources import Sample, read_samples, shown
from llava_ds.distributed import progress_bar

ENCODING_VERSION = 2  # raise it when the same text would give other ids or labels

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "input_ids": datasets.Sequence(datasets.Value("int32")),
        "labels": datasets.Sequence(datasets.Value("int32")),
        "images": datasets.Sequence(datasets.Value("string")),
        "length": datasets.Value("int32"),
        "num_targets": datasets.Value("int32"),
        "truncated": datasets.Value("bool"),
    }
)


@dataclass(frozen=True)
class PictureOptions:
    """All that the pixels of a picture depend on, beside the picture, and the features that it gives."""

    size: int
    mean: tuple[float, ...]
    aspect_ratio: str
    max_pixels: int
    num_image_tokens: int


class EncodedDataset(torch.utils.data.Dataset):
    """Samples by index, their pictures decoded when asked for.

    fingerprint: a hash of everything that the encoded samples depend on;
    lengths and num_targets: per sample, tokens and supervised tokens (lists of int).
    """

    def __init__(
        self,
        table: datasets.Dataset,
        image_folder: str | None,
        encoding: EncodingOptions,
        pictures: PictureOptions,
        fingerprint: str,
    ) -> None:
        self.table = table.with_format("numpy", columns=["input_ids", "labels"], output_all_columns=True)
        self.image_folder = Path(os.path.realpath(image_folder or "."))
        self.encoding = encoding
        self.pictures = pictures
        self.fingerprint = fingerprint
        self.lengths: list[int] = table.data.column("length").to_pylist()
        self.num_targets: list[int] = table.data.column("num_targets").to_pylist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> LoadedSample:
        row = self.table[index]
        options = self.pictures
        pixels = []
        for path in row["images"]:
            picture = load_image(str(self.image_folder / path), options.max_pixels)
            pixels.append(to_pixels(picture, options.size, options.aspect_ratio, options.mean, options.max_pixels))
        ids, labels = (torch.from_numpy(row[name].astype("int64")) for name in ("input_ids", "labels"))
        return LoadedSample(ids, labels, pixels)

    def first_with_picture(self) -> int:
        """The first sample that shows a picture; the first of all if none does."""
        return next((i for i, count in enumerate(self._pictures_per_sample()) if count), 0)

    def _pictures_per_sample(self) -> list[int]:
        return pyarrow.compute.list_value_length(self.table.data.column("images")).to_pylist()

    def summary(self, name: str) -> str:
        """One line: how much there is to see and to learn."""
        tokens, targets = sum(self.lengths), sum(self.num_targets)
        cut = sum(self.table.data.column("truncated").to_pylist())
        pictures = sum(self._pictures_per_sample())
        line = (
            f"{name}: {len(self):,} samples, {pictures:,} pictures, {tokens:,} tokens, of which {targets:,} "
            f"({targets / tokens:.1%}) are supervised; longest sample {max(self.lengths):,}"
        )
        return line + (f"; {cut:,} cut at --model_max_length" if cut else "")


def open_encoded(
    data_path: str,
    image_folder: str | None,
    tokenizer: PreTrainedTokenizerBase,
    encoding: EncodingOptions,
    pictures: PictureOptions,
    cache_dir: str,
) -> EncodedDataset:
    """The encoded samples of a data file, from the cache or encoded now.

    The cache's name is a hash of everything the result depends on. It appears in one rename, so any number of
    processes may do this at once. Raises DataError for data that can't be used or has nothing to learn from.
    """
    samples = [_relative(sample, image_folder) for sample in read_samples(data_path, image_folder)]
    fingerprint = _fingerprint(samples, tokenizer, encoding, pictures.num_image_tokens)
    folder = Path(cache_dir).expanduser() / "encoded" / fingerprint
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        _write_table(scratch, _encode_all(samples, Encoder(tokenizer, encoding), pictures.num_image_tokens, data_path))
        try:
            scratch.rename(folder)
        except OSError:  # another process was first; what it wrote is the same
            shutil.rmtree(scratch)
    return EncodedDataset(datasets.load_from_disk(folder), image_folder, encoding, pictures, folder.name)


def _relative(sample: Sample, image_folder: str | None) -> Sample:
    """The sample with its pictures' paths inside the image folder, so that the folder may be moved."""
    if not sample.images:
        return sample
    root = os.path.realpath(image_folder)
    return dataclasses.replace(sample, images=tuple(os.path.relpath(path, root) for path in sample.images))


def _encode_all(samples: list[Sample], encoder: Encoder, num_image_tokens: int, name: str) -> Iterator[dict]:
    options = encoder.options
    problems = []
    for index, sample in enumerate(progress_bar(iterable=samples, desc=f"encoding {Path(name).name}")):
        [coded] = encoder.encode_batch([(sample.messages, [num_image_tokens] * len(sample.images))])
        if isinstance(coded, DataError):
            problems.append(f"record {index} ({sample.id}): {coded}")
            continue
        if coded.num_targets == 0:
            why = f"the first {options.max_length} tokens hold no answer" if coded.truncated else "no answer has a text"
            problems.append(f"record {index} ({sample.id}): nothing to learn from, {why}")
        yield {
            "id": sample.id,
            "input_ids": coded.input_ids,
            "labels": coded.labels,
            "images": list(sample.images),
            "length": len(coded.input_ids),
            "num_targets": coded.num_targets,
            "truncated": coded.truncated,
        }
    if problems:
        raise DataError(
            f"{name}: {len(problems)} of {len(samples)} records can't be trained on with --version {options.template} "
            f"and --model_max_length {options.max_length}: leave them out or change the flags\n" + shown(problems)
        )


def _fingerprint(
    samples: list[Sample], tokenizer: PreTrainedTokenizerBase, options: EncodingOptions, num_image_tokens: int
) -> str:
    digest = hashlib.sha256()
    for part in (
        str(ENCODING_VERSION),
        repr((options, num_image_tokens)),
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(sorted(tokenizer.get_added_vocab().items())),
    ):
        digest.update(part.encode() + b"\0")
    for sample in samples:
        digest.update(repr(sample).encode() + b"\0")
    return digest.hexdigest()[:20]


def _write_table(folder: Path, rows: Iterator[dict]) -> None:
    """Write rows to a folder that datasets.load_from_disk opens, by the thousand, so that memory stays small."""
    with _no_bars(), tempfile.TemporaryDirectory() as spool:
        path = Path(spool) / "rows.arrow"
        with datasets.arrow_writer.ArrowWriter(path=str(path), features=FEATURES) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
        datasets.Dataset.from_file(str(path)).save_to_disk(folder)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Hold back the bars of `datasets`, for its writing is no news to a user."""
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
