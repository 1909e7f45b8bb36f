"""VQAv2, TextVQA, GQA and POPE: files as they are downloaded, and the question files of LLaVA's evaluation."""

from pathlib import Path

from llava_ds.constants import ConfigError, DataError
from llava_ds.evaluation.benchmark import LLAVA_KEYS, SHORT
from llava_ds.evaluation.benchmark_files import (
    Given,
    ImageFolder,
    annotations_of,
    check_first,
    complete,
    convert_records,
    field,
    held_under,
    matching,
    read_json,
    read_records,
    read_text,
)
from llava_ds.evaluation.benchmark_tables import is_table
from llava_ds.evaluation.benchmarks import POPE_TABLE
from llava_ds.evaluation.question import Question, about

ID = (str, int)


def _is_jsonl(path: str) -> bool:
    return path.endswith(".jsonl")


def vqav2(given: Given) -> list[Question]:
    """v2_OpenEnded_…_questions.json or llava_vqav2_….jsonl, with v2_…_annotations.json."""
    path = given.data_path
    what = "VQAv2's questions"
    if _is_jsonl(path):
        records, image_set = read_records(path, f"{what} in LLaVA's layout", LLAVA_KEYS), None
    else:
        content = read_json(path)
        records = held_under(path, what, content, "questions", ("question_id", "image_id", "question"))
        image_set = content.get("data_subtype")
    file = annotations_of(given, "VQAv2", "v2_mscoco_val2014_annotations.json (there is none for test)")
    what = "VQAv2's annotations"
    content = read_json(file)
    annotated = held_under(file, what, content, "annotations", ("question_id", "answers"))
    answers = {each.get("question_id"): each for each in annotated if isinstance(each, dict)}
    image_set = image_set or content.get("data_subtype")
    images = ImageFolder(given.image_folder)

    def make(record: dict) -> Question:
        id = field(record, "question_id", int)
        answer = matching(answers, id, file)
        people = [field(each, "answer", str) for each in field(answer, "answers", list)]
        if not people:
            raise DataError(f"is the question {id}, to which {file} has no answer")
        kinds = (answer["answer_type"],) if isinstance(answer.get("answer_type"), str) else ()
        if _is_jsonl(path):
            image, text = images(field(record, "image", str)), field(record, "text", str)
        else:
            name = f"{field(record, 'image_id', int):012d}.jpg"
            image, text = images(f"COCO_{image_set}_{name}", name), field(record, "question", str) + SHORT
        return about(id, image, text, people, kinds=kinds)

    return convert_records(path, records, make)


def textvqa(given: Given) -> list[Question]:
    """TextVQA_0.5.1_val.json, by itself or with llava_textvqa_val_v051_ocr.jsonl, which has OCR tokens in its texts."""
    path, what = given.data_path, "TextVQA's annotations"
    from_llava = _is_jsonl(path)
    file = annotations_of(given, "TextVQA", "TextVQA_0.5.1_val.json") if from_llava else complete(given)
    annotated = held_under(file, what, read_json(file), "data", ("image_id", "question", "answers"))
    # By image and text, which is what LLaVA's files have of a question.
    answers = {(a.get("image_id"), str(a.get("question")).lower()): a for a in annotated if isinstance(a, dict)}
    records = read_records(path, "TextVQA's questions in LLaVA's layout", LLAVA_KEYS) if from_llava else annotated
    images = ImageFolder(given.image_folder)

    def make(record: dict) -> Question:
        if from_llava:
            id, text, name = (field(record, key, str) for key in ("question_id", "text", "image"))
            # The question stands alone on the first line, or on the second, behind a line of OCR tokens.
            lines = text.split("\n")
            line = 1 if lines[0].startswith("Reference OCR token:") and len(lines) > 1 else 0
            annotation = matching(answers, (id, lines[line].lower()), file)
        else:
            id, name = record.get("question_id", record.get("image_id")), f"{field(record, 'image_id', str)}.jpg"
            text, annotation = field(record, "question", str) + SHORT, record
        people = field(annotation, "answers", list)
        if not people or not all(isinstance(each, str) for each in people):
            raise DataError(f"has no answers by people in {file}: is it the test split?")
        return about(id, images(name), text, people)

    return convert_records(path, records, make)


