"""ScienceQA and MMBench: files as they are downloaded, and the question files of LLaVA's evaluation."""

from pathlib import Path

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.sample import Message
from llava_ds.data.sources.options import short
from llava_ds.evaluation.benchmark import LETTER_ONLY, letter_of
from llava_ds.evaluation.benchmark_files import (
    Given,
    ImageFolder,
    annotations_of,
    check_first,
    complete,
    convert_records,
    field,
    matching,
    read_json,
)
from llava_ds.evaluation.benchmark_tables import RecordImages, read_table
from llava_ds.evaluation.option_letters import LETTERS
from llava_ds.evaluation.question import Question, about
from llava_ds.infer.generate import Prompt

ROUND = 1_000_000  # MMBench's later rounds have the question's index and this many times their number
GRADES = {f"grade{n}": "G1-6" if n <= 6 else "G7-12" for n in range(1, 13)}


def scienceqa(given: Given) -> list[Question]:
    """The folder of problems.json and pid_splits.json, by itself or with llava_test_CQM-A.json."""
    path = Path(given.data_path).expanduser()
    from_llava = not path.is_dir()
    folder = annotations_of(given, "ScienceQA", "the folder of problems.json") if from_llava else complete(given)
    folder = Path(folder).expanduser()
    split = given.split or "test"
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
        if not isinstance(splits, dict) or not isinstance(splits.get(split), list):
            known = ", ".join(splits) if isinstance(splits, dict) else "none"
            raise ConfigError(f"{folder / 'pid_splits.json'} has no split {split!r}: its splits are {known}")
        records = splits[split]
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
            names = () if name is None else (f"{id}/{name}", f"{split}/{id}/{name}")
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

    return convert_records(path, records, make)


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
    records = read_table(path, "MMBench's TSV", ("index", "question", "A", "B", "image"), ("dev",), given.cache_dir)
    images = RecordImages(records, given.image_folder)  # later rounds may name the row that has their image

    def make(row: dict) -> Question:
        index = _index(row["index"])
        options = {letter: row[letter] for letter in "ABCD" if not _absent(row.get(letter))}
        letter = letter_of(row, options)
        text = "\n".join(f"{letter}. {option}" for letter, option in options.items())
        hint = "" if _absent(row.get("hint")) else f"{row['hint']}\n"
        asked = f"{hint}{row['question']}\n{text}"
        prompt = Prompt((Message("human", f"{IMAGE_TOKEN}\n{asked}{LETTER_ONLY}"),), (images(row.get("image")),))
        kinds = tuple(row[key] for key in ("category", "l2-category") if not _absent(row.get(key)))
        more = {"round_id": index // ROUND, "options": list(options.values()), "option_char": list(options)}
        return Question(index, prompt, asked, [index % ROUND, letter, options], kinds, more)

    return convert_records(path, records, make)


def _index(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"has the index {short(text)}, expected a number") from None


def _absent(text: str | None) -> bool:
    return text is None or text.strip().lower() in ("", "nan", "none")
