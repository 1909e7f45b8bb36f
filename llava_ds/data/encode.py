"""Encode conversations to ids and labels. Each text is tokenized once; its character offsets give the labels."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from llava_ds.constants import (
    IGNORE_INDEX,
    IMAGE_TOKEN,
    IMAGE_TOKEN_INDEX,
    ConfigError,
    DataError,
)
from llava_ds.data.chat_template import AnswerPrompt, answer_prompt, render_own, render_own_prompt
from llava_ds.data.fingerprint import EncodingOptions
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.special_tokens import LITERAL_IMAGE, MARKED_IMAGE, SpecialTokens, refuse_noncharacters
from llava_ds.data.templates import TEMPLATES, Segment, Span, Template, render, render_prompt
from llava_ds.data.word_tokenizer import WholeRow, WordRow, words_of
from llava_ds.files.model_files import library_errors
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import ImageText
from llava_ds.tokenizer import as_llava, copy_of_backend, first_space_pattern, framing_ids, rows_noted, with_token

# Number of characters of a conversation to tokenize first: a minimum, or a number per allowed token if that is more. If
# they give too few tokens, TIMES_MORE as many are tokenized, up to a limit that only text with ignored characters
# exceeds. Tokenizing takes about 360 bytes per character.
FIRST_CHARS, FIRST_CHARS_PER_TOKEN, TIMES_MORE = 1 << 18, 16, 4
TOKENS_BEHIND = 64  # spare tokens: the last tokens of a text that is cut may differ from the whole text's

# Qwen's id of "\n", hard-coded in LLaVA-NeXT's preprocess_qwen and supervised in every turn.
_QWEN_NEWLINE = (198, "Ċ")


@dataclass
class Encoded:
    """An encoded sample. input_ids and labels (tokens,) int32, with IMAGE_TOKEN_INDEX as the id of each image feature.

    weights: loss weight of each token (float32), None if all supervised tokens weigh 1; left_out: number of answers
    whose thoughts the template omits.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    truncated: bool
    weights: np.ndarray | None = None
    left_out: int = 0

    def cut(self, limit: int) -> "Encoded":
        """Truncate to at most `limit` tokens."""
        if len(self.input_ids) <= limit:
            return self
        weights = None if self.weights is None else self.weights[:limit]
        return replace(
            self, input_ids=self.input_ids[:limit], labels=self.labels[:limit], truncated=True, weights=weights
        )

    @property
    def num_targets(self) -> int:
        """Number of supervised positions. The first position can't be predicted."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


class Piece(NamedTuple):
    """A text tokenized by itself. before: ids to prepend to its ids; base: its character offset in the whole text."""

    text: str
    before: list[int]
    base: int


@dataclass(frozen=True)
class _Head:
    """The common beginning of all conversations, tokenized once. joint: text to prepend to the remaining text."""

    text: str
    ids: list[int]
    joint: str


class Encoder:
    """Encodes conversations to the same ids and labels as LLaVA's own code. Can be pickled.

    writes_parts: True if the chat template gets messages as lists of text parts and image parts.
    """

    writes_parts: ClassVar[bool] = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: EncodingOptions) -> None:
        self.options = options
        self.num_rows = rows_noted(tokenizer)
        self.tokenizer = as_llava(tokenizer)
        self._prompts: dict[tuple[str, str | None], AnswerPrompt] = {}
        self.begins_with_space = first_space_pattern(self.tokenizer)
        self.backend = copy_of_backend(self.tokenizer)
        self.first_ids: list[int] = []
        self.last_ids: list[int] = []
        self.image_ids: tuple[int, ...] = ()
        ids = self.backend.token_to_id
        self.special = SpecialTokens(self.backend) if options.split_special_tokens else None
        if self.special is not None:
            self.backend = self.special.backend
        if self.template.whole:
            self._find_image_token()
        else:
            self.first_ids, self.last_ids = framing_ids(self.tokenizer)
        self.learned = [i for i in map(ids, self.template.learned) if i is not None]
        if options.template == "chatml" and self.backend.id_to_token(_QWEN_NEWLINE[0]) == _QWEN_NEWLINE[1]:
            self.learned.append(_QWEN_NEWLINE[0])
        if options.supervise_last_turn_only:
            self.learned = []
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=False)), default=1)
        self.most_chars = max(FIRST_CHARS, (options.max_length + TOKENS_BEHIND) * longest)
        first = self.begins_with_space.pattern if self.begins_with_space else ""
        self.words = words_of(self._tokenize_whole, self.backend, first)
        self.head = self._find_head()

    @property
    def template(self) -> Template:
        """Rules of the conversation template."""
        return TEMPLATES[self.options.template]

    def _find_image_token(self) -> None:
        """Set image_ids for templates that tokenize a conversation as one text, and add the token to the backend."""
        self.backend = with_token(self.backend, MARKED_IMAGE)
        self.image_ids = (self.backend.token_to_id(MARKED_IMAGE),)

    def encode_batch(
        self, conversations: Sequence[tuple[Transcript | Sequence[Message], Sequence[int | ImageText]]]
    ) -> list[Encoded | DataError]:
        """Return, per conversation, the ids and labels, or a DataError with the reason why it can't be encoded.

        Each item is a transcript (or its messages) and one MediaLayout.mark per <image> mark, in text order. Samples
        are truncated at max_length, features included. A token is supervised if it begins in a supervised segment: a
        token that begins in the prompt can't be generated. Ids beyond the rows of the model's embedding are an error.
        """
        results: list[Encoded | DataError | None] = []
        rows: list[tuple[int, list[Piece], list[Span], Sequence[int]]] = []
        left_out: dict[int, int] = {}
        for given, features in conversations:
            try:
                segments = self._render(Transcript.of(given), features)
                pieces, spans = self._pieces(segments, features)
            except DataError as error:
                results.append(error)
                continue
            if self.template.write is None and (number := sum([segment.thought_left_out for segment in segments])):
                left_out[len(results)] = number
            rows.append((len(results), pieces, spans, features))
            results.append(None)
        limit = self.options.max_length
        num_chars = max(FIRST_CHARS, FIRST_CHARS_PER_TOKEN * limit)
        begun = [_beginning(pieces, num_chars) for _, pieces, _, _ in rows]
        coded = self._tokenize([piece.text for pieces in begun for piece in pieces])
        for (index, pieces, spans, features), beginning in zip(rows, begun):
            joined = self._join(beginning, coded, spans, features)
            if beginning is not pieces and len(joined.input_ids) < limit + TOKENS_BEHIND:
                results[index] = self._in_larger_parts(pieces, num_chars, spans, features)
            else:
                results[index] = joined.cut(limit)
        for index, number in left_out.items():
            if isinstance(results[index], Encoded):
                results[index] = replace(results[index], left_out=number)
        if self.num_rows is None:
            return results
        return [one if isinstance(one, DataError) else self._without_row(one.input_ids) or one for one in results]

    def _without_row(self, ids: np.ndarray) -> DataError | None:
        """Return the error for the first id beyond the rows of the model's embedding; None if all ids have a row."""
        beyond = ids[ids >= self.num_rows]
        if not len(beyond):
            return None
        id = int(beyond[0])
        added = self.tokenizer.added_tokens_decoder.get(id)  # convert_ids_to_tokens adds a dummy space to these
        token = self.tokenizer.convert_ids_to_tokens(id) if added is None else added.content
        return DataError(
            f"the text spells the token {token!r:.80} (id {id}), and the model's embedding has {self.num_rows:,} "
            "rows: train with --resize_token_embeddings True to add one for it, or take it out"
        )

    def refuse_without_rows(self, texts: Sequence[str]) -> None:
        """Raise DataError for the first text with a token beyond the rows of the model's embedding."""
        if self.num_rows is None:
            return
        for tokens in self._tokenize([text.replace(IMAGE_TOKEN, "") for text in texts]):
            if error := self._without_row(np.array(tokens.ids, np.int32)):
                raise error

    def _in_larger_parts(
        self, pieces: list[Piece], num_chars: int, spans: Sequence[Span], features: Sequence[int]
    ) -> Encoded | DataError:
        """Encode a long conversation whose first num_chars characters gave too few tokens."""
        limit, beginning = self.options.max_length, None
        while beginning is not pieces and num_chars < self.most_chars:
            num_chars = min(TIMES_MORE * num_chars, self.most_chars)
            beginning = _beginning(pieces, num_chars)
            coded = self._tokenize([piece.text for piece in beginning])
            joined = self._join(beginning, coded, spans, features)
            if beginning is pieces or len(joined.input_ids) >= limit + TOKENS_BEHIND:
                return joined.cut(limit)
        total = sum(len(piece.text) for piece in pieces)
        return DataError(
            f"its text has {total:,} characters, and the first {num_chars:,} characters give fewer than {limit:,} "
            "tokens: take out text that the tokenizer ignores, such as repeated spaces"
        )

    def prompt_ids(
        self, conversation: Transcript | Sequence[Message], num_image_tokens: Sequence[int | ImageText]
    ) -> list[int]:
        """Encode a conversation that ends with a question, up to the start of the answer, without truncation."""
        text = self._prompt_text(self._guarded(Transcript.of(conversation)), num_image_tokens)
        pieces, spans = self._pieces(self._named([Segment(text)]), num_image_tokens)
        joined = self._join(pieces, self._tokenize([piece.text for piece in pieces]), spans, num_image_tokens)
        if self.num_rows is not None and (error := self._without_row(joined.input_ids)):
            raise error
        return joined.input_ids.tolist()

    def encode_whole(self, conversation: Transcript, num_image_tokens: Sequence[int | ImageText]) -> Encoded:
        """Encode a conversation without truncation."""
        pieces, spans = self._pieces(self._render(conversation, num_image_tokens), num_image_tokens)
        return self._join(pieces, self._tokenize([piece.text for piece in pieces]), spans, num_image_tokens)

    def text_ids(self, text: str) -> np.ndarray:
        """Encode a text without a template. Returns ids, (tokens,) int32."""
        return np.array(next(self._tokenize([text])).ids, np.int32)

    def texts(self, conversation: Transcript, num_image_tokens: Sequence[int | ImageText]) -> tuple[str, str]:
        """Return the prompt for the conversation's last answer, and the training text with the answer."""
        asked = replace(conversation, messages=conversation.messages[:-1])
        segments = self._render(conversation, num_image_tokens)
        return self._prompt_text(asked, num_image_tokens), "".join(segment.text for segment in segments)

    def _answer_prompt(self, conversation: Transcript, source: str | None = None) -> AnswerPrompt:
        """Find the prompt before the answers of a conversation. source: as in render_parts."""
        key = (conversation.template_kwargs, source)
        if key not in self._prompts:
            self._prompts[key] = answer_prompt(self.tokenizer, *key, as_parts=self.writes_parts)
        return self._prompts[key]

    def _prompt_text(self, conversation: Transcript, features: Sequence[int | ImageText]) -> str:
        im_start_end = self.options.mm_use_im_start_end
        if self.template.write is None:
            return render_own_prompt(conversation, self.tokenizer, im_start_end)
        return render_prompt(self._as_texts(conversation), self.options.template, im_start_end)

    def _render(self, conversation: Transcript, features: Sequence[int | ImageText]) -> list[Segment]:
        conversation = self._guarded(conversation)
        if self.template.write is None:
            prompt = self._answer_prompt(conversation)
            segments = render_own(conversation, self.tokenizer, self.options.mm_use_im_start_end, prompt)
        else:
            segments = render(self._as_texts(conversation), self.options.template, self.options.mm_use_im_start_end)
        return self._named(segments)

    def _as_texts(self, conversation: Transcript) -> Sequence[Message]:
        """Return the messages in the form of LLaVA's own templates, with thoughts moved into the answers' texts.
        Raises DataError for tools and template variables: these templates don't support them."""
        template, messages = self.options.template, conversation.messages
        if conversation.template_kwargs:
            raise DataError(f"sets template variables under 'chat_template_kwargs', and --version {template} has none")
        if conversation.tools or any([message.role == "tool" or message.tool_calls for message in messages]):
            what = "offers tools" if conversation.tools else "has tool calls or their results"
            raise DataError(f"{what}, but --version {template} does not support them")
        return [message if message.thought is None else _with_thought_in_text(message) for message in messages]

    def _guarded(self, conversation: Transcript) -> Transcript:
        messages = conversation.messages
        for message in messages:
            refuse_noncharacters(message.text, message.keeps_spaces)
            if message.thought or message.tool_calls:
                refuse_noncharacters(f"{message.thought} {message.tool_calls}")
        if conversation.tools:
            refuse_noncharacters(conversation.tools)
        if self.special is None:
            return conversation
        guarded = self.special.guarded
        messages = tuple(
            replace(
                message,
                text=guarded(message.text),
                thought=None if message.thought is None else guarded(message.thought),
                tool_calls=guarded(message.tool_calls),
            )
            for message in messages
        )
        return replace(conversation, messages=messages, tools=guarded(conversation.tools))

    def _named(self, segments: list[Segment]) -> list[Segment]:
        if self.special is None:
            return segments
        return [segment._replace(text=self.special.named(segment.text)) for segment in segments]

    def _pieces(self, segments: Sequence[Segment], features: Sequence[int]) -> tuple[list[Piece], list[Span]]:
        """Return the texts to tokenize separately, and the supervised spans of the whole text."""
        spans: list[Span] = []
        texts: list[str] = []
        end = 0
        for text, supervised, _, *rest in self._chosen(segments):
            start, end = end, end + len(text)
            texts.append(text)
            if supervised:
                spans.append(Span(start, end, *rest))
        text = "".join(texts)
        marks = text.count(IMAGE_TOKEN)
        if marks != len(features):
            raise DataError(f"the text has {marks} {IMAGE_TOKEN} marks for {len(features)} images: make them equal")
        texts = [text.replace(IMAGE_TOKEN, MARKED_IMAGE)] if self.template.whole else text.split(IMAGE_TOKEN)
        texts = [piece.replace(LITERAL_IMAGE, IMAGE_TOKEN) for piece in texts]
        before, base = self.first_ids, 0
        if self.head is not None and texts[0].startswith(self.head.text):
            before, base = before + self.head.ids, len(self.head.text)
            texts[0] = self.head.joint + texts[0][base:]
            base -= len(self.head.joint)
        pieces = [Piece(texts[0], before, base)]
        for piece in texts[1:]:
            base += len(pieces[-1].text) + len(IMAGE_TOKEN)
            pieces.append(Piece(piece, [], base))
        return pieces, spans

    def _chosen(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Return the segments, with only the last answer supervised if supervise_last_turn_only is set."""
        return _last_answer_only(segments) if self.options.supervise_last_turn_only else segments

    def _tokenize(self, texts: list[str]) -> Iterator[WordRow | WholeRow]:
        """Tokenize each text."""
        if self.words is not None:
            return self.words(texts)
        return itertools.starmap(WholeRow, self._tokenize_whole(texts))

    def _coded(self, texts: list[str]) -> list[Encoding]:
        with library_errors(f"the tokenizer of {self.tokenizer.name_or_path}", "it can't tokenize a text"):
            return self.backend.encode_batch(texts, add_special_tokens=False)

    def _tokenize_whole(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Tokenize texts: per text, the ids and the (start, end) characters of its tokens."""
        if self.begins_with_space is None:
            for encoding in self._coded(texts):
                yield encoding.ids, encoding.offsets
            return
        added = [1 if self.begins_with_space.match(text) else 0 for text in texts]
        texts = [f" {text}" if shift else text for text, shift in zip(texts, added)]
        for encoding, shift in zip(self._coded(texts), added):
            # A token that consists of the added space counts as part of the following text.
            yield encoding.ids, [(max(a - shift, 0), b) for a, b in encoding.offsets] if shift else encoding.offsets

    def _join(
        self,
        pieces: Sequence[Piece],
        coded: Iterator[WordRow | WholeRow],
        spans: Sequence[Span],
        features: Sequence[int],
    ) -> Encoded:
        """Join one conversation's tokenized pieces and image features, without truncation.

        Ids match LLaVA's tokenizer_image_token.
        """
        parts: list[np.ndarray] = []
        supervised: list[tuple[int, int, float]] = []  # (first, end, loss weight) of tokens
        weighed = False
        length = 0
        for i, (piece, tokens) in enumerate(zip(pieces, coded)):
            if i > 0:
                parts.append(np.full(features[i - 1], IMAGE_TOKEN_INDEX, np.int32))
                length += features[i - 1]
            length += len(piece.before)
            base, piece_end = piece.base, piece.base + len(piece.text)
            mine = [
                span for span in spans if span[1] > base and span[0] < piece_end and not (span[2] and span[0] < base)
            ]
            counts = tokens.tokens_before([place - base for span in mine for place in span[:2]]) if mine else []
            for first, last, (_, _, most, weight, _) in zip(counts[::2], counts[1::2], mine):
                supervised.append((length + first, length + (min(last, first + most) if most else last), weight))
                weighed = weighed or weight != 1
            row = [*piece.before, *tokens.ids, *self.last_ids]
            parts.append(np.array(row, np.int32))
            length += len(row) - len(piece.before)
        ids = np.concatenate(parts) if len(parts) > 1 else parts[0]
        labels = np.full(len(ids), IGNORE_INDEX, np.int32)
        for first, last, _ in supervised:
            labels[first:last] = ids[first:last]
        for token in self.learned:
            labels[ids == token] = token
        weights = _weights(labels, supervised) if weighed else None
        if self.template.whole and features:
            is_image = ids == self.image_ids[0]
            for other in self.image_ids[1:]:
                is_image |= ids == other
            counts = np.ones(len(ids), np.int64)
            counts[is_image] = features[: np.count_nonzero(is_image)]
            ids[is_image], labels[is_image] = IMAGE_TOKEN_INDEX, IGNORE_INDEX
            ids, labels = np.repeat(ids, counts), np.repeat(labels, counts)
            weights = None if weights is None else np.repeat(weights, counts)
        return Encoded(ids, labels, False, weights)

    def _find_head(self) -> _Head | None:
        """Find the system prompt up to its last word; None if tokenizing it separately would change ids."""
        self.head = None
        if self.template.write is None:
            return None
        probes = ["x", "", "  two  ", "\n\nz", "猫", "<b>", "'s", "\t1"]
        talks = [Transcript((Message("human", f"{p}{IMAGE_TOKEN}"), Message("gpt", p))) for p in probes]
        rendered = [self._render(talk, (0,)) for talk in talks]
        texts = ["".join(segment.text for segment in segments) for segments in rendered]
        unlearned = itertools.takewhile(lambda segment: not segment.supervised, rendered[0])
        least, greatest = min(texts), max(texts)
        common = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(least, greatest)))
        common = common[: sum(len(segment.text) for segment in unlearned)].split(IMAGE_TOKEN)[0].rstrip()
        cut = max((match.start() for match in re.finditer(r"(?<=\S) (?=\S)", common)), default=0)
        if cut == 0:
            return None
        texts = [text.split(IMAGE_TOKEN)[0] for text in texts]
        ids = next(self._tokenize([texts[0][:cut]])).ids
        wholes = list(self._tokenize(texts))
        for joint, skipped in (("", 1), (" ", 1)):
            rests = list(self._tokenize([joint + text[cut + skipped :] for text in texts]))
            if all(whole.ids == ids + rest.ids for whole, rest in zip(wholes, rests)):
                return _Head(common[: cut + skipped], ids, joint)
        return None