def gqa(given: Given) -> list[Question]:
    """testdev_balanced_questions.json, by itself or with llava_gqa_testdev_balanced.jsonl."""
    path, what = given.data_path, "GQA's questions"
    from_llava = _is_jsonl(path)
    file = annotations_of(given, "GQA", "testdev_balanced_questions.json") if from_llava else complete(given)
    content = read_json(file)
    keys = ("imageId", "question", "answer")
    if not isinstance(content, dict):
        raise DataError(f"{file} is not {what}: expected an object of questions by their ids, with {', '.join(keys)}")
    check_first(file, what, list(content.values()), keys)
    if from_llava:
        records: list = read_records(path, f"{what} in LLaVA's layout", LLAVA_KEYS)
    else:
        # The official accuracy is over the balanced questions only.
        records = [
            (id, each)
            for id, each in content.items()
            if not isinstance(each, dict) or each.get("isBalanced") is not False
        ]
    images = ImageFolder(given.image_folder)

    def make(record: object) -> Question:
        if from_llava:
            id = str(field(record, "question_id", ID))
            annotation = matching(content, id, file)
            image, text = images(field(record, "image", str)), field(record, "text", str)
        else:
            id, annotation = record
            image = images(f"{field(annotation, 'imageId', ID)}.jpg")
            text = field(annotation, "question", str) + SHORT
        types = annotation.get("types")
        kinds: tuple[str, ...] = ()
        if isinstance(types, dict) and "structural" in types:
            kinds = ("open" if types["structural"] == "query" else "binary",)
            kinds += tuple(f"{name} {types[name]}" for name in ("structural", "semantic") if name in types)
        return about(id, image, text, field(annotation, "answer", str), kinds=kinds)

    return convert_records(path, records, make)


def pope(given: Given) -> list[Question]:
    """coco_pope_*.json, one file or a folder of them, by themselves or with llava_pope_test.jsonl; or one table."""
    path, what = given.data_path, "POPE's questions"
    if is_table(path):
        return POPE_TABLE.read(given)
    from_llava = _is_jsonl(path)
    labels = annotations_of(given, "POPE", "the folder of coco_pope_*.json") if from_llava else complete(given)
    # By category: adversarial, popular or random.
    labelled = {file.stem.split("_pope_")[-1]: _lines(file) for file in _label_files(labels)}
    images = ImageFolder(given.image_folder)
    if not from_llava:
        records = [(kind, each, each) for kind, lines in labelled.items() for each in lines]
        return convert_records(path, records, lambda record: _pope_question(*record, images, SHORT))
    rows = read_records(path, f"{what} in LLaVA's layout", (*LLAVA_KEYS, "category"))
    remaining = {kind: iter(lines) for kind, lines in labelled.items()}
    for kind, lines in labelled.items():  # they belong together by their order
        asked = sum(row.get("category") == kind for row in rows)
        if asked != len(lines):
            raise DataError(f"{path} asks {asked:,} questions of the category {kind!r}, {labels} has {len(lines):,}")
    if unknown := {str(row.get("category")) for row in rows} - set(labelled):
        raise DataError(f"{path} has the categories {', '.join(sorted(unknown))}, of which {labels} has no file")
    paired = [(row["category"], row, next(remaining[row["category"]])) for row in rows]
    return convert_records(path, paired, lambda record: _pope_question(*record, images, ""))


def _pope_question(kind: str, asked: dict, labelled: dict, images: ImageFolder, suffix: str) -> Question:
    label = field(labelled, "label", str)
    if label not in ("yes", "no"):
        raise DataError(f"has the label {label!r}, expected yes or no")
    name = field(asked, "image", str)
    if name != labelled.get("image"):
        raise DataError(
            f"asks about {name!r} where the labels have {labelled.get('image')!r}: they are not in one order"
        )
    text = field(asked, "text", str) + suffix
    return about(field(asked, "question_id", ID), images(name), text, label, kinds=(kind,))


def _label_files(path: str) -> list[Path]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [folder]
    files = sorted(folder.glob("*_pope_*.json"))
    if not files:
        raise ConfigError(f"{path} holds no file that is called like coco_pope_random.json")
    return files


def _lines(file: Path) -> list[dict]:
    """The lines of a label file, which is JSONL for all its name."""
    keys = ("question_id", "image", "text", "label")
    text = read_text(file).strip()
    if text.startswith("["):
        records = read_json(file)
        check_first(file, "POPE's questions", records, keys)
        return records
    if not text.startswith("{"):
        raise DataError(f"{file} is not POPE's questions: expected a JSON object with {', '.join(keys)} on every line")
    return read_records(file, "POPE's questions", keys)
