"""Orders of samples by their lengths: LLaVA's and LLaVA-NeXT's samplers, and steps of samples of equal length."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from llava_ds.data.permutations import order_rows, permutation
from llava_ds.data.spreading import spread

BUCKET_STEPS = 64  # number of optimizer steps whose samples are sorted by length together, in the order by buckets


def drawn_by_length(
    how: str, lengths: np.ndarray, batch_size: int, micro_batch_size: int, accumulation: int, generator: torch.Generator
) -> np.ndarray:
    """Return a random order of an epoch as LLaVA's or LLaVA-NeXT's samplers do. how: as in SampleOrder."""
    if how == "images":
        return by_image(lengths, generator)
    if how == "varlen":
        return by_varying_length(lengths, batch_size, accumulation, generator)
    num_chunks = math.ceil(batch_size / micro_batch_size)
    if how == "length":
        return by_length_next(lengths, micro_batch_size, num_chunks, generator)
    group = by_length if how == "modality" else by_length_next
    return by_modality_length(lengths, micro_batch_size, num_chunks, generator, group)


def by_image(images: np.ndarray, generator: torch.Generator) -> np.ndarray:
    """Order the images randomly, with the samples of an image in sequence. images: index of each sample's image."""
    places = np.empty(int(images.max()) + 1, np.int32)
    places[permutation(len(places), generator)] = np.arange(len(places))
    return np.argsort(places[images], kind="stable").astype(np.int32)


