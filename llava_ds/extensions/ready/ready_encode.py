"""Encoding of conversations in the format of a ready model's own processor."""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.chat_template import render_parts, render_parts_prompt
from llava_ds.data.encode import Encoded, Encoder, EncodingOptions, Piece
from llava_ds.data.sample import Transcript
from llava_ds.data.special_tokens import LITERAL_IMAGE
from llava_ds.data.templates import Segment, Span
from llava_ds.data.word_tokenizer import WholeRow, WordRow
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import ImageText
from llava_ds.tokenizer import framing_ids


class ReadyEncoder(Encoder):
    """Encodes conversations to the same ids as a ready model's processor. Character offsets give the labels.

    An image or video is replaced by its layout's text; one token represents several features.
    """

    writes_parts: ClassVar[bool] = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: EncodingOptions, images: ImageOptions) -> None:
        self.image_token, self.placeholder = images.tiling.image_token, images.tiling.placeholder
        self.video = images.video
        self.places = [self.placeholder, *([] if self.video is None else [self.video.token])]
        self.in_place = re.compile("|".join(map(re.escape, self.places)))
        super().__init__(tokenizer, options)
        self.bos = self.tokenizer.bos_token
        self.framing, last = framing_ids(self.tokenizer)
        if last:
            raise ConfigError(
                f"the tokenizer of {self.tokenizer.name_or_path} adds {self.tokenizer.convert_ids_to_tokens(last)} "
                "after every text, but its chat template does not: set the tokenizer's add_eos_token to false"
            )

    def _find_image_token(self) -> None:
        tokens = [self.image_token] if self.video is None else [self.image_token, self.video.frame.image_token]
        self.image_ids = tuple(self.backend.token_to_id(token) for token in dict.fromkeys(tokens))

    def _template(self, has_videos: bool) -> str | None:
        """Return a special chat template for conversations with videos; None to use the tokenizer's."""
        return self.video.template if has_videos and self.video is not None else None

    def _render(self, conversation: Transcript, features: Sequence[ImageText]) -> list[Segment]:
        source = self._template(any(mark.is_video for mark in features))
        guarded = self._guarded(conversation)
        prompt = self._answer_prompt(conversation, source)
        return render_parts(guarded, self.tokenizer, prompt, _kinds(features), source)

    def _prompt_text(self, conversation: Transcript, features: Sequence[ImageText]) -> str:
        source = self._template(any(mark.is_video for mark in features))
        return render_parts_prompt(conversation, self.tokenizer, _kinds(features), source)

    def _pieces(self, segments: Sequence[Segment], features: Sequence[ImageText]) -> tuple[list[Piece], list[Span]]:
        """Return the text with every image and video replaced by its layout's text, and the supervised spans."""
        spans, parts, end, left = [], [], 0, iter([mark.text for mark in features])
        for text, supervised, _, *rest in self._chosen(segments):
            text = self.in_place.sub(lambda found: next(left, found[0]), text)
            start, end = end, end + len(text)
            if supervised:
                spans.append(Span(start, end, *rest))
            parts.append(text)
        written = "".join([segment.text for segment in segments])
        found = sum([written.count(token) for token in {self.image_token, *self.places}])
        whole = "".join(parts)
        num_videos = sum([mark.is_video for mark in features])
        if self.video is not None and written.count(self.video.token) != num_videos:
            raise DataError(
                f"the conversation contains {written.count(self.video.token)} of the model's video token "
                f"{self.video.token} for {num_videos} videos: its text must not spell that token, and the chat "
                "template has to write it for a video"
            )
        if found != len(features) or (LITERAL_IMAGE in whole and self.image_token == IMAGE_TOKEN):
            raise DataError(
                f"the conversation contains {found} of the model's image token {self.image_token} for {len(features)} "
                "images: its text must not spell that token, and every image needs its mark"
            )
        before = [] if self.bos and whole.startswith(self.bos) else self.framing
        return [Piece(whole.replace(LITERAL_IMAGE, IMAGE_TOKEN), before, 0)], spans

    def _join(
        self,
        pieces: Sequence[Piece],
        coded: Iterator[WordRow | WholeRow],
        spans: Sequence[Span],
        features: Sequence[ImageText],
    ) -> Encoded:
        tokens = [self.video.frame.image_token if mark.is_video else self.image_token for mark in features]
        counts = [mark.features for mark, token in zip(features, tokens) for _ in range(mark.text.count(token))]
        return super()._join(pieces, coded, spans, counts)


def _kinds(features: Sequence[ImageText]) -> list[str]:
    """Return the kind of every image or video mark, in the words of a chat template."""
    return ["video" if mark.is_video else "image" for mark in features]
