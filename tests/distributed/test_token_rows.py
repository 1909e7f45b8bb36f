"""Rows for added tokens through the launcher: as transformers grows them, on every mesh, in resume and export."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import toys
from known_flags import known_cases
from launching import ds_config, losses, run_many, run_script, tight_config, toy_run
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from llava_ds.data.sample import Message
from llava_ds.extensions.infer.generate import Prompt, answer
from llava_ds.extensions.infer.load import load_model

STEPS, SAVED = 30, 15
ADDED = ("<lift>", "<drop>", "<turn>")
TRAINS = {"lr_scheduler_type": "constant", "learning_rate": 5e-3, "tune_mm_mlp": True, "tune_mm_llm": True}
GROWS = {"resize_token_embeddings": True}
PADDED = {**GROWS, "pad_embeddings_to_multiple_of": 64}
# Runs of a LLaVA that is put together, two steps each.
MESHES = {
    "zero3": (3, {}),
    "zero0": (0, {}),
    "pipeline": (1, {"pipeline_parallel_size": 2}),
    "tensor": (1, {"tensor_parallel_size": 2}),
}
MESHES = known_cases(MESHES)  # fmt: skip


def write_data(folder: Path) -> dict[str, str]:
    """Toy records whose answers spell a token that was added."""
    given = toys.write_data(folder, "itititit")
    file = Path(given["data_path"])
    records = json.loads(file.read_text())
    for record in records:
        for turn in record["conversations"][1::2]:
            turn["value"] = "It is <lift> now."
    file.write_text(json.dumps(records))
    return given


def grow_with_transformers(source: Path, target: Path, rows: int) -> dict[str, str]:
    """The folder as a user would have to make it by hand, with the means as new rows."""
    model = AutoModelForImageTextToText.from_pretrained(source)
    old = model.config.get_text_config().vocab_size
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.weight[old:] = end.weight[:old].mean(0)
    target.mkdir()
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (target / file.name).write_bytes(file.read_bytes())
    model.save_pretrained(target)
    return {"model_name_or_path": str(target)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs, on two ranks in one launch."""
    ready_models = pytest.importorskip("ready_models")
    folder = tmp_path_factory.mktemp("rows")
    data = write_data(folder / "data")
    ready = {**data, **ready_models.write_ready(folder / "base", "smolvlm")}
    toys.add_plain_tokens(folder / "base", *ADDED)
    tight = tight_config(folder)

    def run(name: str, given: dict, **more: object) -> dict[str, object]:
        flags = toy_run(given, folder / name, tight, max_steps=STEPS, **TRAINS, **more)
        return {name: value for name, value in flags.items() if name != "mm_projector_lr"}

    rows = len(AutoTokenizer.from_pretrained(folder / "base"))
    by_hand = {**ready, **grow_with_transformers(folder / "base", folder / "by-hand", rows)}
    saves = {"save_strategy": "steps", "save_steps": SAVED}
    todo = [
        run("grown", ready, **GROWS, **saves),
        run("like-transformers", by_hand),
        run("resumed", ready, **GROWS, **saves, resume=folder / "grown" / f"checkpoint-{SAVED}"),
    ]
    base = toys.write_base(folder / "llava")
    toys.add_plain_tokens(Path(base["model_name_or_path"]), *ADDED)
    for name, (stage, axes) in MESHES.items():
        todo.append(toy_run({**data, **base}, folder / name, ds_config(stage), max_steps=2, **PADDED, **axes))
    (folder / "output").write_text(run_many(2, folder / "launch", todo))
    return folder


def test_a_run_is_the_one_from_a_folder_that_transformers_grew(runs):
    assert losses(runs / "grown") == losses(runs / "like-transformers")
    assert losses(runs / "grown")[-1] < 0.5
    one, other = (load_file(runs / name / "model.safetensors") for name in ("grown", "like-transformers"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    name = next(name for name in one if name.endswith("embed_tokens.weight"))
    before = load_file(runs / "base" / "model.safetensors")[name]
    new = one[name][len(before) :]
    assert len(new) == 3
    torch.testing.assert_close(new[1:], before.mean(0).expand(2, -1))  # of tokens in no record
    assert (new[0] - before.mean(0)).norm() > 0.01


def test_it_resumes_bit_for_bit(runs):
    assert losses(runs / "resumed") == losses(runs / "grown")[SAVED:]
    one, other = (load_file(runs / name / "model.safetensors") for name in ("grown", "resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_export_answers_with_the_token(runs, tmp_path):
    output = (runs / "output").read_text()
    assert output.count("reloaded with transformers, logits differ by") == 3 + len(MESHES)
    loaded = load_model(runs / "grown")
    image = str(next((runs / "data" / "images").glob("*.png")))
    asked = [
        Prompt((Message("human", "<image>\nWhat is it, number 0?"),), (image,)),
        Prompt((Message("human", "Did it <lift>, number 1?"),), ()),
    ]
    assert answer(loaded, asked, max_new_tokens=12) == ["It is <lift> now."] * 2
    # The checkpoint as well, by the flags in run.json.
    run_script("export.py", runs / "grown" / f"checkpoint-{SAVED}", "--output_dir", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == len(load_file(runs / "grown" / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("name", MESHES)
def test_a_llava_grows_on_every_mesh(runs, name):
    curve = losses(runs / "zero0")
    assert len(curve) == 2 and np.allclose(losses(runs / name), curve, rtol=2e-6, atol=0)
    head = load_file(runs / name / "model.safetensors")["language_model.lm_head.weight"]
    assert len(head) == json.loads((runs / name / "config.json").read_text())["text_config"]["vocab_size"] == 448
