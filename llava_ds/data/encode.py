"""Samples to ids and labels. Labels come from character offsets of the one tokenization: nothing is counted twice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from llava_ds.constants import (
    IGNORE_INDEX,
    IM_END_TOKEN,
    IM_START_TOKEN,
    IMAGE_TOKEN,
    IMAGE_TOKEN_INDEX,
    DataError,
)
from llava_ds.data.chat_template import render_own, render_own_prompt
from llava_ds.data.sample import Message
from llava_ds.data.templates import TEMPLATES, Segment, render, render_prompt
from llava_ds.tokenizer import as_llava, copy_of_backend, first_space_pattern, with_token

# Qwen's id of "\n", which LLaVA-NeXT's preprocess_qwen knows as a number and leaves to be learned in every turn.
_QWEN_NEWLINE = (198, "Ċ")


@dataclass(frozen=True)
class EncodingOptions:
    """All that the ids of a sample depend on, beside the sample and the tokenizer."""

    template: str  # a key of TEMPLATES
    max_length: int
    mm_use_im_start_end: bool = False
    supervise_last_turn_only: bool = False


@dataclass(frozen=True)
class Encoded:
    """Ids of one sample (int32), IMAGE_TOKEN_INDEX once per image feature, and a label for every position (int32)."""

    input_ids: np.ndarray
    labels: np.ndarray
    truncated: bool

    @property
    def num_targets(self) -> int:
        """Supervised positions; the first has nothing before it to be predicted from."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


