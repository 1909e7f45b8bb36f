"""Benchmarks' tables in every layout that people have become the same questions, and run/evaluate.py scores them."""

import base64
import io
import json
from pathlib import Path
from unittest.mock import ANY

import pyarrow
import pyarrow.parquet
import pytest
from exporting import export_toy
from launching import command_line, run_script
from PIL import Image

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data.images.decode import load_image
from llava_ds.extensions.benchmarks import asking
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.benchmarks import BENCHMARKS
from llava_ds.extensions.benchmarks.eval_tasks import read_eval_tasks
from llava_ds.extensions.benchmarks.question import Question
from llava_ds.extensions.benchmarks.task_names import TASK_NAMES
from llava_ds.extensions.benchmarks.tasks import TASKS, read_questions
from llava_ds.extensions.infer.generate import Answer

LETTER = "\nAnswer with the option's letter from the given choices directly."
SHORT = "\nAnswer the question using a single word or phrase."
REGION = "Please provide the bounding box coordinate of the region this sentence describes: "


def png(width: int = 30) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, 20), "blue").save(buffer, "PNG")
    return buffer.getvalue()


def encoded(width: int = 30) -> str:
    return base64.b64encode(png(width)).decode()


def stored(width: int = 30) -> dict:
    """An image as parquet files of `datasets` have it."""
    return {"bytes": png(width), "path": None}


