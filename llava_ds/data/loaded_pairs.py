"""Pairs of answers to the same conversation."""

from dataclasses import replace

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedPair, LoadedSample


def pair_of(
    both: LoadedSample, chosen_length: int, numbers: dict[str, list[float]], shares_prompt: bool
) -> LoadedPair | LoadedSample:
    """Split the ids and labels of two answers laid end to end. For a record with a label, returns its only answer.

    numbers: values of both answers, by name; shares_prompt: the rejected answer shares the prompt of the chosen one.
    """
    if chosen_length == len(both.input_ids):
        return replace(both, extra={name: values[0] for name, values in numbers.items()})
    parts = slice(chosen_length), slice(chosen_length, None)
    extra = [{name: values[i] for name, values in numbers.items()} for i in range(len(parts))]
    chosen, rejected = (
        LoadedSample(both.input_ids[part], both.labels[part], both.media, both.source, extra=own)
        for part, own in zip(parts, extra)
    )
    return LoadedPair(chosen, replace(rejected, shared=common_prompt(chosen, rejected) if shares_prompt else 0))


def common_prompt(first: LoadedSample, other: LoadedSample) -> int:
    """Count the leading tokens that two samples share: equal, unsupervised in both, and with all images.

    Returns 0 if they differ before their last image.
    """
    size = min(len(first.input_ids), len(other.input_ids))
    same = first.input_ids[:size] == other.input_ids[:size]
    for sample in (first, other):
        same &= sample.labels[:size] == IGNORE_INDEX
    length = size - 1 if same.all() else int((~same).nonzero()[0])
    images = [(sample.input_ids[length:] == IMAGE_TOKEN_INDEX).any() for sample in (first, other)]
    is_same_media = [id(one) for one, _ in first.media] == [id(one) for one, _ in other.media]
    return length if is_same_media and not any(images) else 0
