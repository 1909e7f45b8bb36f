"""Records as plugins convert them, before their format is detected."""

import json
from collections.abc import Iterable, Iterator

from llava_ds.constants import DataError, in_short
from llava_ds.data.sources.embedded import Row, rejected
from llava_ds.extensions.active import converters


def converted(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows with every record converted by all plugins that do so."""
    found = converters()
    return ((file, line, _convert(text, found)) for file, line, text in rows) if found else iter(rows)


def _convert(text: str, found: dict) -> str:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text  # to_sample reports the reason
    if not isinstance(record, dict):
        return text
    for name, fields in found.items():
        try:
            record = fields.convert(record)
            assert isinstance(record, dict), "convert() returned no record"
            text = json.dumps(record)
        except DataError as error:
            return rejected(str(error))
        except Exception as error:
            return rejected(f"can't be converted by {name}.py: {in_short(repr(error))}")
    return text
