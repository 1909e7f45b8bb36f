"""Samples to ids and labels. Labels come from character offsets of the one tokenization: nothing is counted twice."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data.templates import Segment


@dataclass(frozen=True)
class Encoded:
    """Ids of one sample, IMAGE_TOKEN_INDEX once per image feature, and a label for every position."""

    input_ids: list[int]
    labels: list[int]
    truncated: bool

    @property
    def num_targets(self) -> int:
        return sum(label != IGNORE_INDEX for label in self.labels[1:])  # the first position has nothing before it


def encode(
    segments: list[Segment], tokenizer: PreTrainedTokenizerBase, num_image_tokens: list[int], max_length: int
) -> Encoded:
    """Ids and labels of a rendered conversation, cut at max_length with the image features counted.

    num_image_tokens: features of each picture, in the text's order. Each piece of text between pictures is tokenized
    by itself, and one beginning-of-sequence token stays. A token is supervised when it covers a character of a
    supervised segment. The tokenizer has to be a fast one, which knows offsets.
    Source: LLaVA's tokenizer_image_token for the ids.
    """
    text = "".join(segment.text for segment in segments)
    marks = text.count(IMAGE_TOKEN)
    if marks != len(num_image_tokens):
        raise DataError(
            f"the text has {marks} {IMAGE_TOKEN} marks for {len(num_image_tokens)} pictures: make them equal"
        )
    spans = _supervised_spans(segments)
    input_ids: list[int] = []
    labels: list[int] = []
    start = 0
    for i, piece in enumerate(text.split(IMAGE_TOKEN)):
        if i > 0:
            input_ids += [IMAGE_TOKEN_INDEX] * num_image_tokens[i - 1]
            labels += [IGNORE_INDEX] * num_image_tokens[i - 1]
            start += len(IMAGE_TOKEN)
        coded = tokenizer(piece, return_offsets_mapping=True)
        ids, offsets = coded["input_ids"], coded["offset_mapping"]
        if i > 0 and ids and ids[0] == tokenizer.bos_token_id:
            ids, offsets = ids[1:], offsets[1:]
        input_ids += ids
        labels += [
            token if _covers(spans, start + first, start + last) else IGNORE_INDEX
            for token, (first, last) in zip(ids, offsets)
        ]
        start += len(piece)
    truncated = len(input_ids) > max_length
    return Encoded(input_ids[:max_length], labels[:max_length], truncated)


def _supervised_spans(segments: list[Segment]) -> list[tuple[int, int]]:
    spans, start = [], 0
    for segment in segments:
        end = start + len(segment.text)
        if segment.supervised:
            spans.append((start, end))
        start = end
    return spans


def _covers(spans: list[tuple[int, int]], first: int, last: int) -> bool:
    return any(first < end and start < last for start, end in spans)
