"""What run/estimate.py says of named models is what a micro-batch takes on a GPU: counted over fake tensors."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import toys
from fake_gpu import gpu
from fake_models import arguments, built, delta_net_kernels, on_gpu, sample
from known_flags import known
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPVisionConfig

from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.extensions.planning.activations import MicroBatch, activation_bytes
from llava_ds.extensions.planning.named_models import NAMED
from llava_ds.extensions.planning.shapes import CLIP_L_336, shape_of
from llava_ds.model.heads import SummedLoss
from llava_ds.model.open.model_plan import plan_model
from llava_ds.model.open.tower import plan_tower

pytestmark = pytest.mark.cuda
ready_models = pytest.importorskip("ready_models")  # widths of whose language models are measured

TOKENS, IMAGES, WEIGHT_BYTES = 8192, 4, 2
PARTS = {
    "both": {},
    "projector": {"tune_mm_mlp_adapter": True},
    "lora": {"lora_enable": True, "lora_r": 128},
    "experts": {
        "lora_enable": True, "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": "q_proj,gate_up_proj,down_proj",
    },
    "critic": {},
    "tower": {"unfreeze_mm_vision_tower": True},
}  # fmt: skip
PARTS = {name: flags for name, flags in PARTS.items() if known(flags)}
QUICK = {("qwen2-0.5b", "both", False)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long)
    for name in NAMED
    for case in [(name, "both", False), (name, "both", True)]
    + [
        (name, trained, True)
        for trained in ("projector", "lora")
        if trained in PARTS and name in ("llava-v1.5-7b", "qwen2-7b")
    ]
    + [
        (name, trained, recomputes)
        for recomputes in (False, True)
        for trained in ("critic", "tower")
        if name in ("qwen2-0.5b", "llava-v1.5-7b")
    ]
]


MIXTURES = {
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip
QWEN35_2B = {
    "model_type": "qwen3_5_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16,
    "vocab_size": 248320, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("trained", ["both", "projector", "experts"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_peak_of_a_mixture_is_not_above_the_estimate(name, trained, recomputes):
    """Of activations alone, for weights are most of it; four layers of each."""
    found, weights, expected = peak_of(AutoConfig.for_model(**MIXTURES[name]), trained, recomputes)
    assert 0.65 * expected < found - weights < 1.03 * expected


@pytest.mark.long
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_peak_of_layers_with_a_state(monkeypatch, recomputes):
    """Of eight layers as Qwen3.5-2B has them, with kernels."""
    ready_models.register_text_models("qwen3_5")
    delta_net_kernels(monkeypatch)
    found, weights, expected = peak_of(AutoConfig.for_model(**QWEN35_2B), "both", recomputes, short=False)
    assert found == pytest.approx(weights + expected, rel=0.1)


@pytest.mark.parametrize(("name", "trained", "recomputes"), CASES)
def test_the_peak_of_a_micro_batch_is_as_estimated(name, trained, recomputes):
    """Weights and activations together."""
    found, weights, expected = peak_of(AutoConfig.for_model(**NAMED[name]), trained, recomputes)
    # The last layer is counted whole, though it saves less where nothing is supervised: with a critic twice.
    assert found == pytest.approx(weights + expected, rel=0.03 if trained == "critic" else 0.02)


@pytest.mark.long
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("trained", ["both", "projector"])
def test_mlps_that_take_some_tokens_at_a_time_keep_their_input_alone(trained, recomputes):
    text = AutoConfig.for_model(**NAMED["llava-v1.5-7b"])
    whole, *_ = peak_of(text, trained, recomputes)
    found, weights, expected = peak_of(text, trained, recomputes, mlp_tokens=256)
    assert found < whole
    assert found == pytest.approx(weights + expected, rel=0.02)


@pytest.fixture(autouse=True)
def fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers attend by the kernel that a GPU takes in bf16; with fake tensors torch takes its formula."""
    formula, kernel = F.scaled_dot_product_attention, torch.ops.aten._scaled_dot_product_flash_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
        if not query.is_cuda:
            return formula(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
        assert attn_mask is None and not options.get("enable_gqa")
        return kernel(query, key, value, dropout_p, is_causal, scale=scale)[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


def peak_of(
    text, trained: str, recomputes: bool, mlp_tokens: int | None = None, short: bool = True
) -> tuple[int, int, int]:
    """Bytes alive at the peak of a micro-batch, those of the weights, and what the estimate says beside them."""
    args = arguments(mm_vision_select_layer=-2, **PARTS[trained])
    tower = plan_tower(CLIPVisionConfig(**CLIP_L_336), {}, "here", args.model)
    options = toys.image_options(size=336, patch_size=14)
    length = TOKENS // IMAGES - 576 - 1
    samples = [sample(options, length, [("image", ((336, 336),))]) for _ in range(IMAGES)]
    return counted(text, tower, args, samples, options, recomputes, trained == "critic", mlp_tokens, short)


def counted(
    text, tower, args, samples, options, recomputes, has_critic=False, mlp_tokens=None, short=True
) -> tuple[int, int, int]:
    """Run forward and backward of one micro-batch of all samples; returns as peak_of.

    Gradients, which are model states, are let go as they come.
    """
    with gpu(tracks=True) as rules:
        with rules.building():
            model = built(text, tower, args, short=short)
            if has_critic:
                args = args.replaced(objective="ppo")
                model.critic = built(text, tower, args, short=True, value_head=True)
            for module in (model, *([model.critic] if has_critic else [])):
                if mlp_tokens is not None:
                    tiles = pytest.importorskip("llava_ds.extensions.mlp_tiles.extension")
                    tiles.tile_mlps(module.language_model, mlp_tokens)
                if recomputes:
                    checkpoint_layers(module.language_model)
                    if next(module.vision_tower.parameters()).requires_grad:
                        checkpoint_layers(module.vision_tower.tower)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda own: setattr(own, "grad", None))
        (micro,) = on_gpu(samples, options)
        head = pytest.importorskip("llava_ds.extensions.rl.ppo").ActorCritic() if has_critic else SummedLoss(1)
        found = model(micro.batch, head)
        parts = found if has_critic else found[:1]
        sum(part.sum() for part in parts).backward()
        found = rules.live.peak
    shape = shape_of(text, tower, args)
    again = shape.text.num_layers if recomputes else 0
    tiles = sum(layout.num_tiles for each in samples for _, layout in each.media)
    batch = MicroBatch(micro.num_tokens, micro.num_targets, tiles, again, mlp_tokens)
    weights = sum(part.num_parameters for part in shape.parts) * WEIGHT_BYTES
    return found, weights, activation_bytes(shape, batch, WEIGHT_BYTES)


LAYERS = 12
WIDE = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
}  # fmt: skip
WIDE_TOWER = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2, "num_hidden_layers": 6}