def write(folder: Path, name: str, content: object) -> str:
    """A file of a benchmark, by the ending of its name; bytes are an image."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".tsv"):
        columns = list(dict.fromkeys(key for row in content for key in row))
        lines = [columns, *([str(row.get(column, "")) for column in columns] for row in content)]
        path.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


MMMU = {"id": "validation_Art_Theory_3", "question_type": "multiple-choice", "answer": "B"}
MMMU_OPEN = {"id": "validation_Math_1", "question_type": "open", "question": "How long is <image 1>?"}
STAR = {"question": "Who?", "answer": "A", "category": "math", "l2_category": "geometry"}
VISTA = {"question_type": "multi_choice", "answer_type": "text", "answer": "12", "question": "How many?"}
VISTA_FLOAT = {"question_type": "free_form", "answer_type": "float", "answer": "1.5", "question": "How far?"}
SEED = {"choice_a": "one", "choice_b": "two", "choice_c": "three", "choice_d": "four", "question": "How many?"}
SEED_TEXT = f"How many?\nA. one\nB. two\nC. three\nD. four{LETTER}"
SEED_ROW = {"question_id": "7", "answer": "C", "data_type": "image", "question_type_id": 5, **SEED}
MME = [("Is it a cat? Please answer yes or no.", "Yes"), ("Is it a dog? Please answer yes or no.", "No")]
MME_TEXTS = [f"Is it a {what}?{SHORT}" for what in ("cat", "dog")]
MME_FILE = "".join(f"{question}\t{answer}\n" for question, answer in MME)

# Of a benchmark, the layouts of its files (contents by name; "data" and "annotations" name the flags' values, else the
# first file is --data_path), and the questions that each of them holds: text, reference, kinds, number of images.
LAYOUTS: dict[str, tuple[list[dict[str, object]], list[tuple]]] = {
    "mmmu": (
        [
            {"data": "mmmu",
             "mmmu/Art_Theory/validation-00000-of-00001.parquet": [
                 {**MMMU, "question": "Which of <image 1> and <image 2>?", "options": "['left', \"right's\"]",
                  "image_1": stored(), "image_2": stored(31), "image_3": stored(32)}],
             "mmmu/Art_Theory/test-00000-of-00001.parquet": [{**MMMU, "id": "test_Art_Theory_1", "answer": "?"}],
             "mmmu/Math/validation-00000-of-00001.parquet": [
                 {**MMMU_OPEN, "answer": "['3', '3 cm']", "options": "[]", "image_1": stored()}]},
            {"MMMU_DEV_VAL.tsv": [
                {**MMMU, "question": "Which of <image 1> and <image 2>?", "A": "left", "B": "right's",
                 "split": "validation", "image": [encoded(), encoded(31), encoded(32)]},
                {**MMMU_OPEN, "answer": "['3', '3 cm']", "split": "validation", "image": encoded()},
                {**MMMU_OPEN, "id": "dev_Math_1", "answer": "3", "split": "dev", "image": encoded()}]},
        ],
        [
            (f"Which of <image 1> and <image 2>?\nA. left\nB. right's{LETTER}",
             {"answer": "B", "options": {"A": "left", "B": "right's"}}, ("Art_Theory", "Art and Design"), 2),
            (f"How long is <image 1>?{SHORT}", {"answer": ["3", "3 cm"], "options": {}}, ("Math", "Science"), 1),
        ],
    ),
    "mmstar": (
        [
            {"mmstar/val-00000-of-00001.parquet": [{**STAR, "question": "Who?\nA. Ann\nB. Bo", "image": png()}]},
            {"MMStar.tsv": [{"index": 0, **STAR, "A": "Ann", "B": "Bo", "image": encoded()}]},
        ],
        [(f"Who?\nA. Ann\nB. Bo{LETTER}", "A", ("math", "geometry"), 1)],
    ),
    "docvqa": (
        [
            {"data": "docvqa",
             "docvqa/DocVQA/validation-00000-of-00002.parquet": [
                 {"questionId": "5", "question": "Date?", "answers": ["1/8/93", "1-8-93"], "image": stored()}],
             "docvqa/DocVQA/validation-00001-of-00002.parquet": [
                 {"questionId": "6", "question": "Who?", "answers": ["Ünal"], "image": stored()}]},
            {"DocVQA_VAL.tsv": [
                {"index": 5, "question": "Date?", "answer": ["1/8/93", "1-8-93"], "image": encoded()},
                {"index": 6, "question": "Who?", "answer": ["Ünal"], "image": 5}]},
            {"val_v1.0_withQT.json": {"dataset_name": "docvqa", "data": [
                {"questionId": 5, "question": "Date?", "answers": ["1/8/93", "1-8-93"], "image": "documents/a.png"},
                {"questionId": 6, "question": "Who?", "answers": ["Ünal"], "image": "documents/a.png"}]},
             "images/documents/a.png": png()},
        ],
        [(f"Date?{SHORT}", ["1/8/93", "1-8-93"], (), 1), (f"Who?{SHORT}", ["Ünal"], (), 1)],
    ),
    "infovqa": (
        [
            {"InfographicVQA/validation-00000-of-00001.parquet": [
                {"questionId": "5", "question": "Share?", "answers": ["12%"], "answer_type": ["non span"],
                 "image": stored()}]},
            {"infographicsVQA_val_v1.0_withQT.json": {"data": [
                {"questionId": 5, "question": "Share?", "answers": ["12%"], "answer_type": ["non span"],
                 "image_local_name": "20.jpeg"}]},
             "images/20.jpeg": png()},
        ],
        [(f"Share?{SHORT}", ["12%"], ("non span",), 1)],
    ),
    "chartqa": (
        [
            {"chartqa/data/test-00000-of-00001.parquet": [
                {"type": "augmented_test", "question": "Max?", "answer": "3", "image": stored()},
                {"type": "human_test", "question": "Min?", "answer": "1", "image": stored()}]},
            {"test-00000-of-00001.parquet": [
                {"human_or_machine": 1, "query": "Max?", "label": ["3"], "image": stored()},
                {"human_or_machine": 0, "query": "Min?", "label": ["1"], "image": stored()}]},
            {"ChartQA_TEST.tsv": [
                {"index": 1, "split": "test_augmented", "question": "Max?", "answer": "3", "image": encoded()},
                {"index": 2, "split": "test_human", "question": "Min?", "answer": "1", "image": encoded()}]},
            {"data": "test",
             "test/test_augmented.json": [{"imgname": "1.png", "query": "Max?", "label": "3"}],
             "test/test_human.json": [{"imgname": "1.png", "query": "Min?", "label": "1"}], "images/1.png": png()},
        ],
        [(f"Max?{SHORT}", ["3"], ("augmented",), 1), (f"Min?{SHORT}", ["1"], ("human",), 1)],
    ),
    "ai2d": (
        [
            {"ai2d/test-00000-of-00001.parquet": [
                {"question": "What eats?", "options": ["owl", "hen"], "answer": "1", "image": stored()}]},
            {"AI2D_TEST.tsv": [{"index": 3, "question": "What eats?", "A": "owl", "B": "hen", "answer": "B",
                                "image": encoded()}]},
        ],
        [(f"What eats?\nA. owl\nB. hen{LETTER}", "B", (), 1)],
    ),
    "ocrbench": (
        [
            {"test-00000-of-00001.parquet": [
                {"dataset": "IIIT5K", "question": "Word?", "question_type": "Regular Text Recognition",
                 "answer": ["Inn"], "image": stored()}]},
            {"OCRBench.tsv": [{"index": 3, "question": "Word?", "category": "Regular Text Recognition",
                               "answer": ["Inn"], "image": encoded()}]},
            {"OCRBench.json": [{"dataset_name": "IIIT5K", "id": 1, "question": "Word?", "answers": "Inn",
                                "type": "Regular Text Recognition", "image_path": "IIIT5K/1.png"}],
             "images/IIIT5K/1.png": png()},
        ],
        [("Word?", {"answer": ["Inn"], "category": "Regular Text Recognition"},
          ("Regular Text Recognition", "Text Recognition"), 1)],
    ),
    "mathvista": (
        [
            {"data/testmini-00000-of-00001.parquet": [
                {**VISTA, "pid": "1", "choices": ["12", "13"], "image": "images/1.jpg", "decoded_image": stored(),
                 "unit": None, "precision": None,
                 "metadata": {"task": "geometry problem solving", "skills": ["algebra", "geometry"]}},
                {**VISTA_FLOAT, "pid": "2", "unit": "m", "precision": 1.0, "image": "images/1.jpg",
                 "decoded_image": stored(), "metadata": {"task": "math word problem", "skills": []}}]},
            {"testmini.json": {
                "1": {**VISTA, "pid": "1", "choices": ["12", "13"], "image": "images/1.jpg", "metadata": {
                    "task": "geometry problem solving", "skills": ["algebra", "geometry"]}},
                "2": {**VISTA_FLOAT, "pid": "2", "unit": "m", "choices": None, "precision": 1, "image": "images/1.jpg",
                      "metadata": {"task": "math word problem"}}},
             "images/images/1.jpg": png()},
            {"MathVista_MINI.tsv": [
                {**VISTA, "index": 1, "choices": ["12", "13"], "task": "geometry problem solving",
                 "skills": ["algebra", "geometry"], "image": encoded()},
                {**VISTA_FLOAT, "index": 2, "question": "How far? (Unit: m)", "choices": "None", "image": encoded(),
                 "task": "math word problem", "skills": []}]},
        ],
        [
            (f"How many?\nA. 12\nB. 13{LETTER}",
             {"answer": "12", "choices": ["12", "13"], "answer_type": "text", "precision": 0},
             ("geometry problem solving", "algebra", "geometry"), 1),
            ("How far? (Unit: m)\nAnswer the question using a single floating-point number with one decimal place.",
             {"answer": "1.5", "choices": [], "answer_type": "float", "precision": 1}, ("math word problem",), 1),
        ],
    ),
    "seed": (
        [
            {"test-00000-of-00001.parquet": [
                {**SEED_ROW, "image": [stored()]}, {**SEED_ROW, "data_type": "video", "image": [stored(), stored()]}]},
            {"SEEDBench_IMG.tsv": [
                {"index": 7, "question": "How many?", "A": "one", "B": "two", "C": "three", "D": "four", "answer": "C",
                 "category": "Instances Counting", "image": encoded()}]},
            {"SEED-Bench.json": {"question_type": {"Instances Counting": 5}, "questions": [
                {**SEED_ROW, "data_id": "17_4"}, {**SEED_ROW, "data_type": "video", "data_id": "v.webm"}]},
             "images/17_4": png()},
            {"llava-seed-bench.jsonl": [
                {"question_id": 7, "image": "17_4", "text": SEED_TEXT},
                {"question_id": "v1", "image": "v.png", "text": SEED_TEXT}],
             "annotations": "SEED-Bench.json",
             "SEED-Bench.json": {"questions": [
                {**SEED_ROW, "data_id": "17_4"},
                {**SEED_ROW, "question_id": "v1", "data_type": "video", "data_id": "v.webm"}]},
             "images/17_4": png()},
        ],
        [(SEED_TEXT, "C", ("Instances Counting",), 1)],
    ),
    "mme": (
        [
            {"test-00000-of-00001.parquet": [
                {"question_id": "posters/1.jpg", "question": question, "answer": answer, "category": "posters",
                 "image": stored()} for question, answer in MME]},
            {"MME.tsv": [
                {"index": i, "question": question, "answer": answer, "category": "posters",
                 "image_path": "posters/1.jpg", "image": encoded() if i == 0 else 0}
                for i, (question, answer) in enumerate(MME)]},
            {"data": "images",
             "images/posters/questions_answers_YN/1.txt": MME_FILE, "images/posters/images/1.jpg": png()},
            {"data": "images", "images/posters/1.txt": MME_FILE, "images/posters/1.jpg": png()},
            {"llava_mme.jsonl": [
                {"question_id": "posters/1.jpg", "image": "posters/1.jpg", "text": text, "category": "posters"}
                for text in MME_TEXTS],
             "annotations": "images", "images/posters/1.txt": MME_FILE, "images/posters/1.jpg": png()},
        ],
        [(text, {"answer": word, "pair": ANY}, ("posters", "perception"), 1)
         for text, word in zip(MME_TEXTS, ("yes", "no"))],
    ),
    "refcoco": (
        [
            {"refcoco/data/testA-00000-of-00001.parquet": [
                {"question_id": "9", "answer": ["left cat", "grey one"], "bbox": [3.0, 4.0, 10.0, 6.0],
                 "image": stored()}]},
            {"refcoco_testA.jsonl": [
                {"image": "1.jpg", "sent": text, "bbox": [3, 4, 13, 10], "width": 30, "height": 20}
                for text in ("left cat", "grey one")], "images/1.jpg": png()},
            {"finetune_refcoco_testA.json": {
                "images": [{"id": i, "file_name": "1.jpg", "caption": text, "width": 30, "height": 20}
                           for i, text in enumerate(("left cat", "grey one"))],
                "annotations": [{"image_id": i, "bbox": [3, 4, 10, 6]} for i in (0, 1)]},
             "images/1.jpg": png()},
        ],
        [(f"{REGION}{text}", {"answer": [3, 4, 13, 10], "size": [30, 20]}, ("testA",), 1)
         for text in ("left cat", "grey one")],
    ),
    "pope": (
        [
            {"Full/test-00000-of-00001.parquet": [
                {"question_id": "1", "question": "Is there a dog?", "answer": "yes", "category": "popular",
                 "image": stored()}]},
            {"POPE.tsv": [{"index": 1, "question": "Is there a dog?", "answer": "Yes", "category": "popular",
                           "image": encoded()}]},
        ],
        [(f"Is there a dog?{SHORT}", "yes", ("popular",), 1)],
    ),
}  # fmt: skip
CASES = [(task, number) for task, (layouts, _) in LAYOUTS.items() for number in range(len(layouts))]


def files_of(task: str, number: int, folder: Path) -> dict[str, str]:
    """Write the files of a benchmark's layout, and return the flags that name them."""
    layout = dict(LAYOUTS[task][0][number])
    data, annotations = layout.pop("data", None), layout.pop("annotations", None)
    paths = [write(folder, name, content) for name, content in layout.items()]
    flags = {"data_path": paths[0] if data is None else str(folder / data)}
    if annotations is not None:
        flags["annotations"] = str(folder / annotations)
    if (folder / "images").is_dir():
        flags["image_folder"] = str(folder / "images")
    return flags


