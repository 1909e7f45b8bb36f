"""Samples: a conversation and the images of its marks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llava_ds.boxes import BboxType, Numbers

if TYPE_CHECKING:
    from llava_ds.geometry import ImageOptions

# Marks in a text for a box or point, and for the name of an object.
BOX_MARK, REF_MARK = "<bbox>", "<ref-object>"


# Message, Transcript and Sample are not frozen, because frozen dataclasses take five times as long to create, and a
# record needs ten.


@dataclass
class Message:
    """One turn. role: "system", "human", "gpt" or "tool"; images and videos are <image> marks in the text.

    thought: an answer's reasoning before its text, or None; tool_calls: an answer's calls, a JSON list in OpenAI's
    form, "" for none; weight: loss weight of an answer's tokens, 0 for context only; keeps_spaces: True for the text of
    a list of parts (special_tokens.join_parts), written unchanged as a processor does; name: the speaker's or tool's
    name, or ""; call_id: id of the call that a tool's result answers, or "".
    """

    role: str
    text: str
    thought: str | None = None
    tool_calls: str = ""
    weight: float = 1.0
    keeps_spaces: bool = False
    name: str = ""
    call_id: str = ""

    def with_text(self, text: str) -> "Message":
        """Copy the message with another text. dataclasses.replace takes ten times as long."""
        rest = (self.thought, self.tool_calls, self.weight, self.keeps_spaces, self.name, self.call_id)
        return Message(self.role, text, *rest)


@dataclass
class Transcript:
    """A conversation, with everything from its record that a chat template reads.

    tools: the record's tools, a JSON list, "" for none; template_kwargs: chat template variables set by the record, a
    JSON object, "" for none.
    """

    messages: tuple[Message, ...]
    tools: str = ""
    template_kwargs: str = ""

    @classmethod
    def of(cls, conversation: "Transcript | Sequence[Message]") -> "Transcript":
        """Convert messages to a transcript without tools and variables. A transcript is returned unchanged."""
        return conversation if isinstance(conversation, Transcript) else cls(tuple(conversation))


@dataclass(frozen=True)
class FileRef:
    """A whole file (num_bytes -1) or a byte range in one, such as a member of a tar."""

    path: str
    offset: int = 0
    num_bytes: int = -1


@dataclass(frozen=True)
class Media:
    """The files of one <image> mark: an image, the frames of a video as images, or a video file.

    settings: (name, number) pairs from its part of a message, such as ("max_pixels", 50176).
    """

    kind: Literal["image", "frames", "video"]
    refs: tuple[FileRef, ...]
    settings: tuple[tuple[str, float], ...] = ()

    def apply_settings(self, options: "ImageOptions") -> "ImageOptions":
        """Return the options with these settings applied. Raises DataError for a setting that can't be honoured."""
        if not self.settings:
            return options
        from llava_ds.data.media_settings import with_settings

        return with_settings(options, self.kind, self.settings)


@dataclass(frozen=True)
class Box:
    """A box or a point on one of a sample's images (index from 0). numbers: coordinates, as bbox_type defines."""

    image: int
    numbers: Numbers
    bbox_type: BboxType


# Outcomes of --on_unmarked_image for images without marks and marks without images, with their texts.
IMAGE_PREPENDED, IMAGE_LEFT_OUT, MARK_AS_TEXT = "image prepended", "image left out", "mark as text"
UNMARKED_TEXTS = {
    IMAGE_PREPENDED: "have images without a mark, shown before the first question (--on_unmarked_image)",
    IMAGE_LEFT_OUT: "have images without a mark, left out (--on_unmarked_image text)",
    MARK_AS_TEXT: "have marks without an image, read as text (--on_unmarked_image text)",
}


@dataclass
class Sample:
    """One record. Paths are real and inside the given folders; media are in the order of the marks.

    messages: for a preference they end with the chosen answer; rejected: the messages with the rejected answer instead;
    margin: by how much the chosen answer is better, or a single answer's label, 1 or -1; refs, boxes: names and boxes
    for the marks in the texts; tools, template_kwargs: as in Transcript; unread: keys of the record that have a
    value and are not read; other_columns: the record without its conversation and media, a JSON object, "" unless the
    source keeps it.
    """

    id: str
    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    kind: str = ""  # question kind, in files to evaluate on
    unmarked: str = ""  # one of the outcomes above
    rejected: tuple[Message, ...] = ()
    margin: float = 0.0
    refs: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    tools: str = ""
    template_kwargs: str = ""
    unread: tuple[str, ...] = ()
    other_columns: str = ""

    @property
    def transcripts(self) -> list[Transcript]:
        """The conversation, or the two with the chosen and the rejected answer."""
        conversations = (self.messages, self.rejected) if self.rejected else (self.messages,)
        return [Transcript(messages, self.tools, self.template_kwargs) for messages in conversations]