@pytest.mark.long
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", ready_models.FAMILIES)
def test_the_peak_of_a_ready_model_is_as_estimated(family, trained, recomputes, tmp_path, monkeypatch):
    """Of activations alone, at toy widths; of layers with a state, with kernels."""
    if family == "qwen3_5":
        delta_net_kernels(monkeypatch)
    args = arguments(**ready_models.write_ready(tmp_path, family), version="processor", tune_mm_vision=trained,
                     tune_mm_mlp=True, tune_mm_llm=True)  # fmt: skip
    widen(tmp_path, family)
    plan = plan_model(args.model, 8192)
    options = plan.tower.image_options(args)
    samples = [sample(options, 40, [("image", ((64, 64),))]) for _ in range(60)]
    short = plan.whole_last_layer is None
    found, weights, expected = counted(plan.text_config, plan.tower, args, samples, options, recomputes, short=short)
    # The last layer saves less where nothing is supervised, and is one of twelve here.
    # What a layer with a state needs while it is recomputed is not counted.
    most = 1.2 if family == "qwen3_5" else 1.08
    assert 0.9 * expected < found - weights < most * expected


def widen(folder: Path, family: str) -> None:
    """Write a tiny ready model anew, with widths at which activations count."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text, vision = config.get("text_config", config), config["vision_config"]
    text |= WIDE
    if family.startswith("gemma4"):
        text |= {"num_attention_heads": 2, "head_dim": 128, "global_head_dim": 320}
        text |= {"num_key_value_heads": 1, "num_global_key_value_heads": 1}
        text |= {"num_kv_shared_layers": 6 if text["num_kv_shared_layers"] else 0}
        del text["per_layer_config"]  # which is made of the others
        vision |= {"num_key_value_heads": 2, "head_dim": 64}
    elif "head_dim" in text:
        text["head_dim"] = 64
    if "mrope_section" in str(text):
        text["rope_parameters"]["mrope_section"] = [16, 8, 8]
    if "num_experts" in text:
        text["moe_intermediate_size"] = 384
    if "layer_types" in text:
        text["layer_types"] = (text["layer_types"] * LAYERS)[:LAYERS]
    if "embed_dim" in vision:
        vision |= {"embed_dim": 128, "hidden_size": 256, "mlp_ratio": 4, "depth": 6, "num_heads": 2}
    elif "depth" in vision:
        vision |= {"hidden_size": 128, "intermediate_size": 512, "depth": 6, "num_heads": 2, "out_hidden_size": 256}
    else:
        vision |= WIDE_TOWER
    path.write_text(json.dumps(config))
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    if family == "qwen3_vl_moe":
        ready_models.turn_experts(folder)
