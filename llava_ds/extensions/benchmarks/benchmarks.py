"""Declare the benchmarks with one table of questions: their records, prompts, groups and references.

Prompts are taken from LLaVA-1.5's scripts and lmms-eval. Supported files are the benchmarks' own releases, the Hugging
Face hub's parquet files, and VLMEvalKit's TSVs.
"""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.images.headers import image_size
from llava_ds.data.sample import Media
from llava_ds.data.sources.options import short
from llava_ds.extensions.benchmarks.answer_rules import FORMULAS
from llava_ds.extensions.benchmarks.benchmark import (
    ANSWER,
    ASKED,
    LETTER_ONLY,
    QUESTION,
    SHORT,
    Benchmark,
    Options,
    letter_of,
    text_of,
    texts_of,
    value_of,
    yes_or_no,
)
from llava_ds.extensions.benchmarks.benchmark_files import (
    Given,
    complete,
    convert_records,
    field,
    matching,
    read_json,
    read_text,
    records_in,
)
from llava_ds.extensions.benchmarks.benchmark_tables import is_table, listed

# --- MMMU -------------------------------------------------------------------------------------------------------------

DISCIPLINES = {
    "Art and Design": "Art, Art_Theory, Design, Music",
    "Business": "Accounting, Economics, Finance, Manage, Marketing",
    "Science": "Biology, Chemistry, Geography, Math, Physics",
    "Health and Medicine": "Basic_Medical_Science, Clinical_Medicine, Diagnostics_and_Laboratory_Medicine, Pharmacy, "
    "Public_Health",
    "Humanities and Social Science": "History, Literature, Sociology, Psychology",
    "Tech and Engineering": "Agriculture, Architecture_and_Engineering, Computer_Science, Electronics, "
    "Energy_and_Power, Materials, Mechanical_Engineering",
}
_DISCIPLINE_OF = {subject: name for name, subjects in DISCIPLINES.items() for subject in subjects.split(", ")}


def _mmmu_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Return the questions of the validation split. Files may contain other splits."""
    records = [each for each in benchmark.records(given) if str(value_of(each, "split|id")).startswith("validation")]
    if not records:
        raise DataError(
            f"{given.data_path} has no questions of MMMU's validation split, expected ids like validation_…"
        )
    return records


def _mmmu_kinds(record: dict) -> tuple[str, ...]:
    subject = re.sub(r"^[a-z]+_(.+)_\d+$", r"\1", str(record["id"]))
    return (subject, _DISCIPLINE_OF[subject]) if subject in _DISCIPLINE_OF else (subject,)


# --- ChartQA ----------------------------------------------------------------------------------------------------------


def _chartqa_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read ChartQA from a table, test_human.json, test_augmented.json, or a folder of these two files."""
    path = Path(complete(given)).expanduser()
    if is_table(given.data_path) or not path.exists():
        return benchmark.records(given)
    files = [path] if path.is_file() else sorted(path.glob("test_*.json"))
    if not files:
        raise ConfigError(f"{path} contains no parquet files and no test_human.json and test_augmented.json")
    records = []
    for file in files:
        found = benchmark.records(replace(given, data_path=str(file)))
        records += [{**each, "type": file.stem} for each in found]
    return records


def _chartqa_kinds(record: dict) -> tuple[str, ...]:
    written_by = record.get("human_or_machine")
    name = ("human", "augmented")[written_by] if written_by in (0, 1) else str(value_of(record, "type|split"))
    return tuple(kind for kind in ("human", "augmented") if kind in name)


# --- SEED-Bench -------------------------------------------------------------------------------------------------------

DIMENSIONS = ("Scene Understanding", "Instance Identity", "Instance Attributes", "Instance Location") + (
    "Instances Counting", "Spatial Relation", "Instance Interaction", "Visual Reasoning", "Text Understanding",
)  # fmt: skip


