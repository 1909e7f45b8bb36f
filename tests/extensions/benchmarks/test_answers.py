"""Answers are kept as they come, found again after a break, never mixed, and the same on any number of ranks."""

import json
import os
import runpy
import shutil
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from exporting import RANKS, export
from launching import ROOT

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.data.sample import FileRef, Media, Message
from llava_ds.engine.construct import build_model
from llava_ds.export.card import write_conversion_card
from llava_ds.extensions.benchmarks import asking, question
from llava_ds.extensions.benchmarks.answers import Part, answer_rows, answered, open_store, write_answers, write_scores
from llava_ds.extensions.benchmarks.answers_identity import identity_of, model_digest
from llava_ds.extensions.benchmarks.asking import ask, open_batches, plan_batches
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.score_table import as_json, estimates, table
from llava_ds.extensions.benchmarks.scores import Scored, exact_match, shown_reference, yes_no
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.engines import EngineOptions
from llava_ds.extensions.infer.generate import Answer, Prompt, answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

MAIN = "with picture"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    args = ModelArguments(**toys.write_base(folder / "base"))
    plan = plan_model(args, 512)
    built = build_model(plan, args, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    image_options = ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean)
    export(built, plan, args, image_options, folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    flags = toys.write_data(tmp_path_factory.mktemp("questions"), "iittitiit")
    return read_questions("llava", Given(flags["data_path"], image_folder=flags["image_folder"]), None)


def on_ranks(world_size: int, monkeypatch, work) -> list:
    """What work(ranks) returns for every rank, each in a thread; they meet in gather as processes do."""
    shared: list = [None] * world_size
    meeting = threading.Barrier(world_size)

    def gather(value, ranks):
        shared[ranks.rank] = value
        meeting.wait(60)
        values = list(shared)
        meeting.wait(60)
        return values

    monkeypatch.setattr(asking, "gather", gather)
    results: list = [None] * world_size

    def run(rank: int) -> None:
        results[rank] = work(Ranks(rank, rank, world_size, torch.device("cpu")))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_batches_and_answers_do_not_depend_on_the_number_of_ranks(model, questions, monkeypatch):
    loaded = load_model(model)
    seen = {}
    for world_size in (1, 2, 3):
        plans = on_ranks(world_size, monkeypatch, lambda ranks: plan_batches(loaded, questions, 4, ranks))
        assert all(plan == plans[0] for plan in plans)
        answers: dict[int, str] = {}
        for rank in range(world_size):  # one after the other: the model is shared
            ranks = Ranks(rank, rank, world_size, torch.device("cpu"))
            ask(loaded, questions, plans[0], answers.update, ranks, max_new_tokens=4, progress="")
        assert sorted(answers) == list(range(len(questions)))
        seen[world_size] = (plans[0], answers)
    assert seen[1] == seen[2] == seen[3]
    assert sorted(number for batch in seen[1][0] for number in batch) == list(range(len(questions)))


def test_the_script_goes_on_where_it_was_broken_off_and_leaves_the_same_files(model, tmp_path, monkeypatch, capsys):
    data = toys.write_data(tmp_path / "data", "iittitiit")
    write_conversion_card(model, "hf", tmp_path)
    flags = {**data, "model_path": str(model), "batch_size": "4", "max_new_tokens": "4", "output": "x.json"}
    asked = [token for name, value in flags.items() for token in (f"--{name}", value)]
    main = runpy.run_path(str(ROOT / "run" / "evaluate.py"))["main"]

    def evaluate(folder) -> tuple[str, list[bytes]]:
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        compared = ["--compare_without_image", "--compare_blank_image", "--show_wrong", "2"]
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *asked, *compared])
        main(sys.argv[1:])
        files = ["x.blank_image.jsonl", "x.json", "x.jsonl", "x.without_picture.jsonl"]
        assert sorted(file.name for file in folder.iterdir()) == files
        return capsys.readouterr().out, [(folder / file).read_bytes() for file in files]

    printed, whole = evaluate(tmp_path / "whole")
    scores, rows = json.loads(whole[1]), [json.loads(line) for line in whole[2].splitlines()]
    card = (model / "README.md").read_text()
    overall = scores["metrics"][MAIN]["overall"]["accuracy"]
    assert card.count("## Evaluation: data.json") == 1 and f"| overall | {len(rows)} | {overall['value']:.3f} |" in card
    assert scores["scores"][MAIN]["overall"][1] == len(rows) > 4
    assert f"accuracy {overall['value']:.3f} [{overall['low']:.3f}, {overall['high']:.3f}]" in printed
    assert printed.splitlines()[-1].split()[0] == "overall"
    assert f"2 of {len(rows)} wrong answers, the most confident first:" in printed
    surest = max(row["logprob"] for row in rows)
    shown = next(row for row in rows if row["logprob"] == surest)
    assert f'expected "{shown["reference"]}"' in printed.split("most confident first:\n")[1].splitlines()[0]
    assert "questions are later turns, asked after the true earlier answers" in printed
    assert (
        "blank image: every image replaced by a plain colour" in printed
        and "without picture: no image and no image mark" in printed
    )

    broken = tmp_path / "broken"
    (broken / "x.partial").mkdir(parents=True)
    (broken / "x.partial" / "identity.json").write_text(json.dumps(scores["identity"]))
    answer = ("text", "logprob", "num_tokens")
    kept = [json.dumps({"number": i, **{key: rows[i][key] for key in answer}}) + "\n" for i in range(len(rows) - 3)]
    (broken / "x.partial" / "with_picture-1-0.jsonl").write_text("".join(kept) + '{"number": 2')
    printed, again = evaluate(broken)
    assert again == whole and f"{len(kept)} of {len(rows)} questions are answered already" in printed
    printed, again = evaluate(broken)
    assert again == whole and f"without picture: {len(rows)} of {len(rows)} questions are answered" in printed

    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--model_path", str(tmp_path), "--output", "x.json", *asked[:4]])
    with pytest.raises(ConfigError, match="contains no model"):
        main(sys.argv[1:])
    assert (broken / "x.json").read_bytes() == whole[1]  # a slip moves nothing aside


