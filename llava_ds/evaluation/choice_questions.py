"""ScienceQA and MMBench: files as they are downloaded, and the question files of LLaVA's evaluation."""

import base64
import binascii
import csv
import hashlib
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.data.sources.options import short
from llava_ds.evaluation.benchmark_files import (
    Given,
    ImageFolder,
    annotations_of,
    check_first,
    complete,
    field,
    matching,
    questions_from,
    read_json,
)
from llava_ds.evaluation.option_letters import LETTERS
from llava_ds.evaluation.question import Question, about
from llava_ds.files.writing import write_whole
from llava_ds.infer.generate import Prompt

LETTER_ONLY = "\nAnswer with the option's letter from the given choices directly."  # LLaVA-1.5's, for both
ROUND = 1_000_000  # MMBench's later rounds have the question's index and this many times their number
GRADES = {f"grade{n}": "G1-6" if n <= 6 else "G7-12" for n in range(1, 13)}


def scienceqa(given: Given) -> list[Question]:
    """The folder of problems.json and pid_splits.json, by itself or with llava_test_CQM-A.json."""
    path = Path(given.data_path).expanduser()
    from_llava = not path.is_dir()
    folder = annotations_of(given, "ScienceQA", "the folder of problems.json") if from_llava else complete(given)
    folder = Path(folder).expanduser()
    file = folder / "problems.json"
    problems = read_json(file)
    what, keys = "ScienceQA's problems", ("question", "choices", "answer")
    if not isinstance(problems, dict):
        raise DataError(f"{file} is not {what}: expected an object of problems by their ids, with {', '.join(keys)}")
    check_first(file, what, list(problems.values()), keys)
    if from_llava:
        records = read_json(path)
        check_first(path, "ScienceQA's questions in LLaVA's layout", records, ("id", "conversations"))
    else:
        splits = read_json(folder / "pid_splits.json")
        if not isinstance(splits, dict) or not isinstance(splits.get(given.split), list):
            known = ", ".join(splits) if isinstance(splits, dict) else "none"
            raise ConfigError(f"{folder / 'pid_splits.json'} has no split {given.split!r}: its splits are {known}")
        records = splits[given.split]
    images = ImageFolder(given.image_folder)

    def make(record: object) -> Question:
        if from_llava:
            id = str(field(record, "id", (str, int)))
            problem = matching(problems, id, file)
            turn = next(iter(field(record, "conversations", list)), None)
            text = field(turn, "value", str).replace(IMAGE_TOKEN, "").strip()
            names = (field(record, "image", str),) if record.get("image") is not None else ()
        else:
            id, problem = str(record), matching(problems, str(record), file)
            text, name = _problem_text(problem), problem.get("image")
            names = () if name is None else (f"{id}/{name}", f"{given.split}/{id}/{name}")
        answer, num_choices = field(problem, "answer", int), len(field(problem, "choices", list))
        question = about(
            id,
            images(*names) if names else None,
            text + LETTER_ONLY,
            [answer, num_choices],
            kinds=_problem_kinds(problem),
        )
        # LLaVA's evaluation tells questions with pictures by this mark in the answers' file.
        asked = f"{IMAGE_TOKEN}\n{question.asked}" if names else question.asked
        return Question(id, question.prompt, asked, question.reference, question.kinds)

    return questions_from(path, records, make)


def _problem_text(problem: dict) -> str:
    """Context, question and options as LLaVA asks for them (CQM-A of its convert_sqa_to_llava.py)."""
    options = " ".join(f"({letter}) {text}" for letter, text in zip(LETTERS, field(problem, "choices", list)))
    context = problem.get("hint") or "N/A"
    text = f"Context: {context}\nQuestion: {field(problem, 'question', str)}\nOptions: {options}"
    return text.replace("  ", " ").strip()


