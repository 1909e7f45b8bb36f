"""Forward and backward of ready models over fake CUDA tensors: nothing waits or mixes."""

import sys
from dataclasses import replace

import pytest
import ready_models
from daily import few, rest
from fake_gpu import gpu
from fake_models import arguments, backward, built, delta_net_kernels, flash_attn_2, flash_attn_3, on_gpu, talks

from llava_ds.data.loaded_pairs import common_prompt
from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.model.heads import SummedLoss
from llava_ds.model.open.model_plan import plan_model

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("trained", [True, *rest(False)], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", few(ready_models.FAMILIES, ("smolvlm", "qwen2_5_vl", "gemma4")))
def test_ready_models(family, trained, tmp_path):
    ready_model_trained_once(family, tmp_path, trained)


@pytest.mark.long
@pytest.mark.parametrize(("package", "capability"), [(flash_attn_2, (8, 0)), (flash_attn_3, (9, 0))])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_images_that_see_each_other_with_flash_attn(monkeypatch, tmp_path, package, capability, checkpointed):
    module = package()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ready_model_trained_once("gemma3", tmp_path, capability=capability, checkpointed=checkpointed)
    assert module.calls == 2 * 2 * (1 + checkpointed)  # of each layer once for all tokens, once for images
    module.calls = 0
    ready_model_trained_once("gemma4", tmp_path / "4", capability=capability, checkpointed=checkpointed)
    in_tower = 2
    assert module.calls == in_tower + 3 * (1 + checkpointed)  # of one layer for all tokens alone


@pytest.mark.parametrize("checkpointed", [True, *rest(False)])
@pytest.mark.parametrize("family", ["gemma4", *rest("gemma4_e")])
def test_heads_that_are_too_wide_for_every_kernel(family, tmp_path, checkpointed):
    """Their samples are computed one by one, by lengths that the host knows."""
    ready_model_trained_once(family, tmp_path, checkpointed=checkpointed, global_head_dim=264)


@pytest.mark.parametrize("checkpointed", [True, *rest(False)])
def test_states_of_a_pack_with_kernels(monkeypatch, tmp_path, checkpointed):
    calls = delta_net_kernels(monkeypatch)
    ready_model_trained_once("qwen3_5", tmp_path, checkpointed=checkpointed)
    assert calls == dict.fromkeys(calls, 2 * (1 + checkpointed))  # of each of two layers


@pytest.mark.parametrize("family", ["smolvlm", "gemma4", *rest("qwen3_vl", "gemma3")])
def test_answers_that_share_their_prompt(family, tmp_path):
    wide = {"global_head_dim": 264} if family == "gemma4" else {}
    ready_model_trained_once(family, tmp_path, twice=True, **wide)


def ready_model_trained_once(
    family, tmp_path, trained=False, capability=(9, 0), checkpointed=False, twice=False, **text
):
    """twice: every sample comes twice, and the second shares the prompt."""
    args = arguments(**ready_models.write_ready(tmp_path, family, **text), version="processor", tune_mm_vision=trained,
                     tune_mm_mlp=True, tune_mm_llm=True)  # fmt: skip
    plan = plan_model(args.model, 512)
    options = plan.tower.image_options(args)
    with gpu(capability=capability) as rules:
        with rules.building():
            model = built(plan.text_config, plan.tower, args, short=plan.whole_last_layer is None)
            if checkpointed:
                checkpoint_layers(model.language_model)
        samples = talks(options)
        if twice:
            samples = [both for one in samples for both in (one, replace(one, shared=common_prompt(one, one)))]
        (micro,) = on_gpu(samples, options)
        assert (micro.batch.shared is not None) == twice
        loss, _ = model(micro.batch, SummedLoss(2))
        backward(model, loss)
        assert not rules.waits
    assert any(p.grad is not None for p in model.vision_tower.parameters()) == trained
