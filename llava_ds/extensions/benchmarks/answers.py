"""Store answers on disk as they arrive, resume from them, and keep evaluations separate.

OUTPUT.json holds the scores; the answers, in the questions' order, are in OUTPUT.jsonl, OUTPUT.without_picture.jsonl
and OUTPUT.blank_image.jsonl. During the evaluation, OUTPUT.partial/ holds identity.json and each rank's answers per
column.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import Media
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.benchmarks.scores import Scored, shown_reference
from llava_ds.extensions.infer.generate import Answer
from llava_ds.files.reading import read_json
from llava_ds.files.writing import write_whole
from llava_ds.runtime.ranks import Ranks, barrier, broadcast_from_first, gather, print_first

IDENTITY = "identity.json"
MAIN_COLUMN = "with picture"  # its answers are in OUTPUT.jsonl
WITHOUT_PICTURE = "without picture"
BLANK_IMAGE = "blank image"
COLUMNS = (MAIN_COLUMN, BLANK_IMAGE, WITHOUT_PICTURE)
PART = re.compile(r"\w+-(?P<attempt>\d+)-\d+\.jsonl")  # column, attempt and rank


@dataclass(frozen=True)
class Store:
    """The files of one evaluation. identity: all values that must be equal for stored answers to be reused."""

    output: Path
    identity: dict[str, object]

    @property
    def partial(self) -> Path:
        return self.output.with_suffix(".partial")

    def answers_file(self, column: str) -> Path:
        """Return the final path of a column's answers."""
        name = "" if column == MAIN_COLUMN else f".{column.replace(' ', '_')}"
        return self.output.with_suffix(f"{name}.jsonl")


def open_store(output: str, identity: dict[str, object], inputs: Iterable[str], ranks: Ranks) -> tuple[Store, int]:
    """Open the files of an evaluation. Returns the store, and the number of this attempt. Collective.

    Renames files of an evaluation with another identity, with a message. inputs: files that the evaluation reads.
    Raises ConfigError if an output would overwrite an input.
    """
    store = Store(Path(output).expanduser(), json.loads(json.dumps(identity)))
    if store.output.suffix != ".json":
        raise ConfigError(f"--output {output}: expected a name that ends in .json")
    own = {file.resolve() for file in (store.output, *map(store.answers_file, COLUMNS))}
    if taken := [path for path in inputs if Path(path).expanduser().resolve() in own]:
        raise ConfigError(f"--output {output} would overwrite the input {taken[0]}: give another name")

    def begin() -> int:
        try:
            store.output.parent.mkdir(parents=True, exist_ok=True)
            _set_aside_others(store)
            _begin_parts(store)
            parts = (PART.fullmatch(file.name) for file in store.partial.iterdir())
            return 1 + max((int(part["attempt"]) for part in parts if part is not None), default=0)
        except OSError as error:
            raise ConfigError(f"--output {output} can't be written ({error.strerror}): name another") from error

    attempt = broadcast_from_first(ranks, begin)
    if ranks.local_rank == 0 and _json(store.partial / IDENTITY) != store.identity:
        shutil.rmtree(store.partial, ignore_errors=True)  # on a machine without rank 0's disk
        _begin_parts(store)
    barrier(ranks)
    return store, attempt


def _begin_parts(store: Store) -> None:
    store.partial.mkdir(parents=True, exist_ok=True)
    write_whole(store.partial / IDENTITY, json.dumps(store.identity, indent=1) + "\n")


def _set_aside_others(store: Store) -> None:
    """Rename the files that belong to another evaluation."""
    kept = _json(store.partial / IDENTITY)
    if store.partial.is_dir() and kept != store.identity:
        _move(store.partial, _differences(kept, store.identity))
    finished = [file for file in [store.output, *map(store.answers_file, COLUMNS)] if file.exists()]
    ended = (_json(store.output) or {}).get("identity")
    broken_off = ended is None and kept == store.identity  # killed after the answers and before the scores were written
    if finished and ended != store.identity and not broken_off:
        for file in finished:
            _move(file, _differences(ended, store.identity))


def _differences(before: object, now: dict[str, object]) -> str:
    if not isinstance(before, dict):
        return "it has no identity"
    names = [name for name in now if before.get(name) != now[name]]
    return "another " + ", ".join(names)


def _move(path: Path, why: str) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.previous-{number}")).exists():
        number += 1
    path.rename(aside)
    print_first(f"{path} belongs to another evaluation ({why}): moved to {aside.name}")


