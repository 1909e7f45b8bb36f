"""run/inspect_data.py shows what training would see, and every record exactly once."""

import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import llavas
import numpy as np
import pytest
import toys
from extension_there import needs_extension
from launching import ROOT
from PIL import Image, ImageDraw

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, ConfigError

SCRIPT = ROOT / "run" / "inspect_data.py"


@pytest.fixture(scope="module")
def inspect_data():
    spec = importlib.util.spec_from_file_location("inspect_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def run(inspect_data, tmp_path: Path, flags: dict[str, str], *more: str) -> list[str]:
    pairs = {**flags, "cache_dir": str(tmp_path / "cache"), "model_max_length": "512"}
    inspect_data([*(token for name, value in pairs.items() for token in (f"--{name}", value)), *more])


def test_every_record_has_one_line(inspect_data, tmp_path, toy_base, capsys, tokenizer):
    data = toys.write_data(tmp_path / "d", "itti")
    path = Path(data["data_path"])
    records = json.loads(path.read_text())
    records.insert(2, {"id": "bad", "conversations": 3})
    path.write_text(json.dumps(records))
    out = tmp_path / "out.jsonl"
    run(inspect_data, tmp_path, {**toy_base, **data}, "--jsonl", str(out), "--learning_rate", "1e-3")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["s0", "s1", "bad", "s2", "s3"]
    assert set(rows[2]) == {"id", "rejected"} and rows[2]["rejected"]
    for row, record in ((rows[i], records[i]) for i in (0, 1, 3, 4)):
        answers = [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]
        assert row["supervised_text"] == "".join(f"{answer}</s>" for answer in answers)
        assert len(row["input_ids"]) == len(row["labels"])
        assert row["num_image_tokens"] == row["input_ids"].count(IMAGE_TOKEN_INDEX) == 9 * ("image" in record)
        assert len(row["image_sizes"]) == ("image" in record)
        assert all(b in (a, IGNORE_INDEX) for a, b in zip(row["input_ids"], row["labels"]))
    shown = capsys.readouterr().out
    assert "5 records: 4 accepted, 1 rejected" in shown and shown.count("\n--- ") == 3 and ">>>" in shown


def test_records_can_not_steer_the_terminal(inspect_data, tmp_path, toy_base, capsys):
    data = toys.write_data(tmp_path / "d", "tti")
    path = Path(data["data_path"])
    good, bad, missing = json.loads(path.read_text())
    escape = "\x1b[2J\n\x9b2J"
    records = [{**good, "id": escape}, {**bad, "id": escape, "conversations": 3}, {**missing, "image": f"{escape}.png"}]
    path.write_text(json.dumps(records))
    out = tmp_path / "out.jsonl"
    run(inspect_data, tmp_path, {**toy_base, **data}, "--jsonl", str(out))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x9b" not in shown and "--- \\x1b[2J\\n" in shown
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [escape, "\\x1b[2J\\n\\x9b2J", "s2"]
    assert "\x1b" not in rows[2]["rejected"] and "left out:" in shown
    assert f"  the first: {path}: record 1 (" in shown


def test_the_page_shows_images_and_what_was_left_out(inspect_data, tmp_path, toy_base):
    data = toys.write_data(tmp_path / "d", "iti")
    Path(data["image_folder"], "2.png").unlink()
    page = tmp_path / "page.html"
    run(inspect_data, tmp_path, {**toy_base, **data}, "--html", str(page), "--num_samples", "0")
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 1 and "<mark>" in text
    assert "left out" in text and "2.png" in text


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl"])
def test_boxes_are_drawn_on_the_objects(inspect_data, tmp_path, toy_base, family):
    """They come from the numbers in the text: fractions of a padded square, pixels of a resized image, thousandths."""
    write_ready = pytest.importorskip("ready_models").write_ready
    flags = {**toy_base, "image_aspect_ratio": "pad"}
    if family != "llava":
        flags = write_ready(tmp_path / "model", family)
    scene, box = Image.new("RGB", (300, 180), "grey"), (60, 30, 150, 120)
    ImageDraw.Draw(scene).rectangle(box, fill="yellow")
    scene.save(tmp_path / "0.png")
    talk = [{"from": "human", "value": "<image>\nWhere is it?"}, {"from": "gpt", "value": "<bbox> <bbox>"}]
    record = {"image": "0.png", "conversations": talk, "objects": {"bbox": [box, [240, 150]]}}
    (tmp_path / "data.json").write_text(json.dumps([record]))
    page = tmp_path / "page.html"
    data = {"data_path": str(tmp_path / "data.json"), "image_folder": str(tmp_path)}
    run(inspect_data, tmp_path, {**flags, **data}, "--html", str(page), "--num_samples", "0")
    [png] = re.findall(r"data:image/png;base64,([^\"]+)", page.read_text())
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))).astype(int)
    scale = shown.shape[1] / 300

    def place(mask) -> np.ndarray:
        rows, columns = np.nonzero(mask)
        return np.array([columns.min(), rows.min(), columns.max(), rows.max()]) / scale

    red, green, blue = shown[..., 0], shown[..., 1], shown[..., 2]
    outline = (red > 200) & (green < 100) & (blue < 100)  # the first colour of boxes
    assert np.abs(place(outline) - box).max() <= 4
    object_inside = (red > 200) & (green > 200) & (blue < 100)
    assert np.abs(place(object_inside) - (np.array(box) + [3, 3, -3, -3])).max() <= 4
    point = place((green > 200) & (red < 100) & (blue < 100))
    assert np.abs((point[:2] + point[2:]) / 2 - [240, 150]).max() <= 3
    assert "boxes are written as " in page.read_text()


