"""Forward and backward of every family, layout and trained part over fake CUDA tensors: nothing waits or mixes."""

import sys
from dataclasses import replace

import pytest
import torch
import toys
from daily import rest
from fake_gpu import HostWait, gpu
from fake_models import (
    IMAGE,
    arguments,
    backward,
    built,
    flash_attn_2,
    flash_attn_3,
    liger,
    on_gpu,
    sample,
    talks,
    tower_plan,
)
from known_flags import needs

from llava_ds.data.collate import LoadedPair
from llava_ds.engine.activation_checkpointing import checkpoint_layers, checkpoint_spread, repeated_layers
from llava_ds.model import attention
from llava_ds.model.heads import LogProbs, SummedLoss
from llava_ds.model.open.probe import examine
from llava_ds.model.projector import feature_stride

pytestmark = pytest.mark.cuda

OPTIONS = toys.image_options()
ANYRES = {"aspect_ratio": "anyres_max_4", "merge_type": "spatial_unpad"}


def trained_once(
    family: str = "llama", tower: str = "clip", options=OPTIONS, samples=None, change=None, how=None, config=(), **flags
):
    """Forward and backward of a model. change: done to it before; how: of the GPU; config: of the language model."""
    args = arguments(**flags)
    text = toys.language_model_config(family, **dict(config))
    short = examine(text).whole_last_layer is None
    samples = talks(options) if samples is None else samples
    plan = tower_plan(tower, args)
    with gpu(**(how or {})) as rules:
        with rules.building():
            model = built(text, plan, args, short=short)
            if change is not None:
                change(model)
        (micro,) = on_gpu(samples, options)
        loss, by_source = model(micro.batch, SummedLoss(2))
        assert (loss.device.type, loss.dtype, by_source.dtype) == ("cuda", torch.float32, torch.float64)
        backward(model, loss)
        assert not rules.waits
    return model


@pytest.mark.parametrize(
    "family", ["qwen3", *rest(*(name for name in toys.FAMILIES if name not in ("gemma2", "qwen3")))]
)
def test_every_family_with_torchs_kernel(family):
    trained_once(family)


@pytest.mark.parametrize("family", ["qwen2_5", *rest("llama", "gemma2")])
@pytest.mark.parametrize(("package", "capability"), [(flash_attn_2, (8, 0)), (flash_attn_3, (9, 0))])
def test_flash_attn(monkeypatch, package, capability, family):
    module = package()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    trained_once(family, how={"capability": capability})
    assert module.calls > 0


def test_flash_attn_3_without_dropout_leaves_it_to_2(monkeypatch):
    modules = [flash_attn_2(), flash_attn_3()]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    trained_once(config={"attention_dropout": 0.1})
    assert [module.calls > 0 for module in modules] == [True, False]


@pytest.mark.parametrize("how", [{"family": "gemma2"}, {"how": {"capability": (7, 5)}}], ids=str)
def test_where_no_kernel_fits_the_host_waits_as_the_first_lines_say(how):
    with pytest.raises(HostWait, match=r"attention\.py:_lengths"):
        trained_once(**how)
    with gpu(**how.get("how", {})):
        text = toys.language_model_config(how.get("family", "llama"))
        report = attention.attention_report(text, torch.device("cuda"), torch.bfloat16)
    assert report.startswith(f"attention: {attention.SEGMENTS} (")


def test_rotary_positions_that_follow_the_longest_sample_wait_for_nothing():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    trained_once(config={"rope_parameters": rope})


@pytest.mark.parametrize("tower", ["clip", "siglip+dinov3_vit", *rest("siglip", "siglip2", *toys.TOWERS)])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_towers(tower, trained):
    parts = {"mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter,mm_language_model"} if trained else {}
    model = trained_once(tower=tower, **parts)
    assert any(p.grad is not None for p in model.vision_tower.parameters()) == trained


def test_images_in_their_own_shape():
    flags = {"mm_native_resolution": True, "mm_tunable_parts": "mm_vision_tower,mm_mlp_adapter"}
    args = arguments(**flags)
    trained_once(tower="siglip2", options=tower_plan("siglip2", args).image_options(args), **flags)


def test_a_tower_at_several_scales():
    options = toys.image_options(size=48, patch_size=16)
    trained_once(tower="clip", options=options, s2=True, s2_scales="24,48")


@pytest.mark.parametrize("projector", ["mlp2x_gelu", *rest("linear", "mlp2x_res2x_gelu", "pooler", "mlp2x_gelu_ps3")])
@pytest.mark.parametrize("family", ["llama", *rest("qwen2")])
def test_the_projector_alone(projector, family):
    options = toys.image_options(patch_size=8 * feature_stride(projector))
    trained_once(family, options=options, tune_mm_mlp_adapter=True, mm_projector_type=projector)


@needs("lora_enable")
@pytest.mark.parametrize(
    "flags", [{}, {"lora_dropout": 0.0}, {"lora_bias": "all"}, {"tune_mm_mlp_adapter": True}], ids=str
)
@pytest.mark.parametrize("family", ["qwen2", *rest("llama", "phi3")])
def test_lora(family, flags):
    trained_once(family, lora_enable=True, lora_r=4, **flags)


