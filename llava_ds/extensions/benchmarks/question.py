"""A benchmark question with its reference, and changes to its images."""

import contextlib
import hashlib
import json
from dataclasses import astuple, dataclass, field, replace

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import FileRef, Media
from llava_ds.data.special_tokens import PART_END
from llava_ds.extensions.infer.generate import Prompt
from llava_ds.files.reading import blocks_digest
from llava_ds.geometry import ImageOptions, coordinate_frame


@dataclass(frozen=True)
class Question:
    """A benchmark question.

    id: the file's id, not always unique, with # and the turn if a record has several questions; prompt: the
    conversation up to and including the question; asked: the text for the answers' file; reference: the reference in
    the form that the metric expects (scores.METRICS); kinds: score groups; more: further fields for the answers' file.
    """

    id: str | int
    prompt: Prompt
    asked: str
    reference: object
    kinds: tuple[str, ...] = ()
    more: dict[str, object] = field(default_factory=dict)


def _shown(image: str | Media) -> list[object]:
    """Return an image's or video's location, and hashes of some of its blocks if the file can be read."""
    refs = [FileRef(image)] if isinstance(image, str) else image.refs
    rest = [] if isinstance(image, str) else [image.kind, image.settings]
    with contextlib.suppress(OSError, DataError):
        rest += [blocks_digest(ref.path, ref.offset, ref.num_bytes) for ref in refs]
    return [[astuple(ref) for ref in refs], *rest]


def without_image(question: Question) -> Question:
    """Return the question without its images and the image marks in its text."""
    messages = tuple(
        replace(m, text=m.text.replace(IMAGE_TOKEN, "").replace(PART_END, "").strip(), keeps_spaces=False)
        for m in question.prompt.messages
    )
    return replace(question, prompt=replace(question.prompt, messages=messages, images=()))


def with_blank_image(question: Question) -> Question:
    """Return the question with each image replaced by a blank one."""
    return replace(question, prompt=replace(question.prompt, blank=True))


def with_resized_sizes(questions: list[Question], options: ImageOptions) -> list[Question]:
    """Add each image's size after resizing to the references, if the model's boxes are in pixels of resized images."""
    if options.boxes.bbox_type != "real":
        return questions
    return [
        replace(q, reference={**q.reference, "resized": coordinate_frame(tuple(q.reference["size"]), 1, options).units})
        if isinstance(q.reference, dict) and "size" in q.reference
        else q
        for q in questions
    ]


def digest(questions: list[Question]) -> str:
    """Return a hash of all prompts, references and groups, and some blocks of every image and video."""
    hashed = hashlib.sha256()
    for question in questions:
        messages = [astuple(message) for message in question.prompt.messages]
        images = [_shown(image) for image in question.prompt.images]
        row = [question.id, messages, images, question.reference, question.kinds, question.more]
        row += [question.prompt.tools, question.prompt.template_kwargs]
        hashed.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()