def read(task: str, flags: dict[str, str], folder: Path) -> list[Question]:
    return read_questions(task, Given(**flags, cache_dir=str(folder / "cache")), None)


def test_every_benchmark_is_listed_here():
    assert set(BENCHMARKS) | {"pope"} == set(LAYOUTS) <= set(TASKS)


@pytest.mark.parametrize(("task", "number"), CASES)
def test_every_layout_holds_the_same_questions(task, number, tmp_path):
    questions = read(task, files_of(task, number, tmp_path), tmp_path)
    expected = LAYOUTS[task][1]
    assert [(q.asked, q.reference, q.kinds, len(q.prompt.images)) for q in questions] == expected
    for question in questions:
        marks = f"{IMAGE_TOKEN}\n" * len(question.prompt.images)
        assert question.prompt.messages[0].text == marks + question.asked
        for width, image in zip((30, 31), question.prompt.images):
            shown = load_image(image if isinstance(image, str) else image.refs[0])
            assert shown.size == (width, 20)
    again = read(task, {**files_of(task, number, tmp_path)}, tmp_path)  # out of the cache
    assert [q.prompt for q in again] == [q.prompt for q in questions]


def test_damaged_files_are_refused_with_record_and_expectation(tmp_path):
    for number, (task, name, content, said) in enumerate([
        ("docvqa", "a.tsv", [{"question": "Q", "answer": "a", "image": encoded()}, {"question": "Q", "answer": "b"}],
         r"1 of 2 records can't be used\n  record 1: has None as its image, expected an image inside"),
        ("docvqa", "a.tsv", [{"question": "Q", "answer": "a", "image": "no image" * 20}], "record 0: names the image"),
        ("docvqa", "a.tsv", [{"question": "Q", "image": encoded()}], "is not DocVQA's questions: .* answer or answers"),
        ("ai2d", "a.tsv", [{"question": "Q", "A": "x", "answer": "B", "image": encoded()}],
         "record 0: has the answer 'B', expected one of A"),
        ("mme", "a.tsv", [{"question": "Q", "answer": "Yes", "category": "count", "question_id": "1"}],
         "has 1 questions about count's image '1', expected two"),
        ("pope", "a.tsv", [{"question": "Q", "answer": "maybe", "image": encoded()}], "'maybe', expected yes or no"),
        ("mmmu", "a.tsv", [{"id": "dev_Art_1", "question": "Q", "answer": "A", "image": encoded()}],
         "no questions of MMMU's validation split"),
        ("mathvista", "a.tsv", [{"question": "Q", "answer": "1", "answer_type": "number", "image": encoded()}],
         "answer_type 'number', expected integer, float, list or text"),
        ("refcoco", "a.jsonl", [{"sent": "cat", "bbox": [1, 2, 3], "image": "1.jpg", "width": 3, "height": 4}],
         r"record 0: has \[1, 2, 3\] under 'bbox', expected four numbers"),
        ("seed", "a.jsonl", [{"question_id": 1, "image": "1", "text": "Q"}], "--annotations is missing"),
        ("ocrbench", "a.json", [{"question": "Q", "answers": ["a"], "type": "x"}, "text"], "record 1: is 'text'"),
        ("chartqa", "a.parquet", "text", "can't be read as parquet"),
    ]):  # fmt: skip
        if name.endswith(".parquet"):
            path = tmp_path / str(number) / name
            path.parent.mkdir()
            path.write_text(content)
        else:
            path = write(tmp_path / str(number), name, content)
        with pytest.raises((ConfigError, DataError), match=said) as caught:
            read(task, {"data_path": str(path)}, tmp_path)
        assert str(path) in str(caught.value)


