"""Benchmarks' files, as they are downloaded and as LLaVA's evaluation lays them out, become the same questions."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.question import digest, without_image
from llava_ds.extensions.benchmarks.tasks import TASKS, read_questions

SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


def dump(path: Path, content: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def dump_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def picture(folder: Path, name: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 20), "red").save(path)
    return str(path)


def read(task: str, data_path: str, folder: Path, annotations: str | None = None, **more):
    given = Given(data_path, annotations, str(folder / "images"), cache_dir=str(folder / "cache"), **more)
    return read_questions(task, given, None)


def summary(questions) -> list:
    return [(q.id, q.prompt, q.reference) for q in questions]


@pytest.fixture
def vqav2(tmp_path):
    picture(tmp_path / "images", "COCO_val2014_000000000042.jpg")
    answers = [{"answer": "net" if i < 3 else "netting", "answer_id": i + 1} for i in range(10)]
    content = {
        "questions": [{"question_id": 42000, "image_id": 42, "question": "What is it?"}],
    }
    annotated = {
        "data_subtype": "val2014",
        "annotations": [{"question_id": 42000, "answers": answers, "answer_type": "other"}],
    }
    return dump(tmp_path / "questions.json", content), dump(tmp_path / "annotations.json", annotated)


def test_vqav2(tmp_path, vqav2):
    official = read("vqav2", vqav2[0], tmp_path, vqav2[1])
    [question] = official
    assert question.prompt.messages[0].text == f"{IMAGE_TOKEN}\nWhat is it?{SHORT}"
    assert question.prompt.images == (str(tmp_path / "images" / "COCO_val2014_000000000042.jpg"),)
    assert question.reference == ["net"] * 3 + ["netting"] * 7 and question.kinds == ("other",)
    row = {"question_id": 42000, "image": "COCO_val2014_000000000042.jpg", "text": f"What is it?{SHORT}"}
    llavas = read("vqav2", dump_lines(tmp_path / "llava.jsonl", [row]), tmp_path, vqav2[1])
    assert summary(official) == summary(llavas) and digest(official) == digest(llavas)


def test_textvqa(tmp_path):
    picture(tmp_path / "images", "ab.jpg")
    people = ["nokia"] * 10
    annotation = {"question_id": 7, "image_id": "ab", "question": "What is the Brand?", "answers": people}
    official = dump(tmp_path / "TextVQA_0.5.1_val.json", {"data": [annotation]})
    [question] = read("textvqa", official, tmp_path)
    assert question.prompt.messages[0].text == f"{IMAGE_TOKEN}\nWhat is the Brand?{SHORT}"
    text = f"what is the brand?\nReference OCR token: NOKIA, 6{SHORT}"
    for asked in (text, f"Reference OCR token: NOKIA\nWhat is the brand?{SHORT}"):
        row = {"question_id": "ab", "image": "ab.jpg", "text": asked}
        [llavas] = read("textvqa", dump_lines(tmp_path / "ocr.jsonl", [row]), tmp_path, official)
        assert llavas.reference == question.reference == people
        assert llavas.asked == asked  # what LLaVA's eval_textvqa.py finds the annotation by


def test_pope(tmp_path):
    rows = [
        {"question_id": i + 1, "image": f"{i}.jpg", "text": f"Is there a {what} in the image?", "label": label}
        for i, (what, label) in enumerate([("dog", "yes"), ("car", "no")])
    ]
    for row in rows:
        picture(tmp_path / "images", row["image"])
    (tmp_path / "coco").mkdir()
    for kind in ("random", "popular"):
        dump_lines(tmp_path / "coco" / f"coco_pope_{kind}.json", rows)
    official = read("pope", str(tmp_path / "coco"), tmp_path)
    assert [q.kinds for q in official] == [("popular",)] * 2 + [("random",)] * 2
    assert [q.reference for q in official] == ["yes", "no"] * 2
    assert [q.id for q in read("pope", str(tmp_path / "coco" / "coco_pope_random.json"), tmp_path)] == [1, 2]
    lines = [
        {**row, "text": row["text"] + SHORT, "category": kind, "question_id": row["question_id"]}
        for kind in ("popular", "random")
        for row in rows
    ]
    for line in lines:
        del line["label"]
    llavas = read("pope", dump_lines(tmp_path / "llava.jsonl", lines), tmp_path, str(tmp_path / "coco"))
    assert summary(official) == summary(llavas)
    with pytest.raises(DataError, match=r"has 1 questions of the category 'random', but .* has 2"):
        read("pope", dump_lines(tmp_path / "few.jsonl", lines[:3]), tmp_path, str(tmp_path / "coco"))


def test_scienceqa(tmp_path):
    picture(tmp_path / "images", "test/5/image.png")
    base = {"choices": ["Maine", "Ohio"], "answer": 1, "hint": "", "image": None, "grade": "grade3"}
    problems = {
        "4": {**base, "question": "Which?", "subject": "social science"},
        "5": {**base, "question": "Where?", "hint": "Look.", "image": "image.png", "subject": "natural science"},
        "6": {**base, "question": "not in the split"},
    }
    dump(tmp_path / "problems.json", problems)
    dump(tmp_path / "pid_splits.json", {"test": ["4", "5"]})
    first, second = read("scienceqa", str(tmp_path), tmp_path)
    options = "Options: (A) Maine (B) Ohio"
    assert first.prompt.messages[0].text == f"Context: N/A\nQuestion: Which?\n{options}{LETTER}"
    assert first.prompt.images == () and first.kinds == ("SOC", "NO", "G1-6") and first.reference == [1, 2]
    assert second.prompt.messages[0].text == f"{IMAGE_TOKEN}\nContext: Look.\nQuestion: Where?\n{options}{LETTER}"
    assert second.kinds == ("NAT", "TXT", "IMG", "G1-6") and IMAGE_TOKEN in second.asked
    text = f"Context: Look.\nQuestion: Where?\n{options}\n{IMAGE_TOKEN}"
    record = {"id": "5", "image": "test/5/image.png", "conversations": [{"from": "human", "value": text}]}
    llavas = read("scienceqa", dump(tmp_path / "llava_test_CQM-A.json", [record]), tmp_path, str(tmp_path))
    assert summary(llavas) == summary([second])
    with pytest.raises(ConfigError, match="no split 'val': its splits are test"):
        read("scienceqa", str(tmp_path), tmp_path, split="val")


def test_gqa(tmp_path):
    picture(tmp_path / "images", "n1.jpg")
    types = {"structural": "query", "semantic": "attr", "detailed": "color"}
    question = {"imageId": "n1", "question": "What color?", "answer": "red", "types": types, "isBalanced": True}
    content = {"201": question, "202": {**question, "isBalanced": False}}
    official = dump(tmp_path / "testdev_balanced_questions.json", content)
    [only] = read("gqa", official, tmp_path)
    assert (only.id, only.reference) == ("201", "red")
    assert only.kinds == ("open", "structural query", "semantic attr")
    row = {"question_id": "201", "image": "n1.jpg", "text": f"What color?{SHORT}"}
    assert summary(read("gqa", dump_lines(tmp_path / "l.jsonl", [row]), tmp_path, official)) == summary([only])


def test_mmbench(tmp_path):
    from llava_ds.data.images.headers import probe
    from llava_ds.geometry import ImageOptions

    def encoded(width: int) -> str:
        buffer = io.BytesIO()
        Image.new("RGB", (width, 20), "blue").save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()

    columns = ["index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "source", "l2-category"]
    rows = [
        ["241", "Which?", "nan", "cat", "dog", "nan", "nan", "B", "name", encoded(30), "x", "coarse"],
        ["1000241", "Which?", "nan", "dog", "cat", "nan", "nan", "A", "name", "241", "x", "coarse"],
        ["252", "Who?", "Look.", "a", "b", "c", "", "C", "name", encoded(31), "x", "fine"],
    ]
    file = tmp_path / "mmbench.tsv"
    file.write_text("\n".join("\t".join(row) for row in [columns, *rows]) + "\n")
    first, rotated, other = read_questions("mmbench", Given(str(file), cache_dir=str(tmp_path)), None)
    assert first.prompt.messages[0].text == f"{IMAGE_TOKEN}\nWhich?\nA. cat\nB. dog{LETTER}"
    assert first.reference == [241, "B", {"A": "cat", "B": "dog"}]
    assert rotated.reference[:2] == [241, "A"] and rotated.more["round_id"] == 1
    assert rotated.prompt.images == first.prompt.images != other.prompt.images
    assert other.asked == "Look.\nWho?\nA. a\nB. b\nC. c" and other.kinds == ("name", "fine")
    options = ImageOptions(24, 8, (0.5, 0.5, 0.5))
    assert [probe(q.prompt.images[0], options) for q in (first, other)] == [((30, 20),), ((31, 20),)]
    test_split = tmp_path / "test.tsv"
    test_split.write_text("\n".join("\t".join(row[:7] + row[8:]) for row in [columns, *rows]) + "\n")
    with pytest.raises(DataError, match="this is the test split"):
        read_questions("mmbench", Given(str(test_split), cache_dir=str(tmp_path)), None)


def test_coco_captions(tmp_path):
    picture(tmp_path / "images", "1.jpg")
    content = {
        "images": [{"id": 1, "file_name": "1.jpg"}],
        "annotations": [{"image_id": 1, "caption": "A cat."}, {"image_id": 1, "caption": "One cat."}],
    }
    [question] = read("caption", dump(tmp_path / "captions.json", content), tmp_path)
    assert question.reference == ["A cat.", "One cat."] and question.prompt.images


def test_llavas_format(tmp_path):
    image = picture(tmp_path / "images", "1.jpg")
    talk = [
        {"from": "human", "value": f"{IMAGE_TOKEN}\nWhat is it?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "And what is it doing?"},
        {"from": "gpt", "value": "Sleeping."},
    ]
    records = [
        {"id": "a", "image": "1.jpg", "kind": "x", "conversations": talk, "references": ["Asleep.", "Sleeping."]}
    ]
    path = dump(tmp_path / "data.json", records)
    first, second = read("llava", path, tmp_path, metric="caption")
    assert (first.asked, first.reference, first.kinds) == ("What is it?", ["A cat."], ("x",))
    assert [m.role for m in second.prompt.messages] == ["human", "gpt", "human"]  # the file's own earlier answer
    assert second.reference == ["Asleep.", "Sleeping."] and second.prompt.images == (image,)
    withheld = without_image(second)
    assert withheld.prompt.images == () and IMAGE_TOKEN not in withheld.prompt.messages[0].text
    assert digest([withheld]) != digest([second])
    assert [(q.id, q.more["id"], q.more["turn"]) for q in (first, second)] == [("a#1", "a", 1), ("a#2", "a", 2)]
    with pytest.raises(DataError, match="has 2 references, but --metric exact takes one"):
        read("llava", path, tmp_path)


def talk_of(*turns: str) -> list[dict]:
    """Questions and answers by turns."""
    return [{"from": "gpt" if i % 2 else "human", "value": turn} for i, turn in enumerate(turns)]


def test_a_question_by_itself_is_shown_the_images_of_the_turns_before_it(tmp_path):
    images = [picture(tmp_path / "images", f"{i}.jpg") for i in range(3)]
    turns = talk_of(f"{IMAGE_TOKEN}\nWhat is it?", "A cat.", f"And {IMAGE_TOKEN} this?", "A dog.", "Its name?", "Rex")
    record = {"id": "a", "image": ["0.jpg", "1.jpg"], "conversations": turns, "system": "Be brief."}
    later = {"id": "b", "image": "2.jpg", "conversations": talk_of(f"{IMAGE_TOKEN}\nWho?", "Ann")}
    path = dump(tmp_path / "data.json", [record, later])
    together = read("llava", path, tmp_path)
    assert together[2].prompt.messages[2].text == "A cat."  # the true answers are what --turns together shows
    first, second, third, other = read("llava", path, tmp_path, turns="each")
    assert [q.id for q in (first, second, third, other)] == ["a#1", "a#2", "a#3", "b"]
    assert first.prompt == together[0].prompt and other.prompt == together[3].prompt
    assert [m.role for m in third.prompt.messages] == ["system", "human"]
    assert second.prompt.messages[-1].text == f"{IMAGE_TOKEN}\nAnd {IMAGE_TOKEN} this?"
    assert third.prompt.messages[-1].text == f"{IMAGE_TOKEN}\n{IMAGE_TOKEN}\nIts name?"
    assert third.prompt.images == second.prompt.images == tuple(images[:2]) and first.prompt.images == (images[0],)
    assert [q.reference for q in (first, second, third)] == ["A cat.", "A dog.", "Rex"]


def test_calls_and_answers_that_are_switched_off_are_not_asked_for(tmp_path):
    """What the record offers, and what was thought and called before, is part of the prompt."""
    tools = [{"type": "function", "function": {"name": "zoom"}}]
    turns = talk_of("What is it?", "WRONG", "Look closer.", "I do.", "3", "Three birds.")
    turns[1]["loss"], turns[3]["reasoning"], turns[4]["from"] = False, "Closer?", "observation"
    turns[3]["tool_calls"] = [{"name": "zoom", "arguments": {}}]
    record = {"id": "a", "conversations": turns, "tools": tools, "chat_template_kwargs": {"brief": True}}
    path = dump(tmp_path / "data.json", [record])
    [asked] = read("llava", path, tmp_path)
    assert asked.reference == "Three birds." and [m.role for m in asked.prompt.messages][-2:] == ["gpt", "tool"]
    assert json.loads(asked.prompt.tools) == tools and asked.prompt.template_kwargs == '{"brief": true}'
    assert asked.prompt.messages[3].thought == "Closer?" and without_image(asked).prompt == asked.prompt
    [other] = read("llava", dump(tmp_path / "other.json", [{**record, "tools": []}]), tmp_path)
    assert digest([other]) != digest([asked])
    with pytest.raises(DataError, match="tool results, but they mean nothing without their calls"):
        read("llava", path, tmp_path, turns="each")


def test_answers_that_are_judged_are_texts(tmp_path):
    answers = {"chosen": {"role": "assistant", "content": "A cat.", "thinking": "x"}, "rejected": "A dog."}
    path = dump(tmp_path / "data.json", [{"prompt": "What is it?", **answers}])
    with pytest.raises(
        DataError, match="has answers with thoughts or tool calls, but answers are judged only by their text"
    ):
        read("preference", path, tmp_path)


def test_a_kind_may_be_of_one_turn(tmp_path):
    turns = talk_of("What is it?", "A cat.", "Its name?", "Tom", "Its colour?", "grey")
    turns[1]["kind"], turns[2]["kind"] = "object", "name"  # of the answer, or of its question
    records = [{"id": "a", "conversations": turns, "system": "Be brief.", "kind": "rest"}]
    found = read_questions("llava", Given(dump(tmp_path / "data.json", records)), None)
    assert [q.kinds for q in found] == [("object",), ("name",), ("rest",)]


def test_records_of_other_forms_are_asked_about(tmp_path):
    talk = json.dumps([{**turn, "kind": "k"} for turn in talk_of("What?", "A cat.")])
    records = [{"conversations": talk}, {"conversations": {"from": ["human", "gpt"], "value": ["Who?", "Me."]}}]
    found = read_questions("llava", Given(dump(tmp_path / "data.json", records)), None)
    assert [(q.asked, q.reference, q.kinds) for q in found] == [("What?", "A cat.", ("k",)), ("Who?", "Me.", ())]
    records = [
        {"question": "How many?", "answers": ["2", "3", "3"], "kind": "n"},
        {"question": "Who?", "answers": ["Me"]},
    ]
    file = dump(tmp_path / "vqa.json", records)
    found = read_questions("llava", Given(file), None)
    assert [(q.asked, q.reference, q.kinds) for q in found] == [("How many?", "3", ("n",)), ("Who?", "Me", ())]
    found = read_questions("llava", Given(file, metric="caption"), None)
    assert [q.reference for q in found] == [["2", "3", "3"], ["Me"]]  # compared with all


def test_a_split_of_a_folder_is_asked_about(tmp_path):
    for split in ("train", "testA"):
        dump(tmp_path / f"{split}.json", [{"question": split, "answer": "a"}])
    assert [q.asked for q in read_questions("llava", Given(str(tmp_path), split="testA"), None)] == ["testA"]
    with pytest.raises(ConfigError, match=r"holds the splits .*--split of run/evaluate\.py"):
        read_questions("llava", Given(str(tmp_path)), None)


def test_without_kinds_the_questions_that_many_records_ask_are_groups(tmp_path):
    def questions(records):
        return read_questions("llava", Given(dump(tmp_path / "data.json", records)), None)

    names = [{"conversations": talk_of("What is its\nname?", "Tom", f"Question {i}?", "x")} for i in range(5)]
    assert [q.kinds for q in questions(names)] == [("What is its name?",), ()] * 5
    assert not any(q.kinds for q in questions(names[:4]))
    assert not any(q.kinds for q in questions([{"conversations": talk_of("Name?", "Tom")}] * 9))  # all are one group
    one = {**names[0], "kind": "k"}
    assert [q.kinds for q in questions([*names[1:], one])] == [()] * 8 + [("k",)] * 2


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("llava", "preference", "scienceqa")])
def test_a_file_of_another_format_is_refused_in_one_sentence(task, tmp_path, vqav2):
    for name, content in [("list.json", [{"a": 1}]), ("object.json", {"b": {"c": 1}}), ("text.json", "text")]:
        file = dump(tmp_path / name, content)
        with pytest.raises(DataError) as caught:
            read(task, file, tmp_path, vqav2[1] if task == "vqav2" else None)
        assert file in str(caught.value) and "is not" in str(caught.value) and "expected" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_without_pairs_is_refused_with_the_forms_that_are_known(tmp_path):
    with pytest.raises(ConfigError, match=r"list.json: .* \(keys found: 'a'\). Supported: LLaVA"):
        read("preference", dump(tmp_path / "list.json", [{"a": 1}]), tmp_path)


def test_what_is_missing_is_named(tmp_path, vqav2):
    with pytest.raises(ConfigError, match=r"--annotations is missing: .* has only VQAv2's questions"):
        read("vqav2", vqav2[0], tmp_path)
    with pytest.raises(ConfigError, match="already has the answers: leave it out"):
        read("gqa", vqav2[0], tmp_path, vqav2[1])
    with pytest.raises(ConfigError, match="--image_folder is missing"):
        read_questions("vqav2", Given(vqav2[0], vqav2[1]), None)
    (tmp_path / "images" / "COCO_val2014_000000000042.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 1 records can't be used\n.*COCO_val2014_000000000042.jpg"):
        read("vqav2", vqav2[0], tmp_path, vqav2[1])
    annotations = dump(tmp_path / "others.json", {"annotations": [{"question_id": 1, "answers": []}]})
    with pytest.raises(DataError, match=r"the question 42000, but .* has no answer to it"):
        read("vqav2", vqav2[0], tmp_path, annotations)
    with pytest.raises(DataError, match="can't be read as JSON"):
        (tmp_path / "torn.json").write_text('{"questions": [')
        read("vqav2", str(tmp_path / "torn.json"), tmp_path, vqav2[1])
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read("gqa", str(tmp_path / "nowhere.json"), tmp_path)
