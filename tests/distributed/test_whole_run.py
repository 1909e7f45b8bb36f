"""Stage 1, stage 2, a break and a resume, on two ranks: what the runs leave, and that a resume changes nothing."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import toys
from extension_there import if_there
from launching import SECRET, ds_config, losses, run_many, tight_config
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration

from llava_ds.checkpoint.checkpoint_files import trained_weights
from llava_ds.checkpoint.trainer_file import checkpoint_problem
from llava_ds.checkpoint.verification import newest_whole
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.images.decode import load_image
from llava_ds.data.sample import Message
from llava_ds.data.templates import render_prompt
from llava_ds.engine.shards.checkpoint_writer import ENGINE
from llava_ds.export.from_checkpoint import restore

STEPS, SAVED = 6, 3
RESUMED = ("stage1", "stage2", "stage2_auto")  # at ZeRO 2, 3 and 2


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Output folders: stage 1, stage 2, and each of them broken off after SAVED steps and gone on with."""
    folder = tmp_path_factory.mktemp("whole")
    base = toys.write_base(folder / "base", attention_dropout=0.1)  # so that random states matter
    captions = toys.write_data(folder / "captions", "i" * 12, plain=True)
    talks = toys.write_data(folder / "talks", "iitiitiiitii")
    common = {
        **base,
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "train_batch_size": 4,
        "learning_rate": 2e-3,
        "warmup_ratio": 0.1,
        "max_steps": STEPS,
        "save_steps": SAVED,
    }
    stage1 = {**common, **captions, "version": "plain", "tune_mm_mlp_adapter": True, "deepspeed_config": ds_config(2)}
    stage2 = {
        **common,
        **talks,
        "version": "v1",
        "image_aspect_ratio": "pad",
        "deepspeed_config": tight_config(folder),
        "pretrain_mm_mlp_adapter": folder / "stage1" / "mm_projector.bin",
    }
    zero2 = json.loads(Path(ds_config(2)).read_text())
    (folder / "with_key.json").write_text(json.dumps({**zero2, "comet": {"enabled": False, "api_key": SECRET}}))
    names = {
        "stage1": stage1,
        "stage2": stage2,
        "stage2_zero2": {**stage2, "deepspeed_config": folder / "with_key.json"},
    }
    auto = if_there("auto_layers", gradient_checkpointing="auto", activation_memory_gb=0.002)
    auto |= if_there("planning", tokens_per_micro_batch="auto")
    names["stage2_auto"] = {**names["stage2_zero2"], **auto}
    runs = [{**flags, "output_dir": folder / name} for name, flags in names.items()]
    run_many(2, folder / "launch-1", runs)

    resumed = []
    for name in RESUMED:
        flags, broken = names[name], folder / f"{name}_resumed"
        books = broken if name == "stage1" else broken / "run"  # in the folder itself, as earlier versions left them
        books.mkdir(parents=True)
        shutil.copytree(folder / name / f"checkpoint-{SAVED}", broken / f"checkpoint-{SAVED}")
        shutil.copy(folder / name / "run" / "metrics.jsonl", books)  # holds later steps too, which will come again
        torn = broken / f"checkpoint-{STEPS}"  # the newest one, but its saving was never finished
        shutil.copytree(folder / name / f"checkpoint-{STEPS}", torn)
        (torn / "manifest.json").unlink()
        resumed.append({**flags, "output_dir": broken})
    resumed[-1] |= if_there("auto_layers", activation_memory_gb=0.001)  # as if less memory were free now
    output = run_many(2, folder / "launch-2", resumed)
    assert SECRET not in output
    assert output.count(f"checkpoint-{STEPS} is not used: it has no manifest.json") == len(RESUMED)
    assert output.count("resuming from") == len(RESUMED)
    return {path.name: path for path in folder.iterdir()} | {"root": folder}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(folders, name):
    whole, resumed = folders[name], folders[f"{name}_resumed"]
    file = "mm_projector.safetensors" if name == "stage1" else "model.safetensors"
    expected, found = load_file(whole / file), load_file(resumed / file)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert losses(whole) == losses(resumed)
    assert newest_whole(resumed)[0] == resumed / f"checkpoint-{STEPS}"


def test_stage_1_trains_the_projector_and_leaves_it_with_llavas_keys(folders):
    saved = torch.load(folders["stage1"] / "mm_projector.bin", weights_only=True)
    prefix = "model.mm_projector"
    assert set(saved) == {f"{prefix}.0.weight", f"{prefix}.0.bias", f"{prefix}.2.weight", f"{prefix}.2.bias"}
    assert saved[f"{prefix}.0.weight"].shape == (32, 16)


