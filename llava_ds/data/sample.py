"""What a record becomes: a conversation and the images that its marks stand for."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Message:
    """One turn: role is "system", "human" or "gpt"; images and videos stand in the text as <image> marks."""

    role: str
    text: str


@dataclass(frozen=True)
class FileRef:
    """A whole file (num_bytes -1), or a slice of one: a member of a tar, an image out of a table."""

    path: str
    offset: int = 0
    num_bytes: int = -1


@dataclass(frozen=True)
class Media:
    """What one <image> mark stands for: an image, the frames of a video as images, or a video file."""

    kind: Literal["image", "frames", "video"]
    refs: tuple[FileRef, ...]


# What was done about images without marks, and marks without images (--on_unmarked_image), and how it is told.
IMAGE_PREPENDED, IMAGE_LEFT_OUT, MARK_AS_TEXT = "image prepended", "image left out", "mark as text"
TOLD_UNMARKED = {
    IMAGE_PREPENDED: "have images without a mark, which are shown before the first question (--on_unmarked_image)",
    IMAGE_LEFT_OUT: "have images without a mark, which are left out (--on_unmarked_image text)",
    MARK_AS_TEXT: "have marks without an image, which are read as text (--on_unmarked_image text)",
}


@dataclass(frozen=True)
class Sample:
    """One record. Paths are real and lie inside the folders that were named; media are in the order of the marks."""

    id: str
    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    kind: str = ""  # of question, in files to evaluate on
    unmarked: str = ""  # what was done about an image without a mark, or a mark without an image
