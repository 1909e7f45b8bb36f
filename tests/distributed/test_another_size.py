"""Two ranks stop, one goes on at another ZeRO stage: in fp32, and from fp32 to bf16 at another rate."""

import json
from pathlib import Path

import pytest
import torch
import toys
from checkpoints import assembled, break_off
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from launching import ds_config, run_many
from safetensors.torch import load_file

from llava_ds.engine.shards.checkpoint_writer import ENGINE

pytestmark = pytest.mark.long  # every day tests/checkpoint/test_reshape.py shows it in one process

STEPS, SAVED = 6, 3
# name: ZeRO stage before and after
RUNS = {
    "fp32": (3, 1),
    "slower": (3, 2),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Output folders of runs on two ranks, and by "NAME on one" of those that went on on one."""
    folder = tmp_path_factory.mktemp("sizes")
    flags = {
        **toys.write_base(folder / "base"),
        **toys.write_data(folder / "data", "iitiitittiit"),
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "per_device_train_batch_size": 2,  # accumulation follows from the samples of a step where ranks are fewer
        "learning_rate": 2e-3,
        "mm_projector_lr": 1e-3,
        "weight_decay": 0.1,
        "warmup_ratio": 0.3,
        "max_steps": STEPS,
        "save_steps": SAVED,
    }
    whole, moved = [], []
    for name, (before, after) in RUNS.items():
        run = {**flags, "output_dir": folder / name}
        if name != "slower":
            whole.append({**run, "deepspeed_config": ds_config(before)})
        moved.append({**run, "deepspeed_config": ds_config(after), "output_dir": folder / f"{name} on one"})
    run_many(2, folder / "launch-1", whole)
    for name in RUNS:
        break_off(folder / ("fp32" if name == "slower" else name), folder / f"{name} on one", SAVED)
    moved[-1] |= {"learning_rate": 1e-3, "bf16": True, "allow_changed_flags": "learning_rate,bf16"}
    said = run_many(1, folder / "launch-2", moved)
    assert said.count(f"resumed at step {SAVED}: weights and states re-sharded from 2 ranks") == len(RUNS)
    assert said.count("only rounding changes: world_size is 1, was 2") == len(RUNS)
    assert said.count("allowed to change: --learning_rate is 0.001, was 0.002") == 1
    assert said.count("allowed to change: --bf16 is True, was False; bf16 in the DeepSpeed JSON is") == 1
    return {path.name: path for path in folder.iterdir()}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_deepspeed_finds_the_same_weights_in_its_files(folders):
    checkpoint = folders["fp32"] / f"checkpoint-{SAVED}"
    expected = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=ENGINE, exclude_frozen_parameters=True)
    found = assembled(checkpoint, 2, {key: tensor.shape for key, tensor in expected.items()})["weight"]
    assert expected and all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_one_rank_goes_on_with_what_two_were_at(folders):
    before, after = rows(folders["fp32"]), rows(folders["fp32 on one"])
    for key in ("step", "lr", "samples", "tokens", "supervised_tokens"):
        assert [row[key] for row in after] == [row[key] for row in before]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(before, after)) <= 1e-6
    expected, found = (load_file(folders[run] / "model.safetensors") for run in ("fp32", "fp32 on one"))
    assert expected.keys() == found.keys()
    for key, weight in expected.items():
        assert (weight.float() - found[key].float()).abs().max() <= 1e-5, key
        if key.startswith("vision_tower."):
            assert torch.equal(weight, found[key]), key  # frozen


def test_an_allowed_rate_and_precision_count_from_the_checkpoint_on(folders):
    before, after = (rows(folders[name]) for name in ("fp32 on one", "slower on one"))
    groups = len(before[0]["lr"])
    assert groups == 4
    for step, (usual, slower) in enumerate(zip(before, after)):
        language, projector = slice(0, groups - 2), slice(groups - 2, groups)
        half = 0.5 if step >= SAVED else 1.0
        assert slower["lr"][language] == pytest.approx([half * rate for rate in usual["lr"][language]])
        assert slower["lr"][projector] == pytest.approx(usual["lr"][projector])
    assert before[SAVED]["loss"] == pytest.approx(after[SAVED]["loss"], rel=1e-2)
    assert before[SAVED]["loss"] != after[SAVED]["loss"]
    assert (
        load_file(folders["slower on one"] / "model.safetensors")["language_model.lm_head.weight"].dtype
        is torch.bfloat16
    )