def _seed_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read image questions from a table, SEED-Bench.json, or LLaVA's question file merged with SEED-Bench.json."""
    records = benchmark.paired(given, "SEED-Bench.json", lambda record: str(record.get("question_id")))
    records = [{"image": each.get("data_id"), **each} for each in records]
    return [each for each in records if each.get("data_type", "image") == "image"]


def _seed_kinds(record: dict) -> tuple[str, ...]:
    number = record.get("question_type_id")
    known = isinstance(number, int) and 1 <= number <= len(DIMENSIONS)
    return (DIMENSIONS[number - 1],) if known else tuple(filter(None, [record.get("category")]))


# --- MME --------------------------------------------------------------------------------------------------------------

COGNITION = ("code_reasoning", "commonsense_reasoning", "numerical_calculation", "text_translation")
PERCEPTION = ("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR")
YES_OR_NO = "Please answer yes or no."  # MME's own prompt; LLaVA's prompt requests a word or phrase instead


def _mme_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read two questions per image, from a table, the official folder, or LLaVA's question file merged with it."""
    path = given.data_path
    if path.endswith(".jsonl") or (Path(path).expanduser().is_dir() and not is_table(path)):
        records = benchmark.paired(given, "the folder of MME_Benchmark_release_version", _mme_key, _mme_folder)
    else:
        found = benchmark.records(given)
        records = [{**each, "pair": value_of(each, "image_path|question_id|image")} for each in found]
    records = [{**each, "question": str(each.get("question")).replace(YES_OR_NO, "").strip()} for each in records]
    counts = Counter((record.get("category"), str(record["pair"])) for record in records)
    for (category, pair), count in counts.items():
        if count != 2:
            raise DataError(f"{path} has {count} questions about {category}'s image {short(pair)}, expected two")
    return records


def _mme_folder(path: str) -> list[dict]:
    """Read MME_Benchmark_release_version: a folder per category, with a text file for every image."""
    root = Path(path).expanduser()
    records = []
    for file in sorted(file for name in (*PERCEPTION, *COGNITION) for file in (root / name).rglob("*.txt")):
        category = file.relative_to(root).parts[0]
        for line in filter(str.strip, read_text(file).split("\n")):
            question, tab, answer = line.rstrip().rpartition("\t")
            if not tab:
                raise DataError(f"{file}: {short(line)} is not an MME question, expected a question, a tab, yes or no")
            folders = [file.parent, file.parent.parent / "images"]
            images = [place / f"{file.stem}{end}" for place in folders for end in (".jpg", ".png", ".jpeg")]
            image = next((each for each in images if each.is_file()), images[0]).relative_to(root)
            records.append({"question": question, "answer": answer, "category": category, "pair": file.stem,
                            "id": f"{category}/{image.name}", "image": str(image)})  # fmt: skip
    if not records:
        raise ConfigError(f"{path} contains no folder named like an MME category: {', '.join(PERCEPTION)}")
    return records


def _mme_key(record: dict) -> tuple[str, str, str]:
    """Return a record's (category, image, question), read from MME's or LLaVA's fields."""
    question = str(record.get(ASKED, record.get("question"))).replace(SHORT.strip(), "").replace(YES_OR_NO, "")
    image = str(record.get("question_id", record.get("id")))
    return field(record, "category", str), Path(image).stem, " ".join(question.split())


def _mme_kinds(record: dict) -> tuple[str, ...]:
    category = field(record, "category", str)
    if category not in (*PERCEPTION, *COGNITION):
        raise DataError(f"has the category {short(category)}, expected one of {', '.join((*PERCEPTION, *COGNITION))}")
    return (category, "perception" if category in PERCEPTION else "cognition")


# --- MathVista --------------------------------------------------------------------------------------------------------

_HINTS = {
    "integer": "\nAnswer the question using a single integer number.",
    "float 1": "\nAnswer the question using a single floating-point number with one decimal place.",
    "float 2": "\nAnswer the question using a single floating-point number with two decimal places.",
    "list": "\nAnswer the question using a Python list.",
}


