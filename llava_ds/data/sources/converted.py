"""Records as plugins convert them, before their format is detected."""

import json
from collections.abc import Iterable, Iterator

from llava_ds.constants import DataError, in_short
from llava_ds.data.sources.embedded import Row, rejected
from llava_ds.extensions.active import converters


def converted(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows with every record converted by all plugins that do so."""
    found = converters()
    return ((file, line, one) for file, line, text in rows for one in _convert(text, found)) if found else iter(rows)


def _convert(text: str, found: dict) -> list[str]:
    try:
        records = [json.loads(text)]
    except (ValueError, RecursionError):
        return [text]  # to_sample reports the reason
    if not isinstance(records[0], dict):
        return [text]
    for name, fields in found.items():
        try:
            made = [fields.convert(record) for record in records]
            records = [one for each in made for one in (each if isinstance(each, list) else [each])]
            assert all(isinstance(one, dict) for one in records), "convert() returned no record"
            texts = [json.dumps(one) for one in records]
        except DataError as error:
            return [rejected(str(error))]
        except Exception as error:
            return [rejected(f"can't be converted by {name}.py: {in_short(repr(error))}")]
    return texts
