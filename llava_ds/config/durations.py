"""Lengths of time as a person writes them."""

import re

from llava_ds.constants import ConfigError

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds_of(text: str) -> int:
    """The seconds in 3h50m, 90s, 1d or a plain number of seconds. Raises ConfigError for anything else, and for 0."""
    if text.isdecimal():
        total = int(text)
    else:
        found = _UNITS.fullmatch(text)
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ConfigError(f"{text!r} is no length of time: write it like 3h50m, 45m, 90s or 5400 (seconds)")
    return total
