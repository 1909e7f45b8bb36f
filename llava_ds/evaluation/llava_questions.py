"""Any LLaVA-format file with references, and COCO's captions."""

import json

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Media, Sample
from llava_ds.data.sources import RawRecord, SourceOptions, open_sources, shown, to_sample
from llava_ds.evaluation.files import (
    Given,
    Pictures,
    check_first,
    complete,
    field,
    held_under,
    questions_from,
    read_json,
)
from llava_ds.evaluation.question import Question, about
from llava_ds.evaluation.scores import reference_for
from llava_ds.infer.generate import Prompt

CAPTION = "Provide a one-sentence caption for the provided image."  # as LLaVA-1.5 was trained to be asked


def llava(given: Given) -> list[Question]:
    """Every answered turn of every record, asked with the file's own earlier turns before it.

    "kind" in a record groups the scores; "references", a list of texts, stands for its last answer.
    """
    questions, problems, total = [], [], 0
    options = SourceOptions(image_folder=given.image_folder, cache_dir=given.cache_dir)
    for source in open_sources(complete(given), options):
        for record in source.read():
            total += 1
            try:
                questions += _turns(to_sample(record.text, source, record.index), _references(record), given.metric)
            except DataError as error:
                problems.append(f"{record.file}, record {record.index}: {error}")
    if problems:
        raise DataError(f"{given.data_path}: {len(problems)} of {total} records can't be used\n{shown(problems)}")
    if not questions:
        raise DataError(f"{given.data_path}: there is no question with an answer in the data")
    return questions


def _references(record: RawRecord) -> list[str] | None:
    if '"references"' not in record.text:
        return None
    references = json.loads(record.text).get("references")
    if references is not None and (
        not isinstance(references, list) or not references or not all(isinstance(each, str) for each in references)
    ):
        raise DataError(f"has {references!r:.60} under 'references', expected a list of texts")
    return references


def _turns(sample: Sample, references: list[str] | None, metric: str) -> list[Question]:
    questions = []
    answered = [i for i, message in enumerate(sample.messages) if message.role == "gpt" and i > 0]
    for i in answered:
        before = sample.messages[:i]
        shown_media = sum(m.text.count(IMAGE_TOKEN) for m in before)
        texts = references if references and i == answered[-1] else [sample.messages[i].text]
        questions.append(
            Question(
                sample.id,
                Prompt(before, tuple(map(_by_path, sample.media[:shown_media]))),
                before[-1].text.replace(IMAGE_TOKEN, "").strip(),
                reference_for(metric, texts),
                kinds=(sample.kind,) if sample.kind else (),
            )
        )
    return questions


def _by_path(media: Media) -> str | Media:
    """A picture that is a whole file by its path, which is what other questions have."""
    [first, *more] = media.refs
    return first.path if media.kind == "image" and not more and first.num_bytes < 0 else media


def captions(given: Given) -> list[Question]:
    """captions_val2014.json and others in COCO's layout: one question per picture, all its captions as references."""
    path, what = complete(given), "captions in COCO's layout"
    content = read_json(path)
    images, annotated = (held_under(path, what, content, key) for key in ("images", "annotations"))
    check_first(path, what, images, ("id", "file_name"))
    check_first(path, what, annotated, ("image_id", "caption"))
    references: dict[object, list[str]] = {}
    for each in annotated:
        if isinstance(each, dict) and isinstance(each.get("caption"), str):
            references.setdefault(each.get("image_id"), []).append(each["caption"])
    pictures = Pictures(given.image_folder)

    def make(image: dict) -> Question:
        id = field(image, "id", (int, str))
        if id not in references:
            raise DataError(f"is the picture {id}, which has no caption")
        return about(id, pictures(field(image, "file_name", str)), CAPTION, references[id])

    return questions_from(path, images, make)