def answered(store: Store | None, column: str, num_questions: int, ranks: Ranks) -> dict[int, Answer]:
    """Return the answers from earlier attempts by question number, on every rank. Collective."""
    found: dict[int, Answer] = {}
    if store is not None:
        file = store.answers_file(column)
        if file.is_file():
            rows = _rows(file, _is_answer)
            if len(rows) == num_questions:
                found = {number: _answer(row) for number, row in enumerate(rows)}
        for part in sorted(store.partial.glob(f"{_spelled(column)}-*.jsonl")):
            for row in _rows(part, lambda row: row["number"] in range(num_questions) and _is_answer(row)):
                found.setdefault(row["number"], _answer(row))
    # Gather, because machines without a shared disk have different parts.
    return {number: answer for each in reversed(gather(found, ranks)) for number, answer in each.items()}


def _is_answer(row: dict) -> bool:
    return (
        isinstance(row["text"], str) and isinstance(row["logprob"], (int, float)) and isinstance(row["num_tokens"], int)
    )


def _answer(row: dict) -> Answer:
    return Answer(row["text"], float(row["logprob"]), row["num_tokens"])


class Part:
    """This rank's answers for one column, in memory, and in a file if there is a store.

    Every attempt starts a new file, because the last line of a killed attempt may be incomplete.
    """

    def __init__(self, store: Store | None, column: str, attempt: int, ranks: Ranks) -> None:
        self.answers: dict[int, Answer] = {}
        self.path = store and store.partial / f"{_spelled(column)}-{attempt}-{ranks.rank}.jsonl"
        self.file: TextIO | None = None

    def keep(self, answers: dict[int, Answer]) -> None:
        """Store the answers of a batch, by question number, and append them to the file in one write."""
        self.answers |= answers
        if self.path is None:
            return
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # on a machine without rank 0's disk
            self.file = self.path.open("w", encoding="utf-8")
        rows = [json.dumps({"number": n, **asdict(each)}, ensure_ascii=False) + "\n" for n, each in answers.items()]
        self.file.write("".join(rows))
        self.file.flush()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def write_answers(store: Store, column: str, rows: list[dict[str, object]]) -> None:
    """Write a column's answers, one line per question, in the questions' order (answer_rows)."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_whole(store.answers_file(column), "".join(lines))


def write_scores(store: Store, scores: dict[str, object]) -> None:
    """Write OUTPUT.json and remove the partial files."""
    write_whole(store.output, json.dumps({**scores, "identity": store.identity}, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(store.partial)


def _spelled(column: str) -> str:
    return column.replace(" ", "_")


def _rows(file: Path, is_ours: Callable[[dict], bool]) -> list[dict]:
    """Return the rows of a file's complete lines. Reports and skips damaged lines, so their questions are repeated."""
    rows, lines = [], file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            if is_ours(row := json.loads(line)):
                rows.append(row)
    if damaged := len(lines) - len(rows):
        print_first(f"{file}: {damaged:,} of {len(lines):,} lines are damaged; their questions will be answered again")
    return rows


def _json(file: Path) -> dict | None:
    """Read a JSON file; None if it is missing or not written by us."""
    try:
        return read_json(file, dict)
    except (FileNotFoundError, DataError):
        return None


def answer_rows(
    questions: list[Question], answers: list[Answer], scored: Scored, metric: str, model: str
) -> list[dict[str, object]]:
    """Build the rows of OUTPUT.jsonl in the questions' order; docs/benchmarks.md lists their keys.

    LLaVA's scripts and the benchmarks' servers read the names question_id, prompt, text and model_id.
    """
    return [
        {
            "question_id": question.id,
            "prompt": question.asked,
            "text": answer.text,
            "model_id": model,
            "kinds": list(question.kinds),
            "reference": shown_reference(metric, question.reference),
            "score": float(score),
            "logprob": answer.logprob,
            "num_tokens": answer.num_tokens,
            "images": [_place(image) for image in question.prompt.images],
            **question.more,
        }
        for question, answer, score in zip(questions, answers, scored.per_question, strict=True)
    ]


def _place(image: str | Media) -> str | dict[str, object]:
    """Return the path of an image or video, or a FileRef's fields for a slice of a file. For frames, of the first."""
    if isinstance(image, str):
        return image
    ref = image.refs[0]
    return ref.path if ref.num_bytes < 0 else asdict(ref)
