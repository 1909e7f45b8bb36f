"""Read questions from files in training formats: records with reference answers, or preferences."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Media, Message, Sample
from llava_ds.data.sources import RawRecord, SourceOptions, open_sources, shown, to_sample
from llava_ds.data.sources.fields import field_of
from llava_ds.data.sources.record_forms import all_answers, as_conversation
from llava_ds.data.sources.source import Source
from llava_ds.data.special_tokens import shown_text
from llava_ds.extensions.benchmarks.benchmark_files import Given, complete
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.benchmarks.scores import reference_for
from llava_ds.extensions.infer.generate import Prompt

TURNS = ("together", "each")  # questions of a record in one conversation, or each without the earlier turns
MIN_SAME_WORDS = 5  # smallest group of questions with the same words, used if no kinds are given
MAX_GROUPS = 20
METRICS_OF_SEVERAL = ("vqa", "caption")  # metrics that allow several reference answers
LONGEST_NAME = 100  # characters of a question that may become a group's name


def llava(given: Given) -> list[Question]:
    """Read a question for every answered turn of every record, with or without the record's earlier turns.

    "kind", in a record or in the turn of a question or answer, is the score group. "references", a list of texts,
    replaces a record's last answer as reference.
    """

    def convert(sample: Sample, record: RawRecord, source: Source) -> list[Question]:
        return _questions_of(sample, _scoring(record, source, given.metric), given)

    questions = _converted(given, SourceOptions(), convert)
    if not questions:
        raise DataError(f"{given.data_path}: the data has no question with an answer")
    return questions if any(question.kinds for question in questions) else _grouped_by_words(questions)


def preferences(given: Given) -> list[Question]:
    """Read answer pairs from a file of preferences (docs/preference.md), to test which one the model prefers."""
    return _converted(given, SourceOptions(are_preferences=True), lambda sample, *_: [_pair(sample)])


def _pair(sample: Sample) -> Question:
    *before, chosen = sample.messages
    rejected = sample.rejected[-1]
    if any(each.thought is not None or each.tool_calls for each in (chosen, rejected)):
        raise DataError("has answers with thoughts or tool calls, but answers are judged only by their text")
    return Question(
        sample.id,
        _prompt(sample, tuple(before), sample.media),
        shown_text(before[-1].text).strip(),
        shown_text(chosen.text),
        kinds=(sample.kind,) if sample.kind else (),
        more={"rejected": shown_text(rejected.text)},
    )


def _converted(
    given: Given, options: SourceOptions, convert: Callable[[Sample, RawRecord, Source], list[Question]]
) -> list[Question]:
    """Return the questions of all records. Raises DataError with the first problems if some can't be used."""
    questions, problems, total = [], [], 0
    options = replace(options, image_folder=given.image_folder, cache_dir=given.cache_dir, split=given.split)
    for source in open_sources(complete(given), options):
        for record in source.read():
            total += 1
            try:
                questions += convert(_sample(record, source), record, source)
            except DataError as error:
                problems.append(f"{record.file}, record {record.index}: {error}")
    if problems:
        raise DataError(f"{given.data_path}: {len(problems)} of {total} records can't be used\n{shown(problems)}")
    return questions


def _sample(record: RawRecord, source: Source) -> Sample:
    """Convert a record. Raises DataError if it can't become a question."""
    sample = to_sample(record.text, source, record.index)
    if sample.boxes or sample.refs:
        raise DataError(
            "has boxes under 'objects', but these are only used in training: score boxes with --task "
            "refcoco, and leave these records out"
        )
    return sample


def _scoring(record: RawRecord, source: Source, metric: str) -> tuple[list[str] | None, list[str]]:
    """Return a record's references, None if it has none, and the kind of each turn, "" for none.

    record: one that to_sample() accepts. Raises DataError for references that are not texts.
    """
    has_answers = source.format == "question_answer" and metric in METRICS_OF_SEVERAL
    if "references" not in record.text and "kind" not in record.text and not has_answers:
        return None, []
    content = json.loads(record.text)
    references = content.get("references")
    if references is None and has_answers:
        references = all_answers(content, source.columns)
    if references is not None and (
        not isinstance(references, list) or not references or not all(isinstance(each, str) for each in references)
    ):
        raise DataError(f"has {references!r:.60} under 'references', expected a list of texts")
    if source.format != "caption":
        content = as_conversation(content, source.columns)
    _, turns = field_of(content, source.columns.turns)
    kinds = [turn.get("kind") for turn in turns or ()]
    return references, [kind if isinstance(kind, str) else "" for kind in kinds]


def _questions_of(sample: Sample, scoring: tuple[list[str] | None, list[str]], given: Given) -> list[Question]:
    questions, (references, turn_kinds) = [], scoring
    # Skip answers with weight 0, because they may be wrong, and tool calls, because they are not text.
    answered = [i for i, m in enumerate(sample.messages) if m.role == "gpt" and i > 0 and m.weight and not m.tool_calls]
    if given.turns == "each" and any(message.role == "tool" for message in sample.messages):
        raise DataError("has tool results, but they mean nothing without their calls: leave out --turns each")
    of_its_own = len(sample.messages) - len(turn_kinds)  # a system message is not a turn
    for number, i in enumerate(answered, 1):
        # the kinds of the question and answer turns
        own = turn_kinds[max(0, i - 1 - of_its_own) : i + 1 - of_its_own]
        kind = next(filter(None, own), sample.kind)
        texts = references if references and i == answered[-1] else [shown_text(sample.messages[i].text)]
        before = sample.messages[:i]
        media = sample.media[: sum(message.text.count(IMAGE_TOKEN) for message in before)]
        questions.append(
            Question(
                f"{sample.id}#{number}" if len(answered) > 1 else sample.id,
                _prompt(sample, _by_itself(before) if given.turns == "each" else before, media),
                shown_text(before[-1].text).strip(),
                reference_for(given.metric, texts),
                kinds=(kind,) if kind else (),
                more={"id": sample.id, "turn": number},
            )
        )
    return questions


def _prompt(sample: Sample, messages: tuple[Message, ...], media: tuple[Media, ...]) -> Prompt:
    """Build the prompt from a record's messages up to a question, and their media."""
    images = tuple(map(_by_path, media))
    return Prompt(messages, images, tools=sample.tools, template_kwargs=sample.template_kwargs)


def _by_itself(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the last question without the earlier turns, but with their system messages and images."""
    *earlier, question = messages
    system = [message for message in earlier if message.role == "system"]
    marks = sum(message.text.count(IMAGE_TOKEN) for message in earlier)
    mark = IMAGE_TOKEN if question.keeps_spaces else f"{IMAGE_TOKEN}\n"
    return (*system, replace(question, text=mark * marks + question.text))


def _grouped_by_words(questions: list[Question]) -> list[Question]:
    """Set the kind of questions that many records repeat to the question's text."""
    counts = Counter(question.asked for question in questions)
    groups = {
        words: " ".join(words.split())
        for words, count in counts.most_common(MAX_GROUPS)
        if count >= MIN_SAME_WORDS and 0 < len(words) <= LONGEST_NAME
    }
    if sum(counts[words] for words in groups) == len(questions) and len(groups) == 1:
        return questions  # the group would contain all questions
    return [replace(q, kinds=(groups[q.asked],)) if q.asked in groups else q for q in questions]


def _by_path(media: Media) -> str | Media:
    """Return the path if the medium is an image in a file of its own, as for other benchmarks; else the medium."""
    [first, *more] = media.refs
    is_file = media.kind == "image" and not more and first.num_bytes < 0 and not media.settings
    return first.path if is_file else media
