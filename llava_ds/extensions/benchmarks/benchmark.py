"""Declare a benchmark with one question table, and convert its records to questions."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import Message
from llava_ds.data.sources.options import short
from llava_ds.extensions.benchmarks.benchmark_files import (
    Given,
    annotations_of,
    complete,
    convert_records,
    field,
    matching,
    read_records,
)
from llava_ds.extensions.benchmarks.benchmark_tables import RecordImages, listed, read_table
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.infer.generate import Prompt

LETTER_ONLY = "\nAnswer with the option's letter from the given choices directly."
SHORT = "\nAnswer the question using a single word or phrase."
ANSWER = "answer|answers|label"
QUESTION = "question|query"
IDS = ("questionId", "question_id", "index", "id", "pid")
IMAGES = ("decoded_image", "image", "image_path", "imgname", "image_local_name", "img_path")
ASKED = "text"  # the whole prompt, in LLaVA's question files
LLAVA_KEYS = ("question_id", "image", ASKED)

Options = dict[str, str]  # texts by letter


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's declaration.

    what: the name in messages; metric: a key of scores.METRICS; reference: builds the metric's reference; kinds:
    returns a record's score groups; ask: returns the line after the question; keys: required keys, alternatives
    separated by |; splits: the splits to read from a folder of parquet files; prepare: reads files in other formats,
    one record per question; written: returns the prompt, and more additional fields, for the answers' file.
    """

    what: str
    metric: str
    reference: Callable[[dict, Options], object]
    kinds: Callable[[dict], Iterable[object]] = lambda record: ()
    ask: Callable[[dict, Options], str] = lambda record, options: LETTER_ONLY if options else SHORT
    keys: tuple[str, ...] = (QUESTION, ANSWER)
    splits: tuple[str, ...] = ("test",)
    prepare: Callable[["Benchmark", Given], list[dict]] | None = None
    written: Callable[[str, dict], str] = lambda asked, record: asked
    more: Callable[[dict, Options], dict[str, object]] = lambda record, options: {}

    def records(self, given: Given) -> list[dict]:
        """Read the table's records in --data_path. Raises DataError if one lacks a key."""
        return self._read(complete(given), given)

    def _read(self, path: str, given: Given) -> list[dict]:
        records = read_table(path, f"{self.what}'s questions", self.keys, self.splits, given.cache_dir)
        return convert_records(path, records, self._checked)

    def paired(
        self,
        given: Given,
        example: str,
        key: Callable[[dict], object],
        official: Callable[[str], list[dict]] | None = None,
    ) -> list[dict]:
        """Read the benchmark's own records, or LLaVA's .jsonl rows, each merged with the official record of its key.

        official: reads the benchmark's own file if it is not a table; example: name of this file, for messages.
        """
        read = official or partial(self._read, given=given)
        if not given.data_path.endswith(".jsonl"):
            return read(complete(given))
        file = annotations_of(given, self.what, example)
        records = {key(each): each for each in read(file)}
        rows = read_records(given.data_path, f"{self.what}'s questions in LLaVA's layout", LLAVA_KEYS)
        return convert_records(given.data_path, rows, lambda row: {**matching(records, key(row), file), **row})

    def _checked(self, record: dict) -> dict:
        for key in self.keys:
            if value_of(record, key) is None:
                raise DataError(f"has nothing under {key.replace('|', ' or ')}, expected a value")
        return record

    def read(self, given: Given) -> list[Question]:
        """Read the questions of --data_path. Raises ConfigError or DataError."""
        records = self.prepare(self, given) if self.prepare else self.records(given)
        images = RecordImages(records, given.image_folder)
        return convert_records(given.data_path, enumerate(records), lambda row: self._question(*row, images))

    def _question(self, number: int, record: dict, images: RecordImages) -> Question:
        options = options_of(record)
        if ASKED in record:
            asked = field(record, ASKED, str)
        else:
            lines = [text_of(record, QUESTION), *(f"{letter}. {text}" for letter, text in options.items())]
            asked = "\n".join(lines) + self.ask(record, options)
        if IMAGE_TOKEN in asked:
            asked = asked.replace(IMAGE_TOKEN, "").strip()
        shown = tuple(map(images, image_cells(record, asked)))
        prompt = Prompt((Message("human", f"{IMAGE_TOKEN}\n" * len(shown) + asked),), shown)
        id = value_of(record, "|".join(IDS))
        kinds = (str(kind) for cell in self.kinds(record) for kind in listed(cell) if cell is not None)
        return Question(
            number if id is None else id,
            prompt,
            self.written(asked, record),
            self.reference(record, options),
            tuple(dict.fromkeys(kinds)),
            self.more(record, options),
        )


def value_of(record: dict, names: str) -> object:
    """Return a record's value for the first of the names (separated by |) whose value isn't None, or None."""
    return next((record[name] for name in names.split("|") if record.get(name) is not None), None)


def text_of(record: dict, names: str) -> str:
    """Return the text under one of several names. Raises DataError if it is missing."""
    value = value_of(record, names)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"has {short(value)} under {names.replace('|', ' or ')}, expected text")
    return value.strip()


def texts_of(record: dict, options: Options | None = None) -> list[str]:
    """Return a record's answers as texts; options is ignored. Raises DataError if it has no answer."""
    texts = [str(each) for each in listed(value_of(record, ANSWER)) if each is not None]
    if not texts or texts == ["?"]:
        raise DataError("has no answer, expected text or a list of texts: this is the test split, scored by a server")
    return texts


def options_of(record: dict) -> Options:
    """Return a record's options, from a list of texts or from one column each."""
    texts = [str(each) for each in listed(record.get("options", record.get("choices"))) if each is not None]
    if not texts:
        columns = (value_of(record, f"{letter}|choice_{letter.lower()}") for letter in "ABCDEFGH")
        texts = [str(text) for text in columns if text is not None and str(text).lower() not in ("", "nan")]
    return {chr(ord("A") + number): text for number, text in enumerate(texts)}


def letter_of(record: dict, options: Options) -> str:
    """Return the letter of a record's answer: a letter, or an option number from 0. Raises DataError for others."""
    answer = texts_of(record)[0].strip()
    letter = chr(ord("A") + int(answer)) if answer.isascii() and answer.isdigit() else answer
    if letter not in (options or "ABCDEFGH") or len(letter) != 1:
        raise DataError(f"has the answer {short(answer)}, expected one of {', '.join(options or 'ABCDEFGH')}")
    return letter


def yes_or_no(record: dict) -> str:
    """Return a record's answer, "yes" or "no". Raises DataError for other answers."""
    word = texts_of(record)[0].strip().lower()
    if word not in ("yes", "no"):
        raise DataError(f"has the answer {short(word)}, expected yes or no")
    return word


def image_cells(record: dict, asked: str) -> list[object]:
    """Return the images that a record's text mentions, as in <image 1>; all of its images if it mentions none."""
    mentioned = sorted({int(number) for number in re.findall(r"<image ([1-9])>", asked)})
    if any(f"image_{number}" in record for number in mentioned):
        return [record.get(f"image_{number}") for number in mentioned]
    cell = value_of(record, "|".join(IMAGES))
    cells = cell if isinstance(cell, list) else listed(cell)
    return [cells[number - 1] if number <= len(cells) else None for number in mentioned] or cells
