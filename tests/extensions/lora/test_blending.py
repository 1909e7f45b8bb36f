"""Adapters merged by weight: what peft adds up, and what is refused."""

import json
import warnings
from pathlib import Path

import llavas
import peft
import pytest
import torch
import toys
from launching import run_script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llava_ds.constants import ConfigError

LINEAR = ["q_proj", "down_proj"]


def write_adapter(folder: Path, base: dict[str, str], seed: int, **config: object) -> dict[str, torch.Tensor]:
    """A random adapter as LLaVA leaves it; returns its projector."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, "task_type": "CAUSAL_LM", **config}
    model = AutoModelForCausalLM.from_pretrained(base["model_name_or_path"])
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    shapes = {"0.weight": (32, 16), "0.bias": (32,), "2.weight": (32, 32), "2.bias": (32,)}
    projector = {f"base_model.model.model.mm_projector.{name}": torch.randn(shape) for name, shape in shapes.items()}
    torch.save(projector, folder / "non_lora_trainables.bin")
    (folder / "config.json").write_text(json.dumps(llavas.llava_config(base, image_aspect_ratio="pad")))
    return projector


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[dict[str, str], list[Path], list[dict[str, torch.Tensor]]]:
    """A base, and two adapters over it with their projectors."""
    folder = tmp_path_factory.mktemp("blending")
    base, folders = toys.write_base(folder / "base"), [folder / "one", folder / "other"]
    return base, folders, [write_adapter(each, base, seed) for seed, each in enumerate(folders)]


def merged(made, out: Path, *more: object) -> dict[str, torch.Tensor]:
    base, folders, _ = made
    given = ("--format", "hf", "--version", "v1", "--vision_tower", base["vision_tower"], "--output_dir", out)
    run_script("export.py", folders[0], "--adapters", folders[1], *given, *more)
    return load_file(out / "model.safetensors")


def test_adapters_are_added_up_by_weight_as_peft_adds_them(made, tmp_path):
    base, folders, projectors = made
    theirs = AutoModelForCausalLM.from_pretrained(base["model_name_or_path"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(theirs, folders[0], "one")
        theirs.load_adapter(folders[1], "other")
        theirs.add_weighted_adapter(["one", "other"], [0.7, 0.5], "both", combination_type="cat")
        theirs.set_adapter("both")
        expected = theirs.merge_and_unload().state_dict()
    ours = merged(made, tmp_path / "both", "--adapter_weights", 0.7, 0.5)
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[f"language_model.{name}"][: len(tensor)], tensor, atol=1e-5, rtol=1e-5)
    name = "base_model.model.model.mm_projector.0.weight"
    mean = (0.7 * projectors[0][name] + 0.5 * projectors[1][name]) / 1.2
    torch.testing.assert_close(ours["multi_modal_projector.linear_1.weight"], mean)
    half = merged(made, tmp_path / "half")
    mean = (projectors[0][name] + projectors[1][name]) / 2
    torch.testing.assert_close(half["multi_modal_projector.linear_1.weight"], mean)


def test_what_cannot_be_merged_by_weight_is_refused(made, tmp_path):
    base, folders, _ = made
    for more, message in (
        (("--adapter_weights", 1), "--adapter_weights gives 1 weights for 2 adapters"),
        (("--adapter_weights", 1, -1), "add up to 0"),
        (("--adapters", base["model_name_or_path"]), "is not an adapter's folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            merged(made, tmp_path / "out", *more)
    with pytest.raises(ConfigError, match="--adapter_weights goes with --adapters"):
        run_script("export.py", folders[0], "--adapter_weights", 1)
    elsewhere = toys.write_base(tmp_path / "elsewhere", seed=3)
    write_adapter(tmp_path / "third", elsewhere, 2)
    with pytest.raises(ConfigError, match="third has a different base model from"):
        merged(made, tmp_path / "out", "--adapters", tmp_path / "third")
