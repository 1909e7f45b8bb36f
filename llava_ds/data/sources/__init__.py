"""Records on disk, in whichever format, to samples."""

from llava_ds.data.sources.open import open_sources
from llava_ds.data.sources.options import RawRecord, SourceOptions, parse_columns
from llava_ds.data.sources.read_all import MAX_SHOWN, read_samples, shown
from llava_ds.data.sources.records import to_sample
from llava_ds.data.sources.source import Source

__all__ = [
    "MAX_SHOWN",
    "RawRecord",
    "Source",
    "SourceOptions",
    "open_sources",
    "parse_columns",
    "read_samples",
    "shown",
    "to_sample",
]