def test_questions_about_videos(tmp_path, monkeypatch):
    """Of a ready model, which is shown all frames."""
    write_ready = pytest.importorskip("ready_models").write_ready
    write_ready(tmp_path / "model", "smolvlm")
    data = toys.write_data(tmp_path / "data", "vit")
    flags = {**data, "model_path": str(tmp_path / "model"), "max_new_tokens": "4", "output": str(tmp_path / "x.json")}
    main = runpy.run_path(str(ROOT / "run" / "evaluate.py"))["main"]
    asked = [token for name, value in flags.items() for token in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *asked])
    main(sys.argv[1:])
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    frames = [str(tmp_path / "data" / "images" / f"0-{i}.png") for i in range(5)]
    row = next(row for row in rows if row["images"] == frames[:1])
    media = Media("frames", tuple(map(FileRef, frames)))
    prompt = Prompt((Message("human", "<image>\nWhat is it, number 0?"),), (media,))
    assert row["prompt"] == "What is it, number 0?"
    assert [row["text"]] == answer(load_model(tmp_path / "model"), [prompt], max_new_tokens=4) != [""]


def test_only_what_is_not_answered_is_asked_and_in_whole_batches(questions, monkeypatch):
    asked = []
    monkeypatch.setattr(asking, "greedy_answers", lambda loaded, prompts, **_: [asked.append(p) for p in prompts])
    kept: dict[int, str] = {}
    ask(
        SimpleNamespace(ranks=None),
        questions,
        open_batches([[0, 1], [2, 3], [4, 5]], {0: "", 1: "", 2: ""}),
        kept.update,
        RANKS,
        max_new_tokens=1,
        progress="",
    )
    assert sorted(kept) == [2, 3, 4, 5] and asked == [questions[i].prompt for i in (2, 3, 4, 5)]


def store_of(tmp_path, **identity):
    return open_store(str(tmp_path / "scores.json"), {"model": "a", "data": "b", **identity}, [], RANKS)


def test_answers_are_found_after_a_break(tmp_path):
    store, attempt = store_of(tmp_path)
    assert attempt == 1
    part = Part(store, MAIN, attempt, RANKS)
    three, one, two, zero = (Answer(text, -0.5, 2) for text in ("three\u2028\n", "one", "two", "zero"))
    part.keep({3: three, 1: one})
    with part.path.open("a") as file:
        file.write('{"number": 2, "te')  # killed while it wrote
    store, attempt = store_of(tmp_path)
    assert attempt == 2 and answered(store, MAIN, 4, RANKS) == {3: three, 1: one}
    more = Part(store, MAIN, attempt, RANKS)
    more.keep({2: two, 0: zero})
    part.close()
    more.close()
    assert sorted(answered(store, MAIN, 4, RANKS)) == [0, 1, 2, 3]


