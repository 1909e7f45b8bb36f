"""Read VQAv2, TextVQA, GQA, POPE and COCO captions, from their own files or LLaVA's question files."""

from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.benchmarks.benchmark import (
    ASKED,
    LLAVA_KEYS,
    SHORT,
    Benchmark,
    texts_of,
    value_of,
    yes_or_no,
)
from llava_ds.extensions.benchmarks.benchmark_files import (
    Given,
    annotations_of,
    complete,
    convert_records,
    field,
    matching,
    read_json,
    read_records,
    read_text,
    records_in,
)
from llava_ds.extensions.benchmarks.benchmark_tables import is_table, read_table

CAPTION = "Provide a one-sentence caption for the provided image."  # LLaVA-1.5's training prompt


def _vqav2_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read v2_OpenEnded_…_questions.json or llava_vqav2_….jsonl, with v2_…_annotations.json."""
    path = given.data_path
    rows = read_table(path, "VQAv2's questions", ("question_id", "text|image_id", "text|question"), (), given.cache_dir)
    file = annotations_of(given, "VQAv2", "v2_mscoco_val2014_annotations.json (the test split has none)")
    content = read_json(file)
    annotated = records_in(file, "VQAv2's annotations", content, ("question_id", "answers"), "annotations")
    answers = {each.get("question_id"): each for each in annotated}

    def of_row(row: dict) -> dict:
        answer = matching(answers, field(row, "question_id", int), file)
        people = [field(each, "answer", str) for each in field(answer, "answers", list)]
        row = {**row, "answers": people, "kind": answer.get("answer_type")}
        if ASKED in row:
            return row
        name = f"{field(row, 'image_id', int):012d}.jpg"
        images = [(f"COCO_{content.get('data_subtype')}_{name}", name)]
        return {**row, "image": images, ASKED: field(row, "question", str) + SHORT}

    return convert_records(path, rows, of_row)


def _textvqa_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read TextVQA_0.5.1_val.json, alone or with llava_textvqa_val_v051_ocr.jsonl (its texts include OCR tokens)."""

    def key(record: dict) -> tuple[str, str]:
        """Return a record's image and text, the fields that LLaVA's files also contain."""
        if "image_id" in record:
            return str(record["image_id"]), str(record.get("question")).lower()
        # The question is on the first line, or on the second after a line of OCR tokens.
        lines = field(record, ASKED, str).split("\n")
        line = 1 if lines[0].startswith("Reference OCR token:") and len(lines) > 1 else 0
        return str(record.get("question_id")), lines[line].lower()

    def of_record(record: dict) -> dict:
        id, question = field(record, "image_id", str), field(record, "question", str)
        return {"question_id": id, "image": f"{id}.jpg", ASKED: question + SHORT, **record}

    records = benchmark.paired(given, "TextVQA_0.5.1_val.json", key)
    return convert_records(given.data_path, records, of_record)


