"""Conversion of records on disk, in any supported format, to samples."""

from llava_ds.data.sources.open import MAX_SHOWN, open_sources, shown
from llava_ds.data.sources.options import RawRecord, SourceOptions, parse_columns
from llava_ds.data.sources.records import to_sample
from llava_ds.data.sources.source import Source

__all__ = [
    "MAX_SHOWN",
    "RawRecord",
    "Source",
    "SourceOptions",
    "open_sources",
    "parse_columns",
    "shown",
    "to_sample",
]