class Encoder:
    """Conversations to ids and labels, equal to those of LLaVA's own code. May be sent to other processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: EncodingOptions) -> None:
        self.options = options
        self.template = TEMPLATES[options.template]
        self.tokenizer = as_llava(tokenizer)
        self.begins_with_space = first_space_pattern(self.tokenizer)
        backend = copy_of_backend(self.tokenizer)
        self.first_ids: list[int] = []
        self.last_ids: list[int] = []
        self.image_id = -1
        if self.template.whole:
            backend = with_token(backend, IMAGE_TOKEN)
            self.image_id = backend.token_to_id(IMAGE_TOKEN)
        else:
            self.first_ids, self.last_ids = _framing_ids(self.tokenizer)
        self.backend = backend
        self.learned = [i for i in map(backend.token_to_id, self.template.learned) if i is not None]
        if options.template == "chatml" and backend.id_to_token(_QWEN_NEWLINE[0]) == _QWEN_NEWLINE[1]:
            self.learned.append(_QWEN_NEWLINE[0])

    def encode_batch(
        self, conversations: Sequence[tuple[Sequence[Message], Sequence[int]]]
    ) -> list[Encoded | DataError]:
        """Ids and labels of every conversation, or why it has none, in their order.

        A conversation: its messages, and the features of each <image> mark in the text's order. Cut at max_length
        with the features counted. A token is supervised when it covers a character of a supervised segment.
        """
        results: list[Encoded | DataError | None] = []
        rows: list[tuple[int, list[str], list[tuple[int, int]], Sequence[int]]] = []
        for messages, features in conversations:
            try:
                pieces, spans = self._pieces(self._render(messages), features)
            except DataError as error:
                results.append(error)
                continue
            rows.append((len(results), pieces, spans, features))
            results.append(None)
        coded = self._tokenize([piece for _, pieces, _, _ in rows for piece in pieces])
        for index, pieces, spans, features in rows:
            ids, mask = self._join([next(coded) for _ in pieces], pieces, spans, features)
            results[index] = self._labelled(ids, mask)
        return results

    def prompt_ids(self, messages: Sequence[Message], num_image_tokens: Sequence[int]) -> list[int]:
        """The ids up to where the next answer begins; messages end with a question. Not cut."""
        im_start_end = self.options.mm_use_im_start_end
        if self.template.write is None:
            text = render_own_prompt(messages, self.tokenizer, im_start_end)
        else:
            text = render_prompt(messages, self.options.template, im_start_end)
        pieces, spans = self._pieces([Segment(text)], num_image_tokens)
        return self._join(list(self._tokenize(pieces)), pieces, spans, num_image_tokens)[0].tolist()

    def _render(self, messages: Sequence[Message]) -> list[Segment]:
        if self.template.write is None:
            return render_own(messages, self.tokenizer, self.options.mm_use_im_start_end)
        return render(messages, self.options.template, self.options.mm_use_im_start_end)

    def _pieces(self, segments: Sequence[Segment], features: Sequence[int]) -> tuple[list[str], list[tuple[int, int]]]:
        """What is tokenized by itself, and the supervised spans of the whole text."""
        if self.options.supervise_last_turn_only:
            segments = _last_answer_only(segments)
        spans: list[tuple[int, int]] = []
        end = 0
        for segment in segments:
            start, end = end, end + len(segment.text)
            if segment.supervised and spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], end)
            elif segment.supervised:
                spans.append((start, end))
        text = "".join([segment.text for segment in segments])
        pieces = text.split(IMAGE_TOKEN)
        if len(pieces) - 1 != len(features):
            raise DataError(
                f"the text has {len(pieces) - 1} {IMAGE_TOKEN} marks for {len(features)} pictures: make them equal"
            )
        return ([text] if self.template.whole else pieces), spans

    def _tokenize(self, pieces: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids (T,) of each piece, and the characters (T, 2) that every token covers."""
        shifts = [0] * len(pieces)
        if self.begins_with_space is not None:
            shifts = [1 if self.begins_with_space.match(piece) else 0 for piece in pieces]
            pieces = [f" {piece}" if shift else piece for piece, shift in zip(pieces, shifts)]
        for encoding, shift in zip(self.backend.encode_batch(pieces, add_special_tokens=False), shifts):
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2) - shift
            yield np.array(encoding.ids, np.int32), offsets

    def _join(
        self,
        coded: Sequence[tuple[np.ndarray, np.ndarray]],
        pieces: Sequence[str],
        spans: Sequence[tuple[int, int]],
        features: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids of one conversation from its tokenized pieces and its pictures, and whether each is supervised.

        Source: LLaVA's tokenizer_image_token for the ids.
        """
        first = np.array(self.first_ids, np.int32)
        parts = [(first, np.zeros(len(first), bool))]
        base = 0
        for i, ((ids, offsets), piece) in enumerate(zip(coded, pieces)):
            mask = np.zeros(len(ids), bool)
            for start, end in spans:
                if start < base + len(piece) and base < end:
                    mask |= (offsets[:, 0] + base < end) & (offsets[:, 1] + base > start)
            if self.template.whole:
                counts = np.ones(len(ids), np.int64)
                is_image = ids == self.image_id
                counts[is_image] = features
                ids, mask = np.repeat(np.where(is_image, IMAGE_TOKEN_INDEX, ids), counts), np.repeat(mask, counts)
            elif i > 0:
                parts.append(_features(features[i - 1]))
            parts.append((ids, mask))
            if self.last_ids:
                parts.append((np.array(self.last_ids, np.int32), np.repeat(mask[-1:], len(self.last_ids))))
            base += len(piece) + len(IMAGE_TOKEN)
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _labelled(self, ids: np.ndarray, mask: np.ndarray) -> Encoded:
        if self.learned and not self.options.supervise_last_turn_only:
            mask = mask | np.isin(ids, self.learned)
        limit = self.options.max_length
        labels = np.where(mask, ids, np.int32(IGNORE_INDEX))[:limit]
        return Encoded(ids[:limit].astype(np.int32), labels.astype(np.int32), len(ids) > limit)


def check_tokenizer(
    template: str, tokenizer: PreTrainedTokenizerBase, mm_use_im_start_end: bool = False
) -> list[str]:
    """What is wrong with training in a template (a key of TEMPLATES) with this tokenizer, a line each."""
    problems = []
    if template == "chat_template" and tokenizer.chat_template is None:
        problems.append(
            "--version chat_template takes the tokenizer's own template, but this one has none: give another --version"
        )
    rules = TEMPLATES[template]
    markers = [marker for marker in rules.end_markers if marker not in _NOT_TOKENS]
    for token in dict.fromkeys([*markers, *rules.learned]):
        if _single_id(tokenizer, token) is None:
            problems.append(
                f"--version {template} needs {token!r}, which is not one token of this tokenizer (its end marker is "
                f"{tokenizer.eos_token!r}), so the model would never learn to stop: give the --version that the "
                "language model was trained with, or chat_template"
            )
    for token in (IM_START_TOKEN, IM_END_TOKEN) if mm_use_im_start_end else ():
        if _single_id(tokenizer, token) is None:
            problems.append(
                f"--mm_use_im_start_end needs the token {token}, which this tokenizer does not know: leave the flag "
                "out, or give a model that has it"
            )
    return problems


def end_markers(template: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: the template's end markers, where each is one token, and the tokenizer's own."""
    ids = [_single_id(tokenizer, marker) for marker in TEMPLATES[template].end_markers if marker not in _NOT_TOKENS]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


_NOT_TOKENS = ("\n", "###")  # end markers of templates from before there were tokens for it


def _single_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    known = {added.content: i for i, added in tokenizer.added_tokens_decoder.items()}
    return known.get(token, None if token not in tokenizer.get_vocab() else tokenizer.convert_tokens_to_ids(token))


def _framing_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and behind every text."""
    coded = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
    inner = [i for i, special in enumerate(coded.special_tokens_mask) if not special]
    return coded.ids[: inner[0]], coded.ids[inner[-1] + 1 :]


def _features(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, IMAGE_TOKEN_INDEX, np.int32), np.zeros(count, bool)


def _last_answer_only(segments: Sequence[Segment]) -> list[Segment]:
    last = max((i for i, segment in enumerate(segments) if segment.is_answer), default=0)
    while last > 0 and segments[last - 1].is_answer:
        last -= 1
    return [Segment(s.text, s.is_answer and i >= last, s.is_answer) for i, s in enumerate(segments)]