def _with_thought_in_text(message: Message) -> Message:
    thought = message.thought.strip("\n")
    return replace(message, text=f"<think>\n{thought}\n</think>\n\n{message.text}", thought=None)


def _weights(labels: np.ndarray, supervised: Sequence[tuple[int, int, float]]) -> np.ndarray | None:
    """Compute each token's loss weight (float32); None if all supervised tokens weigh 1. Tokens with weight 0 lose
    their labels. supervised: (first, end, weight) of each span."""
    weights = np.ones(len(labels), np.float32)
    for first, last, weight in supervised:
        weights[first:last] = weight
    labels[weights == 0] = IGNORE_INDEX
    weights[labels == IGNORE_INDEX] = 1
    return weights if np.any(weights != 1) else None


def _beginning(pieces: list[Piece], num_chars: int) -> list[Piece]:
    """Cut the pieces after num_chars characters. Returns the same list if they are shorter."""
    for i, piece in enumerate(pieces):
        if len(piece.text) > num_chars:
            return [*pieces[:i], piece._replace(text=piece.text[:num_chars])]
        num_chars -= len(piece.text)
    return pieces


def _last_answer_only(segments: Sequence[Segment]) -> list[Segment]:
    last = max((i for i, segment in enumerate(segments) if segment.is_answer), default=0)
    while last > 0 and segments[last - 1].is_answer:
        last -= 1
    return [s._replace(supervised=s.is_answer and i >= last, first_tokens=0) for i, s in enumerate(segments)]


def encoder_of(tokenizer: PreTrainedTokenizerBase, options: EncodingOptions, images: ImageOptions) -> Encoder:
    """Build the encoder of a model: its image options' own, or else the template encoder."""
    if (own := images.encoder()) is not None:
        return own(tokenizer, options, images)
    if options.template == "processor":
        raise ConfigError("--version processor is only for ready models with their own processor: leave it out")
    return Encoder(tokenizer, options)
