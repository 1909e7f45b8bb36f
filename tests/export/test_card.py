"""The model card: the report's figures, scores once there are some, and code that was run."""

import json
import os
import re
import runpy
import shlex

import pytest
import torch
import toys
from exporting import RANKS, export
from PIL import Image

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.config.recipes import RUN
from llava_ds.data.sample import Message
from llava_ds.engine.construct import build_model
from llava_ds.export.card import EVALUATIONS_END, add_evaluation, write_card, write_conversion_card
from llava_ds.extensions.infer.generate import Prompt, answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.cli import COMMANDS, split
from llava_ds.tracking.page import write_report

RECORD = {"num_steps": 40, "versions": {"torch": "2"}}


def scores(right: float, kind: str = "colour") -> dict:
    return {"metric": "accuracy", "scores": {"with picture": {kind: [right, 4], "overall": [right, 4]}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported toy with its card, where a run has left its metrics."""
    out = tmp_path_factory.mktemp("card") / "my model"
    model_args = ModelArguments(**toys.write_base(out.parent / "base"), version="v1")
    args = Arguments(model_args, DataArguments(data_path="/d/mine.json"), TrainingArguments(), frozenset())
    plan = plan_model(args.model, 512)
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, RANKS)
    export(model, plan, args.model, plan.tower.image_options(args), out)
    rows = [
        {"step": n, "epoch": n / 20, "loss": 3 / n, "samples": 2, "tokens": 1000, "supervised_tokens": 10}
        for n in range(1, 41)
    ]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "run.json").write_text(json.dumps(RECORD))
    write_card(out, "hf", args, out, RECORD)
    return out


def test_its_loss_is_that_of_the_report(folder):
    card = (folder / "README.md").read_text()
    page = write_report(folder, folder.parent / "report.html").read_text()
    loss = re.search(r"- loss at the end \(running mean\): ([\d.]+)", card)[1]
    assert f"<b>{loss}</b><span>loss at the end (running mean)</span>" in page
    assert "- optimizer steps: 40 of 40, 2.00 epochs" in card and "- tokens: 40,000" in card
    args = Arguments(
        ModelArguments(model_name_or_path="/m/x", vision_tower="/m/y"),
        DataArguments(),
        TrainingArguments(),
        frozenset(),
    )
    write_card(folder.parent, "projector", args, folder, RECORD, step=20)  # of a checkpoint
    assert "- optimizer steps: 20 of 40, 1.00 epochs" in (folder.parent / "README.md").read_text()


def test_the_code_in_it_asks_the_model(folder, monkeypatch, capsys):
    card = (folder / "README.md").read_text()
    assert "in the folder that holds `my model`" in card
    monkeypatch.chdir(folder.parent)
    Image.new("RGB", (24, 24), "red").save("image.png")
    prompt = Prompt((Message("human", "<image>\nWhat is in the image?"),), ("image.png",))
    [expected] = answer(load_model(folder), [prompt], max_new_tokens=64)
    [code] = re.findall(r"^```python\n(.*?)^```", card, re.S | re.M)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == expected.strip() != ""
    _, *words = shlex.split(re.search(r"^ +(llava-ds .*)$", card, re.M)[1])
    _, name, flags = split(words)
    runpy.run_path(str(RUN / COMMANDS[name][0]))["main"]([*flags, "--max_new_tokens", "64"])
    readable = expected.rsplit("\ufffd", 1)[-1]  # what is no character may be streamed as another
    assert readable and readable in capsys.readouterr().out


def test_scores_are_put_in_once(folder, tmp_path):
    path = tmp_path / "README.md"
    before = (folder / "README.md").read_text()
    path.write_text(before)
    assert add_evaluation(tmp_path, "heldout.jsonl", scores(1.0)) and add_evaluation(tmp_path, "gqa", scores(2.0))
    assert add_evaluation(tmp_path, "heldout.jsonl", scores(3.0, kind="a|<b>"))
    card = path.read_text()
    assert card.count("## Evaluation: heldout.jsonl") == 1 and card.count("## Evaluation: gqa") == 1
    assert "| accuracy | questions | with picture |" in card and "| overall | 4 | 0.750 |" in card
    assert "| a\\|\\<b\\> | 4 | 0.750 |" in card and "| colour | 4 | 0.500 |" in card and "0.250" not in card
    assert re.sub(r"<!-- evaluation: .*<!-- end of evaluation -->\n", "", card, flags=re.S) == before
    assert card.index("## Evaluation") < card.index("## Asking it")
    assert add_evaluation(tmp_path, "x -->\n<script>", scores(4.0)) and "<script>" not in path.read_text()


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "large", "folder"])
def test_a_card_that_is_no_file_of_the_folder_is_none(kind, tmp_path):
    path, elsewhere = tmp_path / "model" / "README.md", tmp_path / "theirs.md"
    path.parent.mkdir()
    elsewhere.write_text(EVALUATIONS_END)
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "link": lambda: path.symlink_to(elsewhere),
        "large": lambda: path.write_text(EVALUATIONS_END + " " * 2**20),
        "folder": path.mkdir,
    }[kind]()
    assert not add_evaluation(path.parent, "x", scores(1.0))
    assert elsewhere.read_text() == EVALUATIONS_END and path.is_symlink() == (kind in ("device", "link"))


def test_a_card_of_somebody_elses_is_left_alone(tmp_path):
    assert not add_evaluation(tmp_path, "x", scores(1.0)) and not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_text("# Mine\n")
    assert not add_evaluation(tmp_path, "x", scores(1.0))
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    write_conversion_card(tmp_path, "llava", tmp_path / "source")
    assert (
        add_evaluation(tmp_path, "x", scores(1.0)) and "| overall | 4 | 0.250 |" in (tmp_path / "README.md").read_text()
    )
