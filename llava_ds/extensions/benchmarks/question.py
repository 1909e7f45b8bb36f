"""A question to a model, and the reference that its answer is compared with."""

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
    """One question.

    id: as its file has it, not always unique; of a record with several questions, with # and the turn behind it;
    prompt: the conversation that ends with it; asked: its text for the file of answers; reference: what the metric
    compares with (scores.METRICS says what each expects); kinds: groups that it is scored in; more: written beside its
    answer.
    """

    id: str | int
    prompt: Prompt
    asked: str
    reference: object
    kinds: tuple[str, ...] = ()
    more: dict[str, object] = field(default_factory=dict)


def _shown(image: str | Media) -> list[object]:
    """Where an image or video lies, and a hash of some of its blocks; without one of a file that can't be read."""
    refs = [FileRef(image)] if isinstance(image, str) else image.refs
    rest = [] if isinstance(image, str) else [image.kind, image.settings]
    with contextlib.suppress(OSError, DataError):
        rest += [blocks_digest(ref.path, ref.offset, ref.num_bytes) for ref in refs]
    return [[astuple(ref) for ref in refs], *rest]


def without_image(question: Question) -> Question:
    """The same question with its images withheld: neither features nor marks remain."""
    messages = tuple(
        replace(m, text=m.text.replace(IMAGE_TOKEN, "").replace(PART_END, "").strip(), keeps_spaces=False)
        for m in question.prompt.messages
    )
    return replace(question, prompt=replace(question.prompt, messages=messages, images=()))


def with_blank_image(question: Question) -> Question:
    """The same question with a blank image in the place of each."""
    return replace(question, prompt=replace(question.prompt, blank=True))


def with_resized_sizes(questions: list[Question], options: ImageOptions) -> list[Question]:
    """The questions, with the sizes that the model resizes their images to where it answers with boxes in them."""
    if options.boxes.bbox_type != "real":
        return questions
    return [
        replace(q, reference={**q.reference, "resized": coordinate_frame(tuple(q.reference["size"]), 1, options).units})
        if isinstance(q.reference, dict) and "size" in q.reference
        else q
        for q in questions
    ]


def digest(questions: list[Question]) -> str:
    """A hash of all that is asked and compared with, and of some blocks of every image and video."""
    hashed = hashlib.sha256()
    for question in questions:
        messages = [astuple(message) for message in question.prompt.messages]
        images = [_shown(image) for image in question.prompt.images]
        row = [question.id, messages, images, question.reference, question.kinds, question.more]
        row += [question.prompt.tools, question.prompt.template_kwargs]
        hashed.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()