def test_the_tokenizer_alone_is_enough(inspect_data, tmp_path, toy_base, capsys):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in Path(toy_base["model_name_or_path"]).glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    data = toys.write_data(tmp_path / "d", "t")
    run(inspect_data, tmp_path, {"model_name_or_path": str(folder), **data})
    assert "no --vision_tower" in capsys.readouterr().out


def test_what_training_would_refuse_is_refused_or_said(inspect_data, tmp_path, toy_base, capsys):
    data = toys.write_data(tmp_path / "d", "t")
    for version, expected in (("llama_3", "needs '<|start_header_id|>'"), ("chat_template", "has none")):
        with pytest.raises(
            ConfigError, match=re.escape(f"--model_name_or_path {toy_base['model_name_or_path']}: ")
        ) as e:
            run(inspect_data, tmp_path, {**toy_base, **data, "version": version})
        assert expected in str(e.value)
    run(inspect_data, tmp_path, {**toy_base, **data}, "--model_max_length", "513")
    assert "--model_max_length is 513, but the language model was trained for 512" in capsys.readouterr().out


@needs_extension("mixtures")
def test_a_ready_model_that_training_would_refuse_has_one_reason(inspect_data, tmp_path, capsys):
    write_ready = pytest.importorskip("ready_models").write_ready
    flags = write_ready(tmp_path / "model", "smolvlm")
    flags |= {**toys.write_data(tmp_path / "d", "t"), "moe_enable": "True"}
    with pytest.raises(ConfigError) as refused:
        run(inspect_data, tmp_path, flags)
    [line] = str(refused.value).splitlines()
    assert line.startswith("a ready model needs MLPs without routers ")
    assert "training would end" not in capsys.readouterr().out


def test_marks_that_the_tokenizer_lacks_are_added_to_show_the_ids(inspect_data, tmp_path, toy_base, capsys, tokenizer):
    out = tmp_path / "out.jsonl"
    data = toys.write_data(tmp_path / "d", "i")
    run(inspect_data, tmp_path, {**toy_base, **data}, "--mm_use_im_start_end", "True", "--jsonl", str(out))
    ids = json.loads(out.read_text())["input_ids"]
    first = ids.index(IMAGE_TOKEN_INDEX)
    assert [ids[first - 1], ids[first + 9]] == [len(tokenizer), len(tokenizer) + 1]
    assert "added to the tokenizer: <im_start>, <im_end>" in capsys.readouterr().out


def test_a_llava_shows_its_images_as_it_was_trained(inspect_data, tmp_path, toy_base, capsys, tokenizer):
    flags = llavas.write_hf(tmp_path / "hf", toy_base, llavas.hf_model(toy_base, "llava_next"))
    out = tmp_path / "out.jsonl"
    data = toys.write_data(tmp_path / "d", "i")
    run(inspect_data, tmp_path, {**flags, **data}, "--jsonl", str(out))
    said = capsys.readouterr().out
    assert "is a LLaVA in transformers' format (llava_next); taken from it: --mm_projector_type" in said
    assert json.loads(out.read_text())["num_image_tokens"] > 9  # tiles of an anyres picture


