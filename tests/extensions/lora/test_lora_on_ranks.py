"""LoRA and QLoRA through the launcher: LLaVA's script, every ZeRO stage, a break and a resume, what a run leaves."""

import json
from pathlib import Path

import pytest
import torch
import toys
from launching import ROOT, ds_config, losses, run_many, run_script, tight_config, toy_run
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llava_ds.checkpoint.verification import newest_whole
from llava_ds.constants import ConfigError
from llava_ds.engine.construct import build_model
from llava_ds.extensions.lora import layers as lora
from llava_ds.extensions.lora.quantize import BLOCK
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.ranks import Ranks

STEPS, SAVED = 8, 4
LORA = {"lora_enable": True, "lora_r": 4, "lora_alpha": 16, "lora_dropout": 0.0}
ADAPTER = "adapter_model.safetensors"
PREFIX = "base_model.model.model.mm_projector"
# LLaVA's scripts/v1_5/finetune_lora.sh, all but paths, sizes of batches and the number of epochs' steps.
SCRIPT = {
    "lora_enable": True, "lora_r": 128, "lora_alpha": 256, "mm_projector_lr": 2e-5, "version": "v1",
    "mm_projector_type": "mlp2x_gelu", "mm_vision_select_layer": -2, "mm_use_im_start_end": False,
    "mm_use_im_patch_token": False, "image_aspect_ratio": "pad", "group_by_modality_length": True, "bf16": True,
    "num_train_epochs": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 1, "evaluation_strategy": "no", "save_strategy": "steps", "save_steps": 50000,
    "save_total_limit": 1, "learning_rate": 2e-4, "weight_decay": "0.", "warmup_ratio": 0.03,
    "lr_scheduler_type": "cosine", "logging_steps": 1, "tf32": True, "model_max_length": 512,
    "gradient_checkpointing": True, "dataloader_num_workers": 0, "lazy_preprocess": True, "report_to": "tensorboard",
}  # fmt: skip


class Toys:
    """A base, data and a projector of stage 1, and the flags of runs on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = toys.write_base(folder / "base", attention_bias=True, hidden_size=BLOCK, intermediate_size=BLOCK)
        self.data = toys.write_data(folder / "data", "iitiitiiitiitiit" * 2)
        torch.manual_seed(5)
        shapes = {"0.weight": (BLOCK, 16), "0.bias": (BLOCK,), "2.weight": (BLOCK, BLOCK), "2.bias": (BLOCK,)}
        stage1 = {f"model.mm_projector.{name}": torch.randn(shape) / 4 for name, shape in shapes.items()}
        torch.save(stage1, folder / "mm_projector.bin")
        self.given = {**self.base, **self.data, "pretrain_mm_mlp_adapter": str(folder / "mm_projector.bin")}

    def run(self, name: str, config: str | Path, **more: object) -> dict[str, object]:
        flags = {**LORA, "max_steps": STEPS, "warmup_ratio": 0.1, "weight_decay": 0.1, "max_grad_norm": 1.0, **more}
        return toy_run(self.given, self.folder / name, config, **flags)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder of output folders, all from one launch on two ranks."""
    t = Toys(tmp_path_factory.mktemp("lora"))
    saves = {"save_strategy": "steps", "save_steps": SAVED, "lora_dropout": 0.2}
    script = {**t.given, **SCRIPT, "deepspeed": ds_config(3), "output_dir": t.folder / "script"}
    todo = [
        t.run("still", ds_config(3), learning_rate=0, mm_projector_lr=0, max_steps=1),
        t.run("lora-0", ds_config(0), save_strategy="steps"),
        t.run("lora-3", tight_config(t.folder), save_strategy="steps"),
        t.run("whole", ds_config(3), bits=4, **saves),
        t.run("resumed", ds_config(3), bits=4, **saves, resume=t.folder / "whole" / f"checkpoint-{SAVED}"),
        {**script, "cache_dir": t.folder / "cache"},
    ]
    (t.folder / "output.txt").write_text(run_many(2, t.folder / "launch", todo))
    return t.folder


