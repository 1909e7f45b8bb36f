"""All samples of a small data set at once."""

from pathlib import Path

from llava_ds.constants import DataError
from llava_ds.data.sample import Sample
from llava_ds.data.sources import SourceOptions, open_sources, shown, to_sample


def read_samples(
    path: str | Path, image_folder: str | Path | None, options: SourceOptions | None = None
) -> list[Sample]:
    """Read all samples of a small data set, in order. image_folder overrides the one of the options.

    Raises DataError with the file, the first wrong records and the reasons.
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