def test_a_folder_of_other_splits_is_refused(tmp_path):
    write(tmp_path, "ai2d/train-00000-of-00001.parquet", [{"question": "Q", "answer": "0"}])
    with pytest.raises(ConfigError, match="has no parquet file of test: its splits are train"):
        read("ai2d", {"data_path": str(tmp_path / "ai2d")}, tmp_path)


def test_eval_tasks_takes_every_benchmark(tmp_path):
    flags = {task: {"task": task, **files_of(task, 0, tmp_path / task)} for task in LAYOUTS}
    (tmp_path / "tasks.yaml").write_text(json.dumps(flags))
    tasks = read_eval_tasks(str(tmp_path / "tasks.yaml"), str(tmp_path / "cache"))
    assert [task.name for task in tasks] == list(LAYOUTS)
    for task in tasks:
        scored = task.score(task.questions, ["no"] * len(task.questions))
        assert scored.columns[:, 0].mean() == (0.5 if task.name == "mme" else 0)


def test_a_box_in_pixels_of_the_resized_image_is_right(tmp_path, monkeypatch):
    """Qwen2.5-VL's coordinates, by the size that transformers' own processor gives."""
    image_processor_of = pytest.importorskip("ready_models").image_processor_of
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path / "model", "qwen2_5_vl")
    width, height = 290, 140
    images = image_processor_of("qwen2_5_vl")
    image = Image.new("RGB", (width, height))
    image.save(tmp_path / "0.png")
    [(_, rows, columns)] = images(image, return_tensors="pt")["image_grid_thw"]
    resized = int(columns) * images.patch_size, int(rows) * images.patch_size
    told = [round(part * side) for part, side in zip((0.1, 0.2, 0.4, 0.6), resized * 2)]
    true = [part * side for part, side in zip((0.1, 0.2, 0.4, 0.6), (width, height) * 2)]
    record = {"image": "0.png", "sent": "cat", "bbox": true, "width": width, "height": height}
    path = write(tmp_path, "refcoco_val.jsonl", [record])
    monkeypatch.setattr(asking, "greedy_answers", lambda *_, **__: [Answer(f'{{"bbox_2d": {told}}}', 0.0, 1)])
    flags = {"task": "refcoco", "data_path": path, "image_folder": tmp_path, "model_path": tmp_path / "model"}
    flags |= {"cache_dir": tmp_path / "cache", "resamples": 3, "output": tmp_path / "out.json"}
    run_script("evaluate.py", *command_line(flags))
    [metrics] = json.loads((tmp_path / "out.json").read_text())["metrics"].values()
    found = {name: each["value"] for name, each in metrics["overall"].items()}
    assert found["accuracy"] == found["accuracy_resized_pixels"] == 1 and found["accuracy_pixels"] == 0


@pytest.mark.long
def test_run_evaluate_scores_every_benchmark(tmp_path, capsys):
    model = export_toy(tmp_path / "model")
    for task in LAYOUTS:
        flags = {"task": task, **files_of(task, 0, tmp_path / task), "cache_dir": tmp_path / "cache"}
        output = tmp_path / f"{task}.json"
        flags |= {"model_path": model, "max_new_tokens": 3, "resamples": 3, "output": output}
        run_script("evaluate.py", *(token for name, value in flags.items() for token in (f"--{name}", value)))
        rows = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
        scores = json.loads(output.read_text())
        assert [row["prompt"] for row in rows] == [text for text, *_ in LAYOUTS[task][1]]
        assert scores["task"] == task and scores["metric"] in ("accuracy", "anls")
        assert f"{scores['metric']} of {model}" in capsys.readouterr().out


def test_the_flag_knows_every_task_and_no_other():
    assert sorted(TASK_NAMES) == sorted(TASKS)
