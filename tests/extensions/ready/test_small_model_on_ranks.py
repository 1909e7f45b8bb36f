"""make ready, shortened: a small model from a seed learns by SFT, then by rewards with LoRA, and both are scored."""

import json

import pytest
from extension_there import needs_extension
from known_flags import needs
from launching import ROOT, ds_config, run_many, run_script

from llava_ds.extensions.ready.small_model import write_start
from llava_ds.files.jsonl import read_metrics
from llava_ds.tiny.scene_files import write_dataset


@pytest.mark.long
@needs("lora_enable", "reward_funcs")
@needs_extension("benchmarks")
def test_a_small_model_learns_by_sft_then_by_rewards(tmp_path):
    scenes, cache = tmp_path / "scenes", tmp_path / "cache"
    write_dataset(scenes, num_pretrain=320, num_finetune=100, num_heldout=6)
    write_start(tmp_path, scenes, seed=3, questions=32, heldout=8)
    short = {"deepspeed_config": ds_config(2), "cache_dir": cache, "save_strategy": "no", "warmup_steps": 2}
    questions = {"data_path": tmp_path / "questions/train.json", "image_folder": tmp_path / "questions"}
    stages = {
        "sft": {"model_name_or_path": tmp_path / "model", "data_path": tmp_path / "sft.yaml", "max_steps": 12},
        "grpo": {"model_name_or_path": tmp_path / "sft", **questions, "max_steps": 2, "train_batch_size": 16},
    }
    for name, flags in stages.items():
        recipe = ROOT / f"run/recipes/ready-{name}.yaml"
        run_many(2, tmp_path / "launch", [{"recipe": recipe, "output_dir": tmp_path / name, **short, **flags}])
    losses = [row["loss"] for row in read_metrics(tmp_path / "sft" / "run" / "metrics.jsonl")]
    assert 5.5 < losses[0] < 7 and losses[-1] < 4
    assert all(0 <= row["reward"] <= 1 for row in read_metrics(tmp_path / "grpo" / "run" / "metrics.jsonl"))
    assert (tmp_path / "grpo" / "adapter_config.json").is_file()
    heldout = ("--data_path", tmp_path / "questions/heldout.json", "--image_folder", tmp_path / "questions")
    for name in stages:
        output = tmp_path / f"{name}.json"
        run_script("evaluate.py", "--model_path", tmp_path / name, "--compare_blank_image", "--compare_without_image",
                   *heldout, "--output", output, "--cache_dir", cache)  # fmt: skip
        assert output.is_file() and json.loads(output.read_text())["metrics"]