def test_damaged_answers_are_said_and_asked_again(tmp_path, capsys):
    store, _ = store_of(tmp_path)
    rest = '"logprob": -1, "num_tokens": 3}'
    rows = [
        '{"number": 0, "text": "zero", ' + rest,
        "\0 garbage",
        '{"n": 1}',
        "[1]",
        '{"number": 9, "text": "x", ' + rest,
    ]
    rows += ['{"number": "1", "text": "x", ' + rest, '{"number": 1, "text": 5, ' + rest, '{"number": 1, "text": "one"}']
    rows += ['{"number": 2, "text": "two", ' + rest, ""]
    (store.partial / "with_picture-3-0.jsonl").write_text("\n".join(rows))
    (store.partial / "with-other-name.jsonl").write_text("somebody else's")
    store, attempt = store_of(tmp_path)
    assert attempt == 4 and answered(store, MAIN, 3, RANKS) == {0: Answer("zero", -1, 3), 2: Answer("two", -1, 3)}
    assert "7 of 9 lines are damaged; their questions will be answered again" in capsys.readouterr().out
    store.answers_file(MAIN).write_text('{"text": "a"}\nb\n{"text": "c"}\n')
    assert answered(store, MAIN, 3, RANKS) == {0: Answer("zero", -1, 3), 2: Answer("two", -1, 3)}


def test_a_finished_evaluation_is_not_asked_again_and_another_is_moved_aside(tmp_path, questions, capsys):
    store, _ = store_of(tmp_path)
    texts = [Answer(f"answer {i}", -i / 8, 2) for i in range(len(questions))]
    scored = exact_match(questions, [each.text for each in texts])
    write_answers(store, MAIN, answer_rows(questions, texts, scored, "exact", "model"))
    write_scores(store, {"scores": 1})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scores.json", "scores.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["question_id"] for row in rows] == [question.id for question in questions]

    store, _ = store_of(tmp_path)
    assert answered(store, MAIN, len(questions), RANKS) == dict(enumerate(texts))
    capsys.readouterr()
    other, _ = store_of(tmp_path, model="another")
    assert answered(other, MAIN, len(questions), RANKS) == {}
    assert "another model" in capsys.readouterr().out
    assert (tmp_path / "scores.jsonl.previous-1").read_text().splitlines()[0] == json.dumps(rows[0])
    Part(other, MAIN, 1, RANKS).keep({0: Answer("x", 0.0, 1)})
    third, _ = store_of(tmp_path, model="third")
    assert answered(third, MAIN, len(questions), RANKS) == {}
    assert (tmp_path / "scores.partial.previous-2").is_dir()