def _mathvista_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read records. Merges their metadata, adds units to questions, and removes choices from free-form questions."""

    def prepared(record: dict) -> dict:
        metadata = record.get("metadata")
        record = {**record, **(metadata if isinstance(metadata, dict) else {})}
        if record.get("question_type") != "multi_choice":
            record["choices"] = None
        question = text_of(record, "question")
        if question.startswith("Hint:"):
            record[ASKED] = question  # VLMEvalKit's question already contains choices and unit
        elif record.get("unit"):
            record["question"] = f"{question} (Unit: {record['unit']})"
        return record

    return convert_records(given.data_path, benchmark.records(given), prepared)


def _mathvista_hint(record: dict, options: Options) -> str:
    kind = record["answer_type"]
    return LETTER_ONLY if options else _HINTS.get(f"float {_precision(record)}" if kind == "float" else kind, SHORT)


def _mathvista_reference(record: dict, options: Options) -> dict[str, object]:
    kind = field(record, "answer_type", str)
    if kind not in ("integer", "float", "list", "text"):
        raise DataError(f"has the answer_type {short(kind)}, expected integer, float, list or text")
    answer, choices = str(record["answer"]), list(options.values())
    if choices and answer not in choices:
        raise DataError(f"has the answer {short(answer)}, expected one of its choices {short(choices)}")
    return {"answer": answer, "choices": choices, "answer_type": kind, "precision": _precision(record)}


def _precision(record: dict) -> int:
    """Return the number of decimals of the answer: from the record, else from the answer itself."""
    try:
        return int(float(record.get("precision") or len(str(record["answer"]).partition(".")[2])))
    except ValueError:
        raise DataError(f"has {short(record['precision'])} under 'precision', expected a number") from None


# --- RefCOCO ----------------------------------------------------------------------------------------------------------

SPLITS = ("val", "testA", "testB", "test")
REGION = "Please provide the bounding box coordinate of the region this sentence describes: "  # LLaVA-1.5's
_EXPRESSION = "sent|expression|answer|caption"


def _refcoco_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read JSONL, MDETR's JSON or parquet files. Returns a record per expression, with its box's corners in pixels."""
    path = given.data_path
    if not is_table(path) and not path.endswith(".jsonl"):
        return _mdetr_records(benchmark, complete(given))

    def of_expressions(record: dict) -> list[dict]:
        box, size = _box(record), [record.get("width"), record.get("height")]
        if is_table(path):
            box = _corners(box)
        split = value_of(record, "split|dataset_name|file") or Path(path).stem
        texts = listed(value_of(record, _EXPRESSION))
        return [{**record, "question": f"{REGION}{text}", "box": box, "size": size, "split": split} for text in texts]

    return [each for found in convert_records(path, benchmark.records(given), of_expressions) for each in found]


def _mdetr_records(benchmark: Benchmark, path: str) -> list[dict]:
    """Read a file like finetune_refcoco_val.json: one image entry per expression (the caption), and boxes by image."""
    what, content = f"{benchmark.what}'s questions in MDETR's layout", read_json(path)
    keys = ("id", "file_name", "caption", "width", "height")
    images = records_in(path, what, content, keys, "images")
    boxes = {
        each.get("image_id"): each for each in records_in(path, what, content, ("image_id", "bbox"), "annotations")
    }

    def of_image(image: dict) -> dict:
        id, name, text, *size = (field(image, key, kind) for key, kind in zip(keys, ((int, str), str, str, int, int)))
        box = _corners(_box(matching(boxes, id, path)))
        return {
            "id": id,
            "image": name,
            "question": f"{REGION}{text}",
            "box": box,
            "size": size,
            "split": Path(path).stem,
        }

    return convert_records(path, images, of_image)


def _box(record: dict) -> list[float]:
    box = field(record, "bbox", list)
    if len(box) != 4 or not all(isinstance(side, (int, float)) for side in box):
        raise DataError(f"has {short(box)} under 'bbox', expected four numbers")
    return box