def _gqa_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read testdev_balanced_questions.json, or llava_gqa_testdev_balanced.jsonl merged with it."""

    def of_record(record: dict) -> dict:
        image, question = field(record, "imageId", (str, int)), field(record, "question", str)
        return {"image": f"{image}.jpg", ASKED: question + SHORT, **record}

    file = "testdev_balanced_questions.json"
    records = benchmark.paired(given, file, lambda record: str(value_of(record, "question_id|id")))
    # The official accuracy only counts the balanced questions.
    balanced = [each for each in records if ASKED in each or each.get("isBalanced") is not False]
    return convert_records(given.data_path, balanced, of_record)


def _gqa_kinds(record: dict) -> tuple[str, ...]:
    types = record.get("types")
    if not isinstance(types, dict) or "structural" not in types:
        return ()
    named = [f"{name} {types[name]}" for name in ("structural", "semantic") if name in types]
    return ("open" if types["structural"] == "query" else "binary", *named)


def _pope_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read a table, coco_pope_*.json (a file or a folder), or llava_pope_test.jsonl merged with coco_pope_*.json."""
    path = given.data_path
    if is_table(path):
        return benchmark.records(given)
    from_llava = path.endswith(".jsonl")
    labels = annotations_of(given, "POPE", "the folder of coco_pope_*.json") if from_llava else complete(given)
    # Lines by category: adversarial, popular or random.
    labelled = {file.stem.split("_pope_")[-1]: _label_lines(file) for file in _label_files(labels)}
    rows = [{**line, "category": kind} for kind, lines in labelled.items() for line in lines]
    if from_llava:
        rows = read_records(path, "POPE's questions in LLaVA's layout", (*LLAVA_KEYS, "category"))
    for kind, lines in labelled.items():  # matched by order
        count = sum(row.get("category") == kind for row in rows)
        if count != len(lines):
            raise DataError(f"{path} has {count:,} questions of the category {kind!r}, but {labels} has {len(lines):,}")
    if unknown := {str(row.get("category")) for row in rows} - set(labelled):
        raise DataError(f"{path} has the categories {', '.join(sorted(unknown))}, but {labels} has no file for them")
    remaining = {kind: iter(lines) for kind, lines in labelled.items()}

    def of_row(row: dict) -> dict:
        name, line = field(row, "image", str), next(remaining[row["category"]])
        if name != line.get("image"):
            found = f"{name!r}, but the labels have {line.get('image')!r}"
            raise DataError(f"is about {found}: their order differs")
        text = field(row, ASKED, str) + ("" if from_llava else SHORT)
        return {**row, "label": field(line, "label", str), ASKED: text}

    return convert_records(path, rows, of_row)


def _label_files(path: str) -> list[Path]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [folder]
    files = sorted(folder.glob("*_pope_*.json"))
    if not files:
        raise ConfigError(f"{path} contains no file named like coco_pope_random.json")
    return files


def _label_lines(file: Path) -> list[dict]:
    """Read a label file. It contains JSONL although its name ends in .json."""
    what, keys = "POPE's questions", ("question_id", "image", ASKED, "label")
    if read_text(file).lstrip().startswith("{"):
        return read_records(file, what, keys)
    return records_in(file, what, read_json(file), keys)


def _caption_records(benchmark: Benchmark, given: Given) -> list[dict]:
    """Read captions_val2014.json or a file like it, as one question per image, with all captions as references."""
    path, what = complete(given), "captions in COCO's layout"
    content = read_json(path)
    images = records_in(path, what, content, ("id", "file_name"), "images")
    captions: dict[object, list[str]] = {}
    for each in records_in(path, what, content, ("image_id", "caption"), "annotations"):
        if isinstance(each.get("caption"), str):
            captions.setdefault(each.get("image_id"), []).append(each["caption"])

    def of_image(image: dict) -> dict:
        id = field(image, "id", (int, str))
        if id not in captions:
            raise DataError(f"is the image {id}, but it has no caption")
        return {"id": id, "image": field(image, "file_name", str), ASKED: CAPTION, "answers": captions[id]}

    return convert_records(path, images, of_image)


VQAV2 = Benchmark("VQAv2", "vqa", texts_of, lambda record: (record["kind"],), prepare=_vqav2_records)
TEXTVQA = Benchmark("TextVQA", "textvqa", texts_of, keys=("image_id", "question", "answers"), prepare=_textvqa_records)
GQA = Benchmark(
    "GQA",
    "gqa",
    lambda record, options: field(record, "answer", str),
    _gqa_kinds,
    keys=("imageId", "question", "answer"),
    prepare=_gqa_records,
)
POPE = Benchmark(
    "POPE",
    "yes_no",
    lambda record, options: yes_or_no(record),
    lambda record: (record.get("category"),),
    prepare=_pope_records,
)
CAPTIONS = Benchmark("captions", "caption", texts_of, prepare=_caption_records)