def test_stage_2_starts_from_the_projector_and_trains_the_language_model_but_not_the_tower(folders):
    base = folders["base"]
    exported = load_file(folders["stage2"] / "model.safetensors")
    language, tower = load_file(base / "llama" / "model.safetensors"), load_file(base / "clip" / "model.safetensors")
    for name, tensor in language.items():
        found = exported[f"language_model.{name}"][: len(tensor)]  # <image> is one more row
        assert not torch.equal(found, tensor), name
    for name, tensor in tower.items():  # all layers, those that training never built among them
        assert torch.equal(exported["vision_tower.vision_model." + name.removeprefix("vision_model.")], tensor), name
    projector = torch.load(folders["stage1"] / "mm_projector.bin", weights_only=True)["model.mm_projector.0.weight"]
    moved = (exported["multi_modal_projector.linear_1.weight"] - projector).abs().max()
    assert 0 < moved < 0.05  # six steps of at most 2e-3


def test_zero_2_and_zero_3_export_the_same_model(folders):
    one, other = (load_file(folders[name] / "model.safetensors") for name in ("stage2", "stage2_zero2"))
    assert one.keys() == other.keys()
    assert max((one[key] - other[key]).abs().max() for key in one) < 1e-5


def test_transformers_opens_the_result_and_its_processor_prepares_what_training_saw(folders):
    path = folders["stage2"]
    model = LlavaForConditionalGeneration.from_pretrained(path)
    processor = AutoProcessor.from_pretrained(path)
    image_file = folders["talks"] / "images" / "0.png"
    messages = [Message("human", "<image>\nWhat is it?")]
    chat = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
        add_generation_prompt=True,
    )
    assert chat == "<s>" + render_prompt(messages, "v1")
    inputs = processor(text=chat, images=load_image(str(image_file), 10**6), return_tensors="pt")

    ids = Encoder(processor.tokenizer, EncodingOptions("v1", 512)).prompt_ids(messages, [9])
    image_token = model.config.image_token_id
    assert inputs["input_ids"][0].tolist() == [image_token if token == -200 else token for token in ids]
    assert model(**inputs).logits.isfinite().all()
    assert str(folders["base"]) not in (path / "config.json").read_text()

    texts = [chat, chat.replace("What is it?", "And here, what is it?")]
    together = processor(text=texts, images=[load_image(str(image_file), 10**6)] * 2, padding=True, return_tensors="pt")
    new = model.generate(**together, max_new_tokens=3, do_sample=False)[0, -3:]
    alone = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, -3:]
    assert new.tolist() == alone.tolist()


def test_no_secret_is_left_in_any_file(folders):
    left = [file for file in folders["stage2_zero2"].rglob("*") if file.is_file()]
    assert {"run.json", "ds_config.json", "README.md", "manifest.json"} <= {file.name for file in left}
    assert [file.name for file in left if SECRET.encode() in file.read_bytes()] == []
    assert '"api_key": "<redacted>"' in (folders["stage2_zero2"] / "run" / "ds_config.json").read_text()


@pytest.mark.parametrize("name", ["stage2", "stage2_zero2"])
def test_deepspeeds_own_script_works_as_people_call_it(folders, name, tmp_path, monkeypatch):
    checkpoint = folders[name] / f"checkpoint-{STEPS}"
    monkeypatch.chdir(checkpoint)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", ".", str(tmp_path)])
    runpy.run_path("zero_to_fp32.py", run_name="__main__")
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    trained, _ = trained_weights(checkpoint / ENGINE)
    assert found.keys() == {entry.name for entry in trained}
    assert all(torch.equal(found[entry.name], entry.read().float()) for entry in trained)
    assert checkpoint_problem(checkpoint) is None  # it left nothing there


def test_a_checkpoint_with_its_projector_needs_no_file_of_stage_1(folders, monkeypatch, tmp_path):
    projector = folders["stage1"] / "mm_projector.bin"
    projector.rename(projector.with_suffix(".away"))
    try:
        monkeypatch.chdir(tmp_path)
        restored = restore(folders["stage2"] / f"checkpoint-{STEPS}", {}, None)
    finally:
        projector.with_suffix(".away").rename(projector)
    exported = load_file(folders["stage2"] / "model.safetensors")
    (weight,) = (entry for entry in restored.entries if entry.name == "projector.layers.0.weight")
    assert torch.equal(weight.read(), exported["multi_modal_projector.linear_1.weight"])


def test_what_a_run_leaves(folders):
    path = folders["stage2"]
    record = json.loads((path / "run" / "run.json").read_text())
    assert record["arguments"]["learning_rate"] == 2e-3
    assert record["num_steps"] == STEPS
    assert '"auto"' not in (path / "run" / "ds_config.json").read_text()
    rows = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["lr"] == [0.0] * len(rows[0]["lr"])  # the warm-up starts from 0
    assert all(row["samples"] == 4 and row["supervised_tokens"] < row["tokens"] for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert (path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
