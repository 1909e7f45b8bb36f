"""All samples of a small data set at once, for scripts that ask a model about them."""

from collections.abc import Iterable
from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.data.sample import Sample
from llava_ds.data.sources.open import open_sources
from llava_ds.data.sources.options import SourceOptions
from llava_ds.data.sources.records import to_sample

MAX_SHOWN = 5  # problems spelled out in one message; the rest are counted


def read_samples(
    path: str | Path, image_folder: str | Path | None, options: SourceOptions | None = None
) -> list[Sample]:
    """All samples that a data path names, in order. image_folder wins over the options' own.

    Raises DataError, which names the file, the first records that are wrong and what was expected of them.
    """
    options = options or SourceOptions()
    folder = options.image_folder if image_folder is None else str(image_folder)
    samples, problems = [], []
    sources = open_sources(str(path), SourceOptions(**{**vars(options), "image_folder": folder}))
    for source in sources:
        for record in source.read():
            try:
                samples.append(to_sample(record.text, source, record.index))
            except DataError as error:
                where = f"record {record.index}" if len(sources) == 1 else f"{record.file}, record {record.index}"
                problems.append(f"{where}: {error}")
    if problems:
        total = len(problems) + len(samples)
        raise DataError(f"{path}: {len(problems)} of {total} records can't be used\n" + shown(problems))
    return samples


def shown(problems: Iterable[str], where: str = "") -> str:
    """The first problems, a line each, and how many more there are; where: said of those."""
    problems = list(problems)
    lines = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        lines.append(f"  and {len(problems) - MAX_SHOWN} more{where}")
    return "\n".join(lines)