def test_a_checkpoint_gives_the_adapter_and_the_merged_model(runs, tmp_path):
    """Of two ranks at ZeRO-3: what the run left, and what merging what it left gives."""
    out = runs / "lora-3"
    checkpoint = out / f"checkpoint-{STEPS}"
    run_script("export.py", checkpoint, "--output_dir", tmp_path / "adapter")
    for name in ("adapter_config.json", "config.json"):
        assert json.loads((tmp_path / "adapter" / name).read_text()) == json.loads((out / name).read_text())
    for name, read in ((ADAPTER, load_file), ("non_lora_trainables.bin", torch.load)):
        ours, theirs = read(tmp_path / "adapter" / name), read(out / name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)

    run_script("export.py", checkpoint, "--format", "hf", "--output_dir", tmp_path / "merged")
    run_script("export.py", out, "--format", "hf", "--output_dir", tmp_path / "folder", "--version", "v1")
    merged, folder = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "folder"))
    assert merged.keys() == folder.keys() and all(torch.equal(merged[name], folder[name]) for name in folder)
    base = load_file(runs / "base" / "llama" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(merged[f"language_model.{name}"], base[name])

    with pytest.raises(ConfigError, match="--format adapter needs a LoRA run's checkpoint, but SOURCE is not one"):
        run_script("export.py", tmp_path / "merged", "--format", "adapter", "--output_dir", tmp_path / "none")


def merged(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that run/export.py merges from a run's last checkpoint, by llava-hf's names."""
    out = folder / "merged"
    if not out.exists():
        run_script("export.py", folder / f"checkpoint-{STEPS}", "--format", "hf", "--output_dir", out)
    return load_file(out / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    a, b = losses(one), losses(other)
    assert len(a) == len(b) == STEPS
    return max(abs(x - y) for x, y in zip(a, b))


def test_llavas_script_trains_and_leaves_the_files_that_llava_leaves(runs):
    folder = runs / "script"
    left = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", ADAPTER, "non_lora_trainables.bin", "config.json"} <= left
    assert not {"model.safetensors", "mm_projector.bin"} & left
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (128, 256, 0.05)
    adapter = load_file(folder / ADAPTER)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}
    assert set(adapter) == {
        f"base_model.model.{name}.lora_{m}.weight" for name in config["target_modules"] for m in "AB"
    }
    others = torch.load(folder / "non_lora_trainables.bin", weights_only=True)
    assert set(others) == {f"{PREFIX}.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    rates = [json.loads(line)["lr"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(map(max, rates)) == pytest.approx(2e-4) and max(map(min, rates)) == pytest.approx(2e-5)
    assert newest_whole(folder)[0] is not None


def test_what_is_left_was_opened_by_peft_and_computed_the_same(runs):
    """run/train.py compares logits at the end of every run, and fails if they differ."""
    lines = [line for line in (runs / "output.txt").read_text().splitlines() if line.startswith("adapter: ")]
    assert len(lines) == 6 and all("reloaded with peft, logits differ by" in line for line in lines)


def test_lora_starts_the_same_partitioned_and_the_base_stays_where_it_was(runs):
    """A run at a rate of zero leaves what it began with: A as the seed draws it, B zero, the projector of stage 1."""
    args = toys.model_arguments(**LORA, **base_of(runs))
    model = build_model(
        plan_model(args, 512), args, {"zero_optimization": {}}, torch.float32, 42, Ranks(0, 0, 1, torch.device("cpu"))
    )
    drawn = {lora.to_peft(n): p for n, p in model.language_model.named_parameters() if lora.is_lora(n)}
    left = load_file(runs / "still" / ADAPTER)
    assert left.keys() == drawn.keys()
    assert all(torch.equal(left[name], drawn[name]) for name in left)
    others = torch.load(runs / "still" / "non_lora_trainables.bin", weights_only=True)
    stage1 = torch.load(runs / "mm_projector.bin", weights_only=True)
    assert all(torch.equal(others[f"base_model.model.{name}"], tensor) for name, tensor in stage1.items())


def base_of(folder: Path) -> dict[str, str]:
    return {
        "model_name_or_path": str(folder / "base" / "llama"),
        "vision_tower": str(folder / "base" / "clip"),
    }


def test_lora_learns_the_same_partitioned_and_not(runs):
    curve = losses(runs / "lora-0")
    assert curve[-1] < curve[0] - 0.2
    assert largest_difference(runs / "lora-0", runs / "lora-3") < 1e-5
    one, other = (load_file(runs / name / ADAPTER) for name in ("lora-0", "lora-3"))
    assert max((one[key] - other[key]).abs().max() for key in one) < 1e-4
    projectors = [
        torch.load(runs / name / "non_lora_trainables.bin", weights_only=True) for name in ("still", "lora-3")
    ]
    assert all((projectors[0][key] - projectors[1][key]).abs().max() > 1e-4 for key in projectors[0])


def test_a_broken_off_run_goes_on_to_the_same_weights_with_packed_weights_and_dropout(runs):
    assert losses(runs / "whole")[SAVED:] == losses(runs / "resumed")
    for name in (ADAPTER, "non_lora_trainables.bin"):
        read = load_file if name == ADAPTER else torch.load
        one, other = read(runs / "whole" / name), read(runs / "resumed" / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_partitioned_weights_are_merged_as_peft_merges_them(runs):
    base = AutoModelForCausalLM.from_pretrained(runs / "base" / "llama")
    theirs = PeftModel.from_pretrained(base, runs / "lora-3").merge_and_unload().state_dict()
    for name in ("lora-0", "lora-3"):
        ours = merged(runs / name)
        for key, tensor in theirs.items():  # without the row of <image>
            assert (ours[f"language_model.{key}"][: len(tensor)] - tensor).abs().max() < 2e-5, (name, key)
    others = torch.load(runs / "lora-3" / "non_lora_trainables.bin", weights_only=True)
    assert torch.equal(ours["multi_modal_projector.linear_1.weight"], others[f"{PREFIX}.0.weight"])


def test_packed_and_partitioned_weights_are_merged_from_what_they_stand_for(runs):
    ours = merged(runs / "whole")
    whole = load_file(runs / "base" / "llama" / "model.safetensors")
    assert all(ours[f"language_model.{key}"][: len(tensor)].shape == tensor.shape for key, tensor in whole.items())
    adapter = load_file(runs / "whole" / ADAPTER)
    for name in json.loads((runs / "whole" / "adapter_config.json").read_text())["target_modules"]:
        a, b = (adapter[f"base_model.model.{name}.lora_{m}.weight"] for m in "AB")
        packed = ours[f"language_model.{name}.weight"] - 4 * b @ a  # alpha / r is 4
        weight = whole[f"{name}.weight"]
        assert 0.02 < (packed - weight).norm() / weight.norm() < 0.12  # 4 bits


@pytest.mark.parametrize("step", [SAVED, STEPS])
def test_every_checkpoint_holds_lora_and_the_projector_and_no_frozen_weight(runs, step):
    state = torch.load(
        next((runs / "whole" / f"checkpoint-{step}" / "engine").glob("*rank_0_*model_states.pt")), weights_only=False
    )
    held = {name for group in state["param_shapes"] for name in group}
    layers = json.loads((runs / "whole" / "adapter_config.json").read_text())["target_modules"]
    assert held == {f"language_model.{name}.lora_{m}.default.weight" for name in layers for m in "AB"} | {
        f"projector.layers.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }
    assert not any("base_layer" in name for name in state["module"])


def changed(folder: Path, stage: int, **sections: dict) -> Path:
    """A DeepSpeed JSON of this repository with more in it."""
    config = json.loads(Path(ds_config(stage)).read_text())
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path = folder / f"{'-'.join(sections)}-{stage}.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def matrix(tmp_path_factory) -> Path:
    """Every stage on one and two ranks, whole weights and packed ones, and what may be combined with them."""
    t = Toys(tmp_path_factory.mktemp("matrix"))
    offload = changed(t.folder, 3, zero_optimization={"offload_param": {"device": "cpu"}})
    recompute = changed(t.folder, 3, activation_checkpointing={"partition_activations": True})
    frozen = {"freeze_mm_mlp_adapter": True, "mm_projector_lr": None}
    for ranks in (1, 2):
        todo = []
        for stage in range(4):
            for bits in (16, 4) if stage == 3 else (16, 8, 4):
                todo.append(t.run(f"{bits}-{stage}-{ranks}", ds_config(stage), bits=bits))
        if ranks == 2:
            for bits in (16, 4):
                todo += [
                    t.run(f"{bits}-recomputed", ds_config(3), bits=bits, gradient_checkpointing=True),
                    t.run(f"{bits}-offloaded", offload, bits=bits),
                    t.run(f"{bits}-bf16-2", ds_config(2), bits=bits, bf16=True),
                    t.run(f"{bits}-bf16-3", ds_config(3), bits=bits, bf16=True),
                    without_none(t.run(f"{bits}-frozen", ds_config(2), bits=bits, **frozen)),
                    without_none(
                        t.run(f"{bits}-frozen-ds", recompute, bits=bits, gradient_checkpointing=True, **frozen)
                    ),
                ]
            todo += [
                t.run("biases-2", ds_config(2), lora_bias="all"),
                t.run("biases-3", ds_config(3), lora_bias="all"),
                t.run("on", ds_config(3), lora_weight_path=t.folder / "16-3-2"),
            ]
        run_many(ranks, t.folder / f"launch-{ranks}", todo, timeout_s=900)
    return t.folder


def without_none(flags: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in flags.items() if value is not None}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("bits", "stages"), [(16, 4), (8, 3), (4, 4)])
def test_every_stage_gives_the_same_curve(matrix, bits, stages, ranks):
    for stage in range(stages):
        assert largest_difference(matrix / f"{bits}-0-1", matrix / f"{bits}-{stage}-{ranks}") < 1e-5, stage


@pytest.mark.long
@pytest.mark.parametrize("bits", [16, 4])
def test_recomputing_and_offloading_change_nothing(matrix, bits):
    for name in ("recomputed", "offloaded"):
        assert largest_difference(matrix / f"{bits}-0-1", matrix / f"{bits}-{name}") < 1e-5, name
    assert largest_difference(matrix / f"{bits}-frozen", matrix / f"{bits}-frozen-ds") < 1e-5
    assert largest_difference(matrix / f"{bits}-0-1", matrix / f"{bits}-frozen") > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("bits", [16, 4])
def test_bf16_follows_fp32(matrix, bits):
    for stage in (2, 3):
        assert 1e-5 < largest_difference(matrix / f"{bits}-0-1", matrix / f"{bits}-bf16-{stage}") < 0.1


@pytest.mark.long
def test_biases_train_alike_partitioned_and_are_left_in_the_adapter(matrix):
    assert largest_difference(matrix / "biases-2", matrix / "biases-3") < 1e-5
    assert largest_difference(matrix / "biases-2", matrix / "16-2-2") > 1e-5
    left = load_file(matrix / "biases-3" / ADAPTER)
    bias = left["base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"]
    assert not torch.equal(
        bias, load_file(matrix / "base/llama/model.safetensors")["model.layers.0.self_attn.q_proj.bias"]
    )


@pytest.mark.long
def test_a_run_goes_on_from_an_adapter(matrix):
    before, after = losses(matrix / "16-3-2"), losses(matrix / "on")
    assert after[0] < before[0] - 0.1  # the same samples again


def test_the_recipe_of_7b_is_complete_and_its_json_fits():
    """Check the flags of the recipe as make passes those of the others, without a model."""
    from llava_ds.config.parsing import parse_arguments

    recipe = ROOT / "run" / "recipes" / "llava-v1.5-7b-lora.yaml"
    args, notes = parse_arguments(["--recipe", str(recipe), "--deepspeed_config", ds_config(3), "--output_dir", "out"])
    assert args.own["lora"].lora_enable and not notes
