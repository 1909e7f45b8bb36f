"""The reference of a run with LoRA is the model with its adapters off, however far they have trained; cached
numbers are those of the same data, weights and arithmetic."""

from pathlib import Path

import numpy as np
import pytest
import torch
from llavas import arguments
from textbook_pairs import write_pairs
from toys import encoding_options, write_base

from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sources import SourceOptions, open_sources
from llava_ds.data.step_plan import Packing
from llava_ds.engine.construct import build_model
from llava_ds.model.lora import is_lora, lora_layers
from llava_ds.model.plan import plan_model
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.tf32 import allow_tf32, tf32_allowed
from llava_ds.train.reference import cache_name, log_probs

pytest.importorskip("peft")
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
        return log_probs(model, dataset, packing, 0, torch.device("cpu"), Mesh(dp=1, dp_rank=0))

    cached = found()
    assert np.isfinite(cached).all()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.language_model.named_parameters():
            if is_lora(name):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    assert np.abs(found() - cached).min() > 1e-2
    for _, layer in lora_layers(model.language_model):
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
        names |= {cache_name("d", "w", dtype, CUDA) for dtype in (torch.float32, torch.bfloat16)}
        names.add(cache_name("d", "w", torch.float32, CPU))
    # fp32 with TF32 and without (as on a CPU, where the switch means nothing), and bf16
    assert len(names) == 3
    assert len({cache_name(*each, torch.float32, CPU) for each in (("d", "w"), ("e", "w"), ("d", "v"))}) == 3
