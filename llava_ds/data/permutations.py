"""Random permutations, and orders of samples cut into parts of one size."""

from collections.abc import Iterator

import numpy as np
import torch

SORTED_TOGETHER = 1 << 20  # samples sorted at once: bounds the memory of sorting


def permutation(number: int, generator: torch.Generator) -> np.ndarray:
    """Return torch.randperm's permutation as int32, to halve its memory. The values don't depend on the type."""
    return torch.randperm(number, generator=generator, dtype=torch.int32).numpy()


def order_rows(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield views (parts, size) that together cover the order, about SORTED_TOGETHER samples each; a shorter last part
    is yielded by itself."""
    whole = len(order) // size
    together = max(1, SORTED_TOGETHER // size)
    for first in range(0, whole, together):
        last = min(whole, first + together)
        yield order[first * size : last * size].reshape(last - first, size)
    if len(order) > whole * size:
        yield order[whole * size :][None]