def by_length(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> np.ndarray:
    """Return random steps, with samples distributed over the micro-batches for similar total lengths.

    Source: LLaVA's get_length_grouped_indices.
    """
    lengths = np.asarray(lengths, np.int32)
    return _balanced_steps(permutation(len(lengths), generator), lengths, micro_batch_size, num_micro_batches)


def by_length_next(
    lengths: Sequence[int], micro_batch_size: int, num_micro_batches: int, generator: torch.Generator
) -> np.ndarray:
    """Return steps of similar lengths in random order, with samples distributed as in by_length.

    Source: LLaVA-NeXT's get_length_grouped_indices_auto_single, over transformers' get_length_grouped_indices: it sorts
    up to 50 steps together and exchanges the longest sample with the first.
    """
    lengths = np.asarray(lengths, np.int32)
    step_size = micro_batch_size * num_micro_batches
    sorted_together = step_size * max(1, min(len(lengths) // (4 * step_size), 50))
    order = _sorted_parts(permutation(len(lengths), generator), -lengths, sorted_together)
    longest = sorted_together * int(np.argmax(lengths[order[::sorted_together]]))
    order[0], order[longest] = order[longest], order[0]
    return _shuffled_parts(_balanced_steps(order, lengths, micro_batch_size, num_micro_batches), step_size, generator)


def by_varying_length(
    lengths: Sequence[int], step_size: int, accumulation: int, generator: torch.Generator
) -> np.ndarray:
    """Return groups of similar lengths in random order, with the samples of each group shuffled.

    Source: LLaVA-NeXT's get_variable_length_grouped_indices and its sampler (which counts accumulation twice).
    """
    places = permutation(len(lengths), generator)
    longest_first = np.argsort(-np.asarray(lengths, np.int32), kind="stable").astype(np.int32)
    size = step_size * accumulation
    return _shuffled_parts(_sorted_parts(longest_first, -places, 8 * size), size, generator)


def by_modality_length(
    lengths: Sequence[int],
    micro_batch_size: int,
    num_micro_batches: int,
    generator: torch.Generator,
    group: Callable[[Sequence[int], int, int, torch.Generator], np.ndarray] = by_length,
) -> np.ndarray:
    """Return steps of one kind (images: positive lengths; text only: negative) and of similar lengths.

    num_micro_batches: micro-batches per step over all ranks; group: orders the samples of one kind. The remainders of
    both kinds form the last step, in the files' order.
    Source: LLaVA's get_modality_length_grouped_indices, and with by_length_next LLaVA-NeXT's
    get_modality_length_grouped_indices_auto. They draw from torch's global generator; the same seed gives the same
    order here.
    """
    lengths = np.asarray(lengths, np.int32)
    kinds = [np.flatnonzero(lengths > 0), np.flatnonzero(lengths <= 0)]
    if not all(map(len, kinds)):
        return group(lengths, micro_batch_size, num_micro_batches, generator)  # text only: shortest first, like LLaVA
    batch_size = micro_batch_size * num_micro_batches
    steps, rest = [], []
    for indices in (kind.astype(np.int32) for kind in kinds):
        own = indices[group(np.abs(lengths[indices]), micro_batch_size, num_micro_batches, generator)]
        last = (len(own) - 1) // batch_size * batch_size  # LLaVA moves the last step to the end even if it is full
        steps.append(own[:last])
        rest.append(own[last:])
    return np.concatenate(
        [_shuffled_parts(np.concatenate(steps), batch_size, generator), np.sort(np.concatenate(rest))]
    )


def by_length_bucket(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> np.ndarray:
    """Return steps of samples of nearly equal length in random order. An incomplete step comes last.

    The samples are shuffled, sorted by length in groups of BUCKET_STEPS steps, and split into steps.
    """
    order = permutation(len(lengths), generator)
    whole = len(order) - len(order) % batch_size
    buckets = _sorted_parts(order[:whole], np.asarray(lengths, np.int32), BUCKET_STEPS * batch_size)
    return np.concatenate([_shuffled_parts(buckets, batch_size, generator), order[whole:]])


def _sorted_parts(order: np.ndarray, keys: np.ndarray, size: int) -> np.ndarray:
    """Sort every part of `size` samples by keys[sample], in place and stable."""
    for rows in order_rows(order, size):
        rows[:] = _sorted_by(keys[rows], rows)
    return order


def _sorted_by(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sort each row by its keys, stably. keys, rows: arrays of the same shape; keys are below 2**31.

    Key and position are packed into one number, because numpy sorts numbers several times as fast as by argsort.
    """
    places = np.sort(keys.astype(np.int64) * keys.shape[1] + np.arange(keys.shape[1]), axis=1)
    places %= keys.shape[1]
    return np.take_along_axis(rows, places, axis=1)


def _shuffled_parts(order: np.ndarray, size: int, generator: torch.Generator) -> np.ndarray:
    """Shuffle the order of the parts, of `size` samples each (the last part may be shorter)."""
    num_whole, left = divmod(len(order), size)
    drawn = permutation(num_whole + (left > 0), generator)
    whole = order[: num_whole * size].reshape(num_whole, size)
    if not left:
        return whole[drawn].reshape(-1)
    [at] = np.flatnonzero(drawn == num_whole)
    parts = (whole[drawn[:at]].reshape(-1), order[num_whole * size :], whole[drawn[at + 1 :]].reshape(-1))
    return np.concatenate(parts)


def _balanced_steps(
    order: np.ndarray, lengths: np.ndarray, micro_batch_size: int, num_micro_batches: int
) -> np.ndarray:
    """Spread the samples of each step over its micro-batches, in place.

    Within a step, samples are placed longest first, each into the shortest micro-batch with room (LLaVA's split). If a
    shorter last step can't be divided evenly, its samples are assigned in turn.
    """
    size = micro_batch_size * num_micro_batches
    _sorted_parts(order, -lengths, size)
    if 1 in (micro_batch_size, num_micro_batches):
        return order
    for rows in order_rows(order, size):
        count = rows.shape[1]
        if count % num_micro_batches:
            chunks = np.arange(count)[None] % num_micro_batches
        else:
            chunks = spread(lengths[rows], num_micro_batches, count // num_micro_batches)
        rows[:] = _sorted_by(np.broadcast_to(chunks, rows.shape), rows)
    return order
