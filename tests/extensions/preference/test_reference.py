"""The reference of a run with LoRA is the model with its adapters off, however far they have trained; cached
numbers are those of the same data, weights and arithmetic."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from llavas import arguments
from textbook_pairs import write_pairs
from toys import encoding_options, write_base

from llava_ds.data import fingerprint
from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.step_plan import Packing
from llava_ds.engine.construct import build_model
from llava_ds.engine.runner import Direct
from llava_ds.extensions.preference.reference import Reference, cache_name, log_probs, weights_digest
from llava_ds.model.open.model_plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.tf32 import allow_tf32, tf32_allowed
from llava_ds.second_models.forward_identity import forward_digest

pytest.importorskip("peft")
layers = pytest.importorskip("llava_ds.extensions.lora.layers")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_cached_reference_is_the_model_with_its_adapters_off(tmp_path: Path, one_rank):
    args = arguments({**write_base(tmp_path / "base"), "lora_enable": True, "lora_r": 4, "lora_dropout": 0.3})
    plan = plan_model(args.model, 512)
    model = build_model(plan, args.model, {"zero_optimization": {"stage": 0}}, torch.float32, 0, one_rank)
    data = write_pairs(tmp_path / "data", 5)
    options = SourceOptions(image_folder=data["image_folder"], cache_dir=str(tmp_path / "cache"), are_preferences=True)
    dataset = open_encoded(
        open_sources(data["data_path"], options),
        plan.tokenizer,
        encoding_options(supervise_last_turn_only=True),
        plan.tower.image_options(args),
        PreflightOptions(cache_dir=str(tmp_path / "cache")),
    )
    packing = Packing(1, 1, 1, 400)

    def found() -> np.ndarray:
        return log_probs(Direct(model), dataset, packing, 0, torch.device("cpu"), Mesh(dp=1, dp_rank=0))

    cached = found()
    assert np.isfinite(cached).all()
    rest, held_out = dataset.without_part(0.4, 0)
    rest.of_answers["reference"] = cached
    assert not held_out.of_answers and not dataset.of_answers
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.language_model.named_parameters():
            if layers.is_lora(name):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    assert np.abs(found() - cached).min() > 1e-2
    for _, layer in layers.lora_layers(model.language_model):
        layer.enable_adapters(False)
    assert np.abs(found() - cached).max() < 1e-6


@pytest.fixture
def same_switches():
    before = tf32_allowed()
    yield
    allow_tf32(before)


def test_the_file_is_another_where_the_numbers_are(same_switches):
    names = set()
    for tf32 in (False, True):
        allow_tf32(tf32)
        names |= {name_of(dtype=dtype, device=CUDA) for dtype in (torch.float32, torch.bfloat16)}
    assert len(names) == 3  # fp32 with TF32 and without, and bf16
    assert len({name_of(), name_of(data="e"), name_of(weights="v"), name_of(forward="g")}) == 4


def name_of(data="d", weights="w", forward="f", dtype=torch.float32, device=CPU) -> str:
    return cache_name(data, weights, Reference(torch.nn.Identity(), dtype, forward), device)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, str]:
    return write_base(tmp_path_factory.mktemp("base"))


def forward_of(base: dict[str, str], **flags: object) -> str:
    args = arguments({**base, **flags})
    plan = plan_model(args.model, 512)
    return forward_digest(plan, args.model, plan.tower.image_options(args))


LORA = {"lora_enable": True, "lora_r": 4}


@pytest.mark.parametrize(
    "changed",
    [
        LORA,
        {**LORA, "lora_alpha": 64},
        {**LORA, "lora_r": 8},
        {**LORA, "use_rslora": True},
        {**LORA, "lora_alpha_pattern": '{"q_proj": 3}'},
        {"image_aspect_ratio": "pad"},
        {"mm_vision_select_layer": -1},
        {"mm_projector_type": "linear"},
        {"mm_vision_select_feature": "cls_patch"},
    ],
    ids=str,
)
def test_a_flag_that_changes_the_forward_is_in_the_digest(base, changed):
    others = [forward_of(base), *([forward_of(base, **LORA)] if changed.keys() > LORA.keys() else [])]
    assert forward_of(base, **changed) not in others


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("llama/config.json", "rope_theta", 5000.0),
        ("llama/config.json", "rms_norm_eps", 1e-3),
        ("clip/config.json", "layer_norm_eps", 1e-3),
        ("clip/config.json", "hidden_act", "gelu"),
        ("clip/preprocessor_config.json", "image_std", [0.5, 0.5, 0.5]),
    ],
)
def test_a_setting_of_a_folder_that_changes_the_forward_is_in_the_digest(base, tmp_path, file, key, value):
    before = forward_of(base)
    copied = {name: shutil.copytree(path, tmp_path / Path(path).name) for name, path in base.items()}
    assert forward_of({name: str(path) for name, path in copied.items()}) == before  # wherever it lies
    path = tmp_path / file
    content = json.loads(path.read_text())
    for settings in (content, content.get("vision_config"), content.get("rope_parameters")):
        if settings is not None and key in settings:
            settings[key] = value
    assert content != json.loads(path.read_text()), f"{file} has no {key}"
    path.write_text(json.dumps(content))
    assert forward_of({name: str(path) for name, path in copied.items()}) != before


def test_another_version_of_a_library_is_in_the_digest(base, monkeypatch):
    before = forward_of(base)
    monkeypatch.setattr(fingerprint.importlib.metadata, "version", lambda name: "0.0")
    assert forward_of(base) != before


def test_buffers_and_the_scales_of_packed_weights_belong_to_the_weights():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    mesh = Mesh(dp=1, dp_rank=0)

    def digest(weight: torch.Tensor, offset: float, double: bool = True) -> str:
        layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=double)
        layer.weight = bitsandbytes.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=double, module=layer
        ).to("cpu")
        model = torch.nn.Sequential(layer)
        model.register_buffer("offset", torch.tensor([offset]))
        return weights_digest(model, mesh)

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert digest(weight, 0.0) == digest(weight.clone(), 0.0)
    # Twice the weights are the same integers of twice the scale.
    assert len({digest(weight, 0.0), digest(weight * 2, 0.0), digest(weight, 1.0)}) == 3
    assert digest(weight, 0.0, double=False) != digest(weight * 2, 0.0, double=False)


def test_numbers_that_change_places_are_other_weights():
    model = torch.nn.Conv2d(3, 2, 2)
    before = weights_digest(model, Mesh(dp=1, dp_rank=0))
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(1))  # red and blue
    assert weights_digest(model, Mesh(dp=1, dp_rank=0)) != before
