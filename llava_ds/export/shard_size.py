"""The largest size of a file of weights (--max_shard_size)."""

import re

from llava_ds.constants import ConfigError

SIZES = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
DEFAULT_SHARD_SIZE = "5GB"


def parse_size(text: str) -> int:
    """Return the bytes of a size like 5GB, in transformers' units. Raises ConfigError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", text.strip().upper())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"--max_shard_size {text}: give a size like 5GB or 200MB")
    return int(float(found[1]) * SIZES[found[2]])