def test_a_file_that_can_not_be_written_is_refused_before_the_work(inspect_data, tmp_path):
    with pytest.raises(ConfigError) as caught:
        inspect_data(["--jsonl", str(tmp_path / "none" / "a.jsonl"), "--html", str(tmp_path)])
    first, second = str(caught.value).splitlines()
    assert f"the folder {tmp_path / 'none'} does not exist" in first and second.startswith(
        f"--html {tmp_path} can't be written"
    )


def test_bad_input_is_one_message(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--data_path", tmp_path / "none.json\x1b(B"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--data_path {tmp_path / 'none.json'}\\x1b(B: no such file or folder" in done.stderr


def test_names_of_files_that_are_no_utf8_are_shown_escaped(inspect_data, tmp_path, toy_base):
    folder = tmp_path / os.fsdecode(b"f\xfflder")
    data = toys.write_data(folder, "it")
    renamed = Path(data["data_path"]).rename(folder / os.fsdecode(b"d\xe9.json"))
    html, rows = tmp_path / "page.html", tmp_path / "rows.jsonl"
    run(
        inspect_data,
        tmp_path,
        {**toy_base, **data, "data_path": str(renamed)},
        "--html",
        str(html),
        "--jsonl",
        str(rows),
    )
    assert "d\\udce9.json" in html.read_text() and len(rows.read_text().splitlines()) == 2


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "gemma3"])
def test_tokens_without_a_row_are_named_and_their_records_rejected(inspect_data, tmp_path, capsys, family):
    """Until the embedding is grown; a record that spells none is taken in any case."""
    write_ready = pytest.importorskip("ready_models").write_ready
    base = toys.write_base(tmp_path / "m") if family == "llama" else write_ready(tmp_path / "m", family)
    toys.add_plain_tokens(Path(base["model_name_or_path"]), "<press>", "<hold>")
    talk = [[{"from": "human", "value": "And?"}, {"from": "gpt", "value": text}] for text in ("On.", "<hold> it.")]
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"id": str(i), "conversations": turns} for i, turns in enumerate(talk)]))
    flags = {**base, "data_path": str(file)}
    run(inspect_data, tmp_path, flags)
    shown = capsys.readouterr().out
    assert re.search(
        r"tokens of the tokenizer without one of the \d+ rows of .*: '<press>' \(id \d+\), '<hold>'", shown
    )
    assert "2 records: 1 accepted, 1 rejected" in shown
    assert re.search(r"data\.json: record 1 \(1\): the text spells the token '<hold>' \(id \d+\), and", shown)
    run(inspect_data, tmp_path, flags, "--resize_token_embeddings", "True", "--pad_embeddings_to_multiple_of", "32")
    shown = capsys.readouterr().out
    assert (
        "2 records: 2 accepted, 0 rejected" in shown
        and "a multiple of 32" in shown
        and "tokens of the tokenizer without" not in shown
    )


OPEN = "{%- if add_generation_prompt -%}{{ '[OPEN]' }}{%- endif -%}"
TURNS = "{%- for m in messages -%}{{ m['content'] + eos_token }}{%- endfor -%}"


@needs_extension("rl")
@pytest.mark.parametrize("objective", ["grpo", "ppo"])
@pytest.mark.parametrize("place", ["question", "answer", "prompt"])
def test_a_prompt_to_draw_answers_for_has_no_token_without_a_row(inspect_data, tmp_path, capsys, objective, place):
    """Also where only the prompt that is asked spells it, and no text that is learned."""
    base = toys.write_base(tmp_path / "m")
    folder = Path(base["model_name_or_path"])
    toys.add_plain_tokens(folder, "<hold>", "[OPEN]")
    asked, answer = "<hold>?" if place == "question" else "And?", "<hold>" if place == "answer" else "Yes."
    talk = [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for q, a in ((asked, answer), ("And?", "On."))]
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"id": str(i), "conversations": turns} for i, turns in enumerate(talk)]))
    flags = {**base, "data_path": str(file), "objective": objective, "reward_funcs": "exact"}
    if place == "prompt":
        (folder / "chat_template.jinja").write_text(TURNS + OPEN)
        flags["version"] = "chat_template"
    run(inspect_data, tmp_path, flags)
    shown, token = capsys.readouterr().out, "[OPEN]" if place == "prompt" else "<hold>"
    assert f": record 0 (0): the text spells the token {token!r} (id " in shown
    assert "train with --resize_token_embeddings True" in shown
    assert f"2 records: {0 if place == 'prompt' else 1} accepted, {2 if place == 'prompt' else 1} rejected" in shown
