"""A question to a model with its reference."""

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

    id: from its file, not always unique; # and the turn are added if a record has several questions; prompt: the
    conversation that ends with it; asked: its text in the answers' file; reference: as the metric expects it
    (scores.METRICS); kinds: its score groups; more: additional fields in the answers' file.
    """

    id: str | int
    prompt: Prompt
    asked: str
    reference: object
    kinds: tuple[str, ...] = ()
    more: dict[str, object] = field(default_factory=dict)


def _shown(image: str | Media) -> list[object]:
    """Return an image's or video's location and a hash of some blocks; no hash if the file can't be read."""
    refs = [FileRef(image)] if isinstance(image, str) else image.refs
    rest = [] if isinstance(image, str) else [image.kind, image.settings]
    with contextlib.suppress(OSError, DataError):
        rest += [blocks_digest(ref.path, ref.offset, ref.num_bytes) for ref in refs]
    return [[astuple(ref) for ref in refs], *rest]


def without_image(question: Question) -> Question:
    """Return the question without its images: no features and no marks."""
    messages = tuple(
        replace(m, text=m.text.replace(IMAGE_TOKEN, "").replace(PART_END, "").strip(), keeps_spaces=False)
        for m in question.prompt.messages
    )
    return replace(question, prompt=replace(question.prompt, messages=messages, images=()))


def with_blank_image(question: Question) -> Question:
    """Return the question with each image replaced by a blank one."""
    return replace(question, prompt=replace(question.prompt, blank=True))


def with_resized_sizes(questions: list[Question], options: ImageOptions) -> list[Question]:
    """Add the sizes that the model resizes images to, for models that answer with boxes in resized pixels."""
    if options.boxes.bbox_type != "real":
        return questions
    return [
        replace(q, reference={**q.reference, "resized": coordinate_frame(tuple(q.reference["size"]), 1, options).units})
        if isinstance(q.reference, dict) and "size" in q.reference
        else q
        for q in questions
    ]


def digest(questions: list[Question]) -> str:
    """Hash everything that is asked and compared, and some blocks of every image and video."""
    hashed = hashlib.sha256()
    for question in questions:
        messages = [astuple(message) for message in question.prompt.messages]
        images = [_shown(image) for image in question.prompt.images]
        row = [question.id, messages, images, question.reference, question.kinds, question.more]
        row += [question.prompt.tools, question.prompt.template_kwargs]
        hashed.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()