def _problem_kinds(problem: dict) -> tuple[str, ...]:
    """The columns of ScienceQA's table: subject, kind of context, grades."""
    subject = {"natural science": "NAT", "social science": "SOC", "language science": "LAN"}
    context = [name for name, key in (("TXT", "hint"), ("IMG", "image")) if problem.get(key)]
    kinds = [subject.get(problem.get("subject")), *(context or ["NO"]), GRADES.get(problem.get("grade"))]
    return tuple(kind for kind in kinds if kind is not None)


def mmbench(given: Given) -> list[Question]:
    """A TSV of MMBench, with its images inside; all rounds of a question where the file has them."""
    path = complete(given)
    rows = _rows(path)
    by_index = {row["index"]: row["image"] for row in rows}
    # Later rounds may name the row that has their image.
    images = [by_index.get(row["image"], row["image"]) if row["image"].isdigit() else row["image"] for row in rows]
    stored = _stored(images, given.cache_dir)

    def make(record: tuple[dict[str, str], str]) -> Question:
        row, image = record
        index = _index(row["index"])
        options = {letter: row[letter] for letter in "ABCD" if not _absent(row.get(letter))}
        letter = row["answer"].strip()
        if letter not in options:
            raise DataError(f"(index {index}) has the answer {short(letter)}, expected one of {', '.join(options)}")
        text = "\n".join(f"{letter}. {option}" for letter, option in options.items())
        hint = "" if _absent(row.get("hint")) else f"{row['hint']}\n"
        asked = f"{hint}{row['question']}\n{text}"
        if image not in stored:
            raise DataError(f"(index {index}) has {short(image)} under 'image', expected an image in base64")
        prompt = Prompt((Message("human", f"{IMAGE_TOKEN}\n{asked}{LETTER_ONLY}"),), (stored[image],))
        kinds = tuple(row[key] for key in ("category", "l2-category") if not _absent(row.get(key)))
        more = {"round_id": index // ROUND, "options": list(options.values()), "option_char": list(options)}
        return Question(index, prompt, asked, [index % ROUND, letter, options], kinds, more)

    return questions_from(path, list(zip(rows, images)), make)


def _rows(path: str) -> list[dict[str, str]]:
    """The rows of a TSV by lower-case column, but for A to D."""
    what, keys = "MMBench's TSV", ("index", "question", "A", "B", "answer", "image")
    limit = csv.field_size_limit(sys.maxsize)  # an image is one field
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig", newline="") as file:
            rows = [
                {(key if key in "ABCD" else key.lower()): value or "" for key, value in row.items() if key}
                for row in csv.DictReader(file, delimiter="\t")
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not {what}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    finally:
        csv.field_size_limit(limit)
    if rows and "answer" not in rows[0] and {"index", "question", "image"} <= set(rows[0]):
        raise DataError(f"{path} has no column 'answer': it is the test split, which MMBench's server scores")
    check_first(path, what, rows, keys)
    return rows


def _index(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"has the index {short(text)}, expected a number") from None


def _absent(text: str | None) -> bool:
    return text is None or text.strip().lower() in ("", "nan", "none")


def _stored(texts: list[str], cache_dir: str) -> dict[str, Media]:
    """Every image in base64 as a slice of one file of the cache, which is named by what it holds.

    Texts that are no images are left out.
    """
    contents = {text: content for text in dict.fromkeys(texts) if (content := _decoded(text))}
    hashed = hashlib.sha256()
    for content in contents.values():
        hashed.update(content)
    path = Path(cache_dir).expanduser() / "evaluation" / f"{hashed.hexdigest()[:32]}.pictures"
    if not path.is_file() or path.stat().st_size != sum(map(len, contents.values())):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, partial(_write_all, contents.values()), shared=True)
    media, offset = {}, 0
    for text, content in contents.items():
        media[text] = Media("image", (FileRef(str(path), offset, len(content)),))
        offset += len(content)
    return media


def _write_all(contents: Iterable[bytes], path: Path) -> None:
    with path.open("wb") as file:
        file.writelines(contents)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
