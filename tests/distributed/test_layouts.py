"""Layouts of published data sets train as they lie on the disk, each on the text that its authors mean."""

import io
import json
import math
import runpy
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import toys
from launching import ROOT, command_line, ds_config, losses, run_many, toy_run
from PIL import Image

from llava_ds.extensions.table import EXTENSIONS

NUMBER = 4  # records of each, one of which a step takes
ANSWERS = ("yes", "two", "It is a red cat.", "no dog")  # of the toy tokenizer's words


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (30, 40 + number, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def embedded(number: int) -> dict:
    return {"bytes": png(number), "path": None}


def parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def images(folder: Path) -> Path:
    for number in range(NUMBER):
        (folder / f"{number}.png").write_bytes(png(number))
    return folder


# Each function writes a layout into a folder, and returns what --data_path is, and further flags.


def cauldron(folder: Path) -> tuple[Path, dict]:
    pairs = [
        [{"user": "Is it red?", "assistant": "no", "source": "VQAv2"}, {"user": "What?", "assistant": a}]
        for a in ANSWERS
    ]
    rows = [{"images": [embedded(i)], "texts": texts} for i, texts in enumerate(pairs)]
    return parquet(folder / "data.parquet", rows), {}


def finevision(folder: Path) -> tuple[Path, dict]:
    """A hub's clone with two subsets."""
    for i, answer in enumerate(ANSWERS):
        row = {
            "images": [embedded(i)],
            "texts": [{"user": "What?", "assistant": answer}],
            "source": "x",
            "relevance_min": 4,
        }
        parquet(folder / f"{'ai2d' if i % 2 else 'chart'}/train-{i:05}-of-00004.parquet", [row])
    return folder, {}


def trl(folder: Path) -> tuple[Path, dict]:
    """As `datasets` saves it, with an answer in the prompt that is not learned."""
    prompt = [*(("user", "Is it red?"), ("assistant", "no"), ("user", "What?"))]
    rows = [
        {
            "images": [embedded(i)],
            "prompt": [{"role": role, "content": text} for role, text in prompt],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for i, answer in enumerate(ANSWERS)
    ]
    table = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(folder / "saved")
    return folder / "saved", {"data_split": "train"}


def h4_vsft(folder: Path) -> tuple[Path, dict]:
    def part(text: str | None = None, index: int | None = None) -> dict:
        return {"index": index, "text": text, "type": "image" if text is None else "text"}

    rows = [
        {
            "images": [embedded(i), embedded(i + 1)],
            "messages": [
                {"role": "user", "content": [part("One:\n"), part(index=0), part("two:\n"), part(index=1)]},
                {"role": "assistant", "content": [part(answer)]},
            ],
        }
        for i, answer in enumerate(ANSWERS)
    ]
    return parquet(folder / "data.parquet", rows), {}


def alpaca(folder: Path) -> tuple[Path, dict]:
    rows = [
        {
            "instruction": "<image>What?",
            "input": "Be brief.",
            "output": answer,
            "images": [f"{i}.png"],
            "history": [["Hi", "no"]],
        }
        for i, answer in enumerate(ANSWERS)
    ]
    (folder / "data.json").write_text(json.dumps(rows))
    return folder / "data.json", {"image_folder": images(folder)}


def ms_swift(folder: Path) -> tuple[Path, dict]:
    rows = [
        {"query": "What?", "response": answer, "history": [], "system": "Be brief.", "images": [f"{i}.png"]}
        for i, answer in enumerate(ANSWERS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl", {"image_folder": images(folder)}


def csv_table(folder: Path) -> tuple[Path, dict]:
    rows = [f'{i}.png,"What, then?","{answer}"' for i, answer in enumerate(ANSWERS)]
    (folder / "data.csv").write_text("photo,question,answer\n" + "\n".join(rows), encoding="utf-8-sig")
    return folder / "data.csv", {"image_folder": images(folder), "data_columns": "image=photo"}


def vqa(folder: Path) -> tuple[Path, dict]:
    """VQAv2's answers, and splits of a hub's clone."""
    rows = [
        {
            "image": embedded(i),
            "question": "What?",
            "answers": [{"answer": text, "answer_confidence": "yes"} for text in ("maybe", answer, answer)],
            "question_type": "what",
        }
        for i, answer in enumerate(ANSWERS)
    ]
    parquet(folder / "data/testdev-00000-of-00001.parquet", rows[:1])
    parquet(folder / "data/train-00000-of-00001.parquet", rows)
    measured = {"eval_data_path": folder, "eval_data_split": "testdev", "eval_steps": 2}
    return folder, {"data_split": "train", **measured}


def json_text(folder: Path) -> tuple[Path, dict]:
    talks = [[{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": answer}] for answer in ANSWERS]
    rows = [{"image": embedded(i), "conversations": json.dumps(talk)} for i, talk in enumerate(talks)]
    return parquet(folder / "data.parquet", rows), {}


def object_of_lists(folder: Path) -> tuple[Path, dict]:
    rows = [
        {"image": embedded(i), "conversations": {"from": ["human", "gpt"], "value": ["<image>\nWhat?", answer]}}
        for i, answer in enumerate(ANSWERS)
    ]
    return parquet(folder / "data.parquet", rows), {}


def image_folder(folder: Path) -> tuple[Path, dict]:
    rows = [f"{i}.png,What?,{answer}" for i, answer in enumerate(ANSWERS)]
    (images(folder) / "metadata.csv").write_text("file_name,question,answer\n" + "\n".join(rows))
    return folder, {}


def webdataset(folder: Path) -> tuple[Path, dict]:
    """The turns themselves as .json, dots in the names, all images behind all texts."""
    talks = [[{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": answer}] for answer in ANSWERS]
    members = [(f"img_0.{i}.json", json.dumps(talk).encode()) for i, talk in enumerate(talks)]
    members += [(f"img_0.{i}.png", png(i)) for i in range(NUMBER)]
    with tarfile.open(folder / "data.tar", "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return folder / "data.tar", {}


def preferences(folder: Path) -> tuple[Path, dict]:
    """TRL's vision form of preferences, as `datasets` saves it."""
    rows = [
        {
            "images": [embedded(i)],
            "prompt": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]}
            ],
            **{
                name: [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
                for name, text in (("chosen", answer), ("rejected", "maybe"))
            },
        }
        for i, answer in enumerate(ANSWERS)
    ]
    table = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    table.save_to_disk(folder / "saved")
    return folder / "saved", {"objective": "dpo", "learning_rate": 1e-6}


LAYOUTS = {
    each.__name__: each
    for each in (
        *(cauldron, finevision, trl, h4_vsft, alpaca, ms_swift, csv_table, vqa, json_text, object_of_lists),
        *(image_folder, webdataset, *((preferences,) if "preference" in EXTENSIONS else ())),
    )
}
EARLIER = {"cauldron": "no</s>", "alpaca": "no</s>"}  # answers of earlier turns, which are learned


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict[str, object]]:
    """The flags of each layout's run of two steps, after all ran in one launch."""
    folder = tmp_path_factory.mktemp("layouts")
    base = toys.write_base(folder / "base")
    flags = {}
    for name, write in LAYOUTS.items():
        (folder / name).mkdir()
        path, more = write(folder / name)
        given = {
            **base,
            "data_path": path,
            "max_steps": 2,
            "train_batch_size": 2,
            "per_device_train_batch_size": 1,
            **more,
        }
        flags[name] = toy_run(given, folder / f"out-{name}", ds_config(0))
    run_many(2, folder / "launch", list(flags.values()))
    return flags


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_on_the_text_that_is_meant(runs, name, tmp_path):
    found = losses(Path(runs[name]["output_dir"]))
    assert len(found) == 2
    if name == "preferences":
        assert found[0] == pytest.approx(math.log(2), abs=1e-6)
        return
    if "eval_data_split" in runs[name]:
        [measured] = (Path(runs[name]["output_dir"]) / "run" / "evals.jsonl").read_text().splitlines()
        assert json.loads(measured)["samples"] == 1
    rows = tmp_path / "rows.jsonl"
    inspect = runpy.run_path(str(ROOT / "run" / "inspect_data.py"))["main"]
    inspect(command_line({**runs[name], "jsonl": rows, "num_samples": 1}))
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    learned = [row.get("supervised_text", row) for row in found]
    expected = [f"{EARLIER.get(name, '')}{answer}</s>" for answer in ANSWERS]
    assert sorted(learned) == sorted(expected)
    assert all(row["num_image_tokens"] for row in found)
