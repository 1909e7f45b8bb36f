"""The stages of a pipeline over fake CUDA tensors: forward and backward of each, and nothing waits."""

import dataclasses

import pytest
import torch
import toys
from fake_gpu import gpu
from fake_models import arguments, built, sample, tower_plan

from llava_ds.data.collate import collate
from llava_ds.engine.activation_checkpointing import checkpoint_layers
from llava_ds.model.heads import SummedLoss

schedule = pytest.importorskip("llava_ds.extensions.pipeline.stage_runner")
stages = pytest.importorskip("llava_ds.extensions.pipeline.stages")

pytestmark = pytest.mark.cuda

COUNTS = [2, 1, 1]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("recomputed", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("index", range(len(COUNTS)))
def test_forward_and_backward_of_a_stage(index, family, recomputed):
    options = toys.image_options()
    args, text = arguments(), toys.language_model_config(family, num_hidden_layers=sum(COUNTS))
    samples = [sample(options, 9, [("image", ((40, 30),))]), sample(options, 30)]
    with gpu() as rules:
        with rules.building():
            model = built(text, tower_plan("clip", args), args, short=False)
            stages.keep_stage(model, COUNTS, index, None)
            if index == len(COUNTS) - 1:
                model.shorten_last_layer()
            if recomputed:
                checkpoint_layers(model.language_model)
        batch = collate(samples, options).pin_memory().to(torch.device("cuda"))
        shape = (1, batch.input_ids.shape[1], model.stage.width)
        if index > 0:
            received = torch.empty(shape, dtype=model.stage.dtype, device="cuda", requires_grad=True)
            batch = dataclasses.replace(batch, extra={stages.HIDDEN: received})
        if model.stage.is_last:
            loss, _ = model(batch, SummedLoss(1))
        else:
            output = model(batch)
            assert (tuple(output.shape), output.dtype, output.device.type) == (shape, model.stage.dtype, "cuda")
            loss = schedule.backward_from(output, torch.empty_like(output))
        loss.backward()
        if index > 0:
            assert (received.grad.shape, received.grad.dtype) == (received.shape, model.stage.dtype)
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        assert not rules.waits
