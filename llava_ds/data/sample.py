"""Samples: a conversation and the images that its marks stand for."""

from dataclasses import dataclass
from typing import Literal

from llava_ds.boxes import BboxType, Numbers

# Marks in a text for a box or point, and for the name of an object.
BOX_MARK, REF_MARK = "<bbox>", "<ref-object>"


@dataclass(frozen=True)
class Message:
    """One turn. role: "system", "human" or "gpt"; images and videos are <image> marks in the text."""

    role: str
    text: str


@dataclass(frozen=True)
class FileRef:
    """A whole file (num_bytes -1) or a slice of one, such as a member of a tar."""

    path: str
    offset: int = 0
    num_bytes: int = -1


@dataclass(frozen=True)
class Media:
    """The files of one <image> mark: an image, the frames of a video as images, or a video file."""

    kind: Literal["image", "frames", "video"]
    refs: tuple[FileRef, ...]


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


@dataclass(frozen=True)
class Sample:
    """One record. Paths are real and inside the given folders; media are in the order of the marks.

    rejected: of a preference, the messages with the rejected answer at their end; the chosen one ends messages; margin:
    by how much the chosen one is better; refs, boxes: what stands for the marks of names and boxes in a conversation.
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
