"""What a record becomes: a conversation and the pictures that its marks stand for."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Message:
    """One turn: role is "system", "human" or "gpt"; pictures and videos stand in the text as <image> marks."""

    role: str
    text: str


@dataclass(frozen=True)
class FileRef:
    """A whole file (num_bytes -1), or a slice of one: a member of a tar, a picture out of a table."""

    path: str
    offset: int = 0
    num_bytes: int = -1


@dataclass(frozen=True)
class Media:
    """What one <image> mark stands for: a picture, the frames of a video as pictures, or a video file."""

    kind: Literal["image", "frames", "video"]
    refs: tuple[FileRef, ...]


@dataclass(frozen=True)
class Sample:
    """One record. Paths are real and lie inside the folders that were named; media are in the order of the marks."""

    id: str
    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    kind: str = ""  # of question, in files to evaluate on