@pytest.mark.parametrize("damage", ["", "[1]", "[" * 100_000, "\udcff"])
def test_damaged_scores_and_identities_are_moved_aside(tmp_path, damage):
    content = damage.encode("utf-8", "surrogateescape")
    for path in (tmp_path / "scores.json", tmp_path / "scores.partial" / "identity.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    open_store(str(tmp_path / "scores.json"), {"of": 1}, [], RANKS)
    assert (tmp_path / "scores.json.previous-1").read_bytes() == content
    assert (tmp_path / "scores.partial.previous-1" / "identity.json").read_bytes() == content
    assert json.loads((tmp_path / "scores.partial" / "identity.json").read_text()) == {"of": 1}


def test_an_output_has_a_name_that_answers_can_lie_beside(tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.json"):
        open_store(str(tmp_path / "scores"), {}, [], RANKS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        open_store(str(tmp_path / "file" / "scores.json"), {}, [], RANKS)


def test_another_models_weights_are_another_model(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    before = model_digest(str(copy))
    assert before == model_digest(str(copy)) == model_digest(str(model))  # copies keep their time of change
    (copy / "evaluation.json").write_text("{}")
    assert model_digest(str(copy)) == before
    weights = copy / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_digest(str(copy)) != before


@pytest.mark.parametrize(
    "name", ["chat_template.json", "video_preprocessor_config.json", "merges.txt", "additional_chat_templates/t.jinja"]
)
def test_another_setting_is_another_model(name, model, tmp_path):
    copied = shutil.copytree(model, tmp_path / "copy")
    before = model_digest(str(copied))
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_text("{}")
    assert model_digest(str(copied)) != before


def test_other_variables_of_the_chat_template_are_another_question(model):
    plain, thinking = EngineOptions(), EngineOptions(chat_template_kwargs='{"enable_thinking": true}')
    assert identity_of(str(model), plain) != identity_of(str(model), thinking)


def test_what_lies_under_an_adapter_is_part_of_the_identity(model, tmp_path):
    base, adapter = shutil.copytree(model, tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    options = EngineOptions()
    before = identity_of(str(adapter), options)
    moved = replace(options, moved={"model_base": str(base)})
    assert identity_of(str(adapter), moved) == before  # the same one, named by the flag
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    after = identity_of(str(adapter), options)
    assert [name for name in after if after[name] != before[name]] == ["model_base"]


def test_another_image_at_its_place_is_another_question(tmp_path):
    image = tmp_path / "a.png"
    image.write_bytes(b"one")
    whole = question.Question("a", Prompt((Message("human", "What?"),), (str(image),)), "What?", "x")
    part = replace(whole, prompt=replace(whole.prompt, images=(Media("image", (FileRef(str(image), 1, 2),)),)))
    before = [question.digest([each]) for each in (whole, part)]
    image.write_bytes(b"two")
    after = [question.digest([each]) for each in (whole, part)]
    image.unlink()
    gone = [question.digest([each]) for each in (whole, part)]
    assert len({*before, *after, *gone}) == 6


@pytest.mark.parametrize(
    ("target", "said"),
    [("nowhere", "model.safetensors|its files can't be read"), ("../weights", "outside its folder")],
)
def test_weights_that_are_no_file_of_their_folder_are_named(target, said, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "model.safetensors").rename(tmp_path / "weights")
    (copy / "model.safetensors").symlink_to(target)
    with pytest.raises(ConfigError, match=rf"^--model_path .*({said})"):
        model_digest(str(copy))


def test_intervals_are_those_of_a_proportion_and_of_the_seed():
    columns = np.array([[1.0]] * 300 + [[0.0]] * 100)
    scored = Scored(columns, [("a",)] * 200 + [()] * 200, exact_match([], []).metrics, columns[:, 0])
    found = estimates(scored, 2000, 0)
    assert list(found) == ["a", "overall"] and found["a"]["accuracy"].high == 1
    assert found["a"]["accuracy"].low == pytest.approx(200 / (200 + 1.96**2))  # all right: still in doubt
    overall = found["overall"]["accuracy"]
    half = 1.96 * (0.75 * 0.25 / 400) ** 0.5  # the normal approximation
    assert overall.value == 0.75
    assert overall.low == pytest.approx(0.75 - half, abs=0.006) and overall.high == pytest.approx(
        0.75 + half, abs=0.006
    )
    assert estimates(scored, 2000, 0) == found == estimates(scored, 2000, 1)
    parts = replace(scored, columns=columns / 2)  # no share of right answers: a bootstrap
    assert estimates(parts, 2000, 0) == estimates(parts, 2000, 0) != estimates(parts, 2000, 1)


def test_what_is_printed_and_written(questions):
    some = [replace(question, reference="yes", kinds=("k",)) for question in questions[:4]]
    scores = as_json({MAIN: yes_no(some, ["yes", "Yes.", "no", "no"])}, 100, 0)
    assert scores["scores"] == {MAIN: {"k": [2.0, 4], "overall": [2.0, 4]}}
    f1 = scores["metrics"][MAIN]["overall"]["f1"]
    assert f1["value"] == pytest.approx(2 / 3) and f1["low"] < f1["value"] < f1["high"]
    assert table(scores)[-1].split() == ["overall", "4", "0.500"]


def test_a_row_says_what_was_expected_and_whether_it_was_given(questions):
    first, second = (replace(question, reference=text) for question, text in zip(questions[:2], ("yes", "A cat.")))
    answers = [Answer("Yes.", -0.25, 3), Answer("a dog", -0.5, 4)]
    scored = exact_match([first, second], [each.text for each in answers])
    rows = answer_rows([first, second], answers, scored, "exact", "model")
    assert [(row["text"], row["reference"], row["score"]) for row in rows] == [
        ("Yes.", "yes", 1.0),
        ("a dog", "A cat.", 0.0),
    ]
    assert [(row["logprob"], row["num_tokens"]) for row in rows] == [(-0.25, 3), (-0.5, 4)]
    assert rows[0]["images"] == list(first.prompt.images) and rows[0]["turn"] == 1


def test_the_reference_of_a_choice_is_shown_as_its_letter():
    assert shown_reference("choice", [1, 4]) == "B"
    assert shown_reference("circular", [7, "C", {"A": "cat", "C": "dog"}]) == "C"
    assert shown_reference("vqa", ["a", "b"]) == ["a", "b"] and shown_reference("exact", "cat") == "cat"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--split", "val"], "--split val needs --data_path: give both"),
        (
            ["--data_path", "x", "--task", "pope", "--split", "val"],
            "--split goes with --task scienceqa, llava and preference: pope's",
        ),
    ],
)
def test_a_split_of_nothing_is_refused(monkeypatch, flags, says):
    parse = runpy.run_path(str(ROOT / "run" / "evaluate.py"))["parse"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--model_path", "m", *flags])
    with pytest.raises(ConfigError, match=says):
        parse(sys.argv[1:])