@needs("lora_enable")
def test_lora_on_experts():
    trained_once("qwen3_moe", lora_enable=True, lora_r=4, lora_dropout=0.0, lora_target_modules="q_proj,down_proj")


LAYOUTS = {
    "anyres with newlines": (ANYRES, [("image", ((90, 30),))]),
    "anyres, flat": ({"aspect_ratio": "anyres"}, [("image", ((30, 70),))]),
    "anyres, pooled by maxima": (
        {"aspect_ratio": "anyres", "merge_type": "spatial_maxpool2x2"},
        [("image", ((30, 70),))],
    ),
    "a video, pooled": (ANYRES, [("frames", ((40, 30),) * 5)]),
    "a video, averaged": (
        {**ANYRES, "pool_mode": "average", "newline_position": "frame"},
        [("video", ((40, 30),) * 3)],
    ),
    "a video, its maxima": (
        {**ANYRES, "pool_mode": "max", "newline_position": "one_token"},
        [("video", ((40, 30),) * 3)],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_images_and_videos(layout):
    changed, media = LAYOUTS[layout]
    options = toys.image_options(**changed)
    samples = [sample(options, 12, media), sample(options, 20), sample(options, 8, [IMAGE] * 2)]
    trained_once(options=options, samples=samples, mm_patch_merge_type=options.merge_type)


@pytest.mark.parametrize(
    "samples", [[], [sample(OPTIONS, 12)], [sample(OPTIONS, 0, [IMAGE])]], ids=["none", "text", "no target"]
)
def test_micro_batches_with_nothing_to_see_or_to_learn(samples):
    trained_once(samples=samples)


def test_weights_of_the_loss():
    weighed = replace(sample(OPTIONS, 12), weights=torch.full((13,), 0.5))
    trained_once(samples=[weighed, sample(OPTIONS, 9, [IMAGE])])


@pytest.mark.parametrize("how", ["all", "two", *rest("second", "none")])
@pytest.mark.parametrize("family", ["qwen2_5", *rest("llama", "gpt2")])
def test_activation_checkpointing(family, how):
    def change(model):
        checkpoint_layers(model.language_model, 2 if how == "second" else 1)
        checkpoint_layers(model.vision_tower.tower)
        if how in ("two", "none"):
            checkpoint_spread(repeated_layers(model.language_model), {"two": 2, "none": 0}[how])

    trained_once(family, change=change, mm_tunable_parts="mm_vision_tower,mm_mlp_adapter,mm_language_model")


@needs("lora_enable")
def test_activation_checkpointing_keeps_random_states_without_a_wait():
    trained_once(
        change=lambda model: checkpoint_layers(model.language_model), lora_enable=True, lora_r=4, lora_dropout=0.1
    )


@pytest.mark.parametrize("family", ["llama", *rest("qwen2", "mistral")])
def test_ligers_kernels(monkeypatch, family):
    modules, kernels = liger(), pytest.importorskip("llava_ds.extensions.liger.kernels")
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    trained_once(family, change=lambda model: kernels.replace_kernels(model.language_model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Weights in fp32 under torch's autocast, as DeepSpeed's torch_autocast has them."""
    text, plan, samples = toys.language_model_config(), tower_plan("clip", arguments()), talks(OPTIONS)
    with gpu() as rules:
        with rules.building():
            model = built(text, plan, arguments(), torch.float32, short=True)
        (micro,) = on_gpu(samples, OPTIONS)
        with torch.autocast("cuda", dtype=dtype):
            loss = model(micro.batch)
            log_probs = model(micro.batch, LogProbs())
        assert log_probs.dtype == torch.float64
        backward(model, loss + log_probs.sum())


def test_float16():
    text, plan, samples = toys.language_model_config(), tower_plan("clip", arguments()), talks(OPTIONS)
    with gpu() as rules:
        with rules.building():
            model = built(text, plan, arguments(), torch.float16, short=True)
        (micro,) = on_gpu(samples, OPTIONS)
        backward(model, model(micro.batch) + model(micro.batch, LogProbs()).sum().float())


def test_pairs_of_answers_come_to_the_device_as_one_batch():
    pair = LoadedPair(*(replace(sample(OPTIONS, n, [IMAGE]), extra={"reference": -1.5}) for n in (8, 12)))
    with gpu():
        (micro,) = on_gpu([pair], OPTIONS)
        reference = micro.batch.extra["reference"]
        assert micro.num_samples == 1 and reference.is_cuda and reference.dtype == torch.float64


@needs("lora_enable")
@pytest.mark.parametrize("double_quant", [True, *rest(False)])
@pytest.mark.parametrize("quant_type", ["nf4", *rest("fp4")])
def test_weights_in_4_bits_with_lora(quant_type, double_quant):
    model = trained_once(lora_enable=True, bits=4, quant_type=quant_type, double_quant=double_quant)
    packed = [p for p in model.language_model.parameters() if p.dtype == torch.uint8]
    assert packed and all(p.is_cuda and p.grad is None for p in packed)