def _corners(box: list[float]) -> list[float]:
    """Convert left, top, width, height to left, top, right, bottom."""
    left, top, width, height = box
    return [left, top, left + width, top + height]


def _refcoco_reference(record: dict, options: Options) -> dict[str, object]:
    """Return the box and the image's size. The size is read from the header if the table lacks it but has the image."""
    size, image = record["size"], record.get("image")
    if size == [None, None] and isinstance(image, Media):
        size = list(image_size(image.refs[0]))
    if not all(isinstance(side, int) and side > 0 for side in size):
        raise DataError(f"has {short(size)} as its image's width and height, expected two numbers")
    return {"answer": record["box"], "size": size}


def _refcoco_kinds(record: dict) -> tuple[str, ...]:
    """Return the split that is a word of the record's "split" field, often a file name."""
    words = re.split(r"[^A-Za-z]+", str(record["split"]))
    return tuple(split for split in SPLITS if split in words)[:1]


def _ocrbench_kinds(record: dict) -> tuple[str, ...]:
    kind = text_of(record, _OCRBENCH_TYPE)
    return (kind, "Text Recognition") if kind.endswith("Recognition") and kind != FORMULAS else (kind,)


_OCRBENCH_TYPE = "question_type|type|category"

BENCHMARKS = {
    "mmmu": Benchmark(
        "MMMU",
        "mmmu",
        lambda record, options: {
            "answer": letter_of(record, options) if options else texts_of(record),
            "options": options,
        },
        _mmmu_kinds,
        keys=("id", "question", "answer"),
        splits=("validation",),
        prepare=_mmmu_records,
    ),
    "mmstar": Benchmark(
        "MMStar",
        "leading_letter",
        letter_of,
        lambda record: (record.get("category"), record.get("l2_category")),
        ask=lambda record, options: LETTER_ONLY,  # some files include the options in the question
        splits=("val",),
    ),
    "docvqa": Benchmark(
        "DocVQA", "anls", texts_of, lambda record: (record.get("question_types"),), splits=("validation",)
    ),
    "infovqa": Benchmark(
        "InfographicVQA", "anls", texts_of, lambda record: (record.get("answer_type"),), splits=("validation",)
    ),
    "chartqa": Benchmark("ChartQA", "relaxed", texts_of, _chartqa_kinds, prepare=_chartqa_records),
    "ai2d": Benchmark("AI2D", "letter_alone", letter_of),
    "ocrbench": Benchmark(
        "OCRBench",
        "ocrbench",
        lambda record, options: {"answer": texts_of(record), "category": text_of(record, _OCRBENCH_TYPE)},
        _ocrbench_kinds,
        ask=lambda record, options: "",
        keys=(QUESTION, ANSWER, _OCRBENCH_TYPE),
    ),
    "mathvista": Benchmark(
        "MathVista",
        "mathvista",
        _mathvista_reference,
        lambda record: (record.get("task"), record.get("skills")),
        ask=_mathvista_hint,
        keys=("question", "answer", "answer_type"),
        splits=("testmini",),
        prepare=_mathvista_records,
    ),
    "seed": Benchmark("SEED-Bench", "first_character", letter_of, _seed_kinds, prepare=_seed_records),
    "mme": Benchmark(
        "MME",
        "mme",
        lambda record, options: {"answer": yes_or_no(record), "pair": [record["category"], str(record["pair"])]},
        _mme_kinds,
        keys=(QUESTION, ANSWER, "category"),
        prepare=_mme_records,
    ),
    "refcoco": Benchmark(
        "RefCOCO",
        "grounding",
        _refcoco_reference,
        _refcoco_kinds,
        ask=lambda record, options: "",
        keys=("bbox", _EXPRESSION),
        splits=SPLITS,
        prepare=_refcoco_records,
    ),
}
