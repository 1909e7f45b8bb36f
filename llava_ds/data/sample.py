"""Samples: a conversation and the images that its marks stand for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llava_ds.boxes import BboxType, Numbers

# Marks in a text for a box or point, and for the name of an object.
BOX_MARK, REF_MARK = "<bbox>", "<ref-object>"


# Message, Transcript and Sample are not frozen: a frozen one takes five times as long to make, and a record makes ten.


@dataclass
class Message:
    """One turn. role: "system", "human", "gpt" or "tool"; images and videos are <image> marks in the text.

    thought: what an answer thinks before its text, None without one; tool_calls: an answer's calls, a JSON list in
    OpenAI's form, "" for none; weight: of the loss of an answer's tokens, 0 for an answer that is read and not learned;
    keeps_spaces: True for the text of a list of parts (special_tokens.join_parts), which is written as it stands, as a
    processor does; name: of a speaker or a tool, call_id: of the call that a tool's result answers, "" for none.
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
        """The message with another text. dataclasses.replace takes ten times as long."""
        rest = (self.thought, self.tool_calls, self.weight, self.keeps_spaces, self.name, self.call_id)
        return Message(self.role, text, *rest)


@dataclass
class Transcript:
    """A conversation with all that a chat template is handed of its record.

    tools: the tools that the record offers, a JSON list, "" for none; template_kwargs: variables of the chat template
    that the record sets, a JSON object, "" for none.
    """

    messages: tuple[Message, ...]
    tools: str = ""
    template_kwargs: str = ""

    @classmethod
    def of(cls, conversation: "Transcript | Sequence[Message]") -> "Transcript":
        """A transcript as it is, or one of messages without tools and variables."""
        return conversation if isinstance(conversation, Transcript) else cls(tuple(conversation))


@dataclass(frozen=True)
class FileRef:
    """A whole file (num_bytes -1) or a slice of one, such as a member of a tar."""

    path: str
    offset: int = 0
    num_bytes: int = -1


@dataclass(frozen=True)
class Media:
    """The files of one <image> mark: an image, the frames of a video as images, or a video file.

    settings: pairs of a name and a number that its part of a message gives, such as ("max_pixels", 50176).
    """

    kind: Literal["image", "frames", "video"]
    refs: tuple[FileRef, ...]
    settings: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Box:
    """A box or a point on one of a sample's images, which are counted from 0. numbers: as bbox_type has them."""

    image: int
    numbers: Numbers
    bbox_type: BboxType


# Outcomes of --on_unmarked_image for images without marks and marks without images, with their texts.
IMAGE_PREPENDED, IMAGE_LEFT_OUT, MARK_AS_TEXT = "image prepended", "image left out", "mark as text"
UNMARKED_TEXTS = {
    IMAGE_PREPENDED: "have images without a mark, which are shown before the first question (--on_unmarked_image)",
    IMAGE_LEFT_OUT: "have images without a mark, which are left out (--on_unmarked_image text)",
    MARK_AS_TEXT: "have marks without an image, which are read as text (--on_unmarked_image text)",
}


@dataclass
class Sample:
    """One record. Paths are real and inside the given folders; media are in the order of the marks.

    rejected: of a preference, the messages with the rejected answer at their end; the chosen one ends messages; margin:
    by how much the chosen one is better; refs, boxes: what stands for the marks of names and boxes in a conversation;
    tools, template_kwargs: as a Transcript has them; unread: keys of the record that have a value and are not read.
    """

    id: str
    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    kind: str = ""  # of question, in files to evaluate on
    unmarked: str = ""  # one of the outcomes above
    rejected: tuple[Message, ...] = ()
    margin: float = 0.0
    refs: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    tools: str = ""
    template_kwargs: str = ""
    unread: tuple[str, ...] = ()

    @property
    def transcripts(self) -> list[Transcript]:
        """The conversation, or those with the chosen and with the rejected answer."""
        conversations = (self.messages, self.rejected) if self.rejected else (self.messages,)
        return [Transcript(messages, self.tools, self.template_kwargs) for messages in conversations]
