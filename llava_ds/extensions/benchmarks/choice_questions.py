"""Read ScienceQA and MMBench, from their own files or from the question files of LLaVA's evaluation."""

from pathlib import Path

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.sources.options import short
from llava_ds.extensions.benchmarks.benchmark import ASKED, LETTER_ONLY, Benchmark, letter_of
from llava_ds.extensions.benchmarks.benchmark_files import (
    Given,
    annotations_of,
    complete,
    convert_records,
    field,
    matching,
    read_json,
    records_in,
)
from llava_ds.extensions.benchmarks.option_letters import LETTERS

ROUND = 1_000_000  # later rounds of an MMBench question have its index plus a multiple of this
GRADES = {f"grade{n}": "G1-6" if n <= 6 else "G7-12" for n in range(1, 13)}


def _scienceqa_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read the folder of problems.json and pid_splits.json, or llava_test_CQM-A.json merged with problems.json."""
    path = Path(given.data_path).expanduser()
    from_llava = not path.is_dir()
    folder = annotations_of(given, benchmark.what, "the folder of problems.json") if from_llava else complete(given)
    file, split = Path(folder).expanduser() / "problems.json", given.split or "test"
    found = records_in(file, "ScienceQA's problems", read_json(file), ("question", "choices", "answer"))
    problems = {each.get("id"): each for each in found}
    if from_llava:
        rows = records_in(path, "ScienceQA's questions in LLaVA's layout", read_json(path), ("id", "conversations"))
    else:
        splits_file = file.with_name("pid_splits.json")
        splits = read_json(splits_file)
        if not isinstance(splits, dict) or not isinstance(splits.get(split), list):
            known = ", ".join(splits) if isinstance(splits, dict) else "none"
            raise ConfigError(f"{splits_file} has no split {split!r}: its splits are {known}")
        rows = splits[split]

    def of_row(row: object) -> dict:
        if from_llava:
            id = str(field(row, "id", (str, int)))
            turn = next(iter(field(row, "conversations", list)), None)
            text = field(turn, "value", str).replace(IMAGE_TOKEN, "").strip()
            images = [] if row.get("image") is None else [field(row, "image", str)]
            problem = matching(problems, id, file)
        else:
            id, problem = str(row), matching(problems, str(row), file)
            text, name = _problem_text(problem), problem.get("image")
            images = [] if name is None else [(f"{id}/{name}", f"{split}/{id}/{name}")]
        return {**problem, "question_id": id, "context": bool(problem.get("image")), "image": images,
                ASKED: text + LETTER_ONLY}  # fmt: skip

    return convert_records(path, rows, of_row)


def _problem_text(problem: dict) -> str:
    """Format context, question and options like LLaVA (CQM-A of its convert_sqa_to_llava.py)."""
    options = " ".join(f"({letter}) {text}" for letter, text in zip(LETTERS, field(problem, "choices", list)))
    context = problem.get("hint") or "N/A"
    text = f"Context: {context}\nQuestion: {field(problem, 'question', str)}\nOptions: {options}"
    return text.replace("  ", " ").strip()


def _problem_kinds(problem: dict) -> tuple[str | None, ...]:
    """Return the columns of ScienceQA's table: subject, kind of context, grades."""
    subject = {"natural science": "NAT", "social science": "SOC", "language science": "LAN"}
    context = [name for name, key in (("TXT", "hint"), ("IMG", "context")) if problem.get(key)]
    return (subject.get(problem.get("subject")), *(context or ["NO"]), GRADES.get(problem.get("grade")))


def _mmbench_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read an MMBench TSV. It may contain several rounds of a question; later rounds use the first round's image."""

    def of_row(row: dict) -> dict:
        record = {key: cell for key, cell in row.items() if str(cell).strip().lower() not in ("", "nan", "none")}
        options = "\n".join(f"{letter}. {record[letter]}" for letter in "ABCD" if letter in record)
        hint = f"{record['hint']}\n" if "hint" in record else ""
        text = f"{hint}{record.get('question')}\n{options}{LETTER_ONLY}"
        return {**record, "index": _index(row["index"]), ASKED: text}

    return convert_records(given.data_path, benchmark.records(given), of_row)


def _index(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"has the index {short(text)}, expected a number") from None


SCIENCEQA = Benchmark(
    "ScienceQA",
    "choice",
    lambda record, options: [field(record, "answer", int), len(field(record, "choices", list))],
    _problem_kinds,
    prepare=_scienceqa_records,
    # LLaVA's evaluation recognizes questions with images by this mark in the answers' file.
    written=lambda asked, record: f"{IMAGE_TOKEN}\n{asked}" if record["image"] else asked,
)
MMBENCH = Benchmark(
    "MMBench",
    "circular",
    lambda record, options: [record["index"] % ROUND, letter_of(record, options), options],
    lambda record: (record.get("category"), record.get("l2-category")),
    keys=("index", "question", "A", "B", "image"),
    splits=("dev",),
    prepare=_mmbench_records,
    written=lambda asked, record: asked.removesuffix(LETTER_ONLY),
    more=lambda record, options: {
        "round_id": record["index"] // ROUND,
        "options": list(options.values()),
        "option_char": list(options),
    },
)
