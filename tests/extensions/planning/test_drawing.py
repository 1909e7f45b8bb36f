"""Memory and time of steps that draw: what is counted, and what flags change."""

import dataclasses
import importlib.util

import pytest
import torch
from launching import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from llava_ds.extensions.planning.auto import Devices
from llava_ds.extensions.planning.drawing import DrawingStep, drawing_lines, drawing_of
from llava_ds.runtime.gpus import gpu_named

FLAGS = ("--objective", "grpo", "--reward_funcs", "exact", "--model_max_length", "1024", "--num_gpus", "8")
FLAGS += ("--per_device_train_batch_size", "8", "--gpu", "h100", "--speed")


@pytest.fixture(scope="module")
def planned():
    """The tiny model's run on 8 GPUs, its flags and its estimate of speed."""
    spec = importlib.util.spec_from_file_location("estimate", ROOT / "run" / "estimate.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    own, args = script.parse(list(FLAGS))
    run, resolved = script.read_run(own, args, Devices(8, 8))
    return run, resolved.args, script.read_speed(own, run, resolved, gpu_named("h100"), None)


def changed(planned, **drawn) -> DrawingStep:
    """The step of the run with another drawing."""
    run, args, _ = planned
    return DrawingStep.of(run, drawing_of(run, args).drawn._replace(**drawn), None, 8)


def test_only_runs_that_draw_have_it(planned):
    run, args, _ = planned
    assert drawing_of(run, args).drawn == (8, 1024, 256, 8, 8, True, 0, 1, False)
    other = dataclasses.replace(args, training=dataclasses.replace(args.training, objective="sft"))
    assert drawing_of(run, other) is None
    some = args.replaced(beta=0.1, num_iterations=2, per_device_generation_batch_size=4)
    assert drawing_of(run, some).drawn == (8, 1024, 256, 4, 8, True, 1, 2, False)


def test_the_parts_of_memory(planned):
    step, text, w = changed(planned), planned[0].shape.text, planned[0].setup.weight_bytes
    found, weights = step.memory(), w * planned[0].shape.num_parameters
    assert found["cache"] == 2 * text.key * (text.num_layers + 1) * 8 * 8 * 1024 * w
    assert found["logits"] == 44 * 8 * 8 * text.vocab and found["gathered_weights"] == weights
    parts = sum(found[name] for name in ("gathered_weights", "cache", "logits", "prompts"))
    states = found["drawing"] - parts
    assert 0 < states < found["training"]
    other = changed(planned, at_once=4, frozen_models=2).memory()
    assert other["cache"] * 2 == found["cache"] and other["training"] - found["training"] == 2 * weights
    assert other["frozen_models"] == 2 * weights
    run = dataclasses.replace(step.run, placement=dataclasses.replace(step.run.placement, stage=2))
    assert DrawingStep(run, step.drawn).memory()["gathered_weights"] == 0
    assert changed(planned, by_server=True).memory()["drawing"] == 0


def test_a_cache_is_as_large_as_transformers():
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.no_grad():
        cache = LlamaForCausalLM(config)(torch.zeros(6, 20, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
    assert held == 2 * 32 * 3 * 6 * 20 * 4  # two key widths of every layer for every row and token, in float32


def test_shared_prompts_take_less_of_the_training_pass(planned):
    shared, alone = changed(planned), changed(planned, shares=False)
    assert (shared.tokens_of_prompt, alone.tokens_of_prompt) == (768 + 8 * 256, 8 * 1024)
    assert shared.memory()["training"] < alone.memory()["training"]
    load, machine = planned[2].load, planned[2].machine
    one, other = shared.seconds(load, machine), alone.seconds(load, machine)
    assert one["training"] < other["training"] and one["answers"] == other["answers"]


def test_the_time_of_drawing_is_that_of_reading(planned):
    load, machine, few = planned[2].load, planned[2].machine, {"answers": 1, "at_once": 8}
    text, flops, w = planned[0].shape.text, planned[0].shape.flops, planned[0].setup.weight_bytes
    step = changed(planned, **few)
    weights = w * (flops.forward_per_token / 2 + text.hidden * text.vocab)
    read = weights + step.cache_bytes * (768 + 128) / 1024
    assert step.seconds(load, machine)["answers"] == pytest.approx(256 * read / machine.memory_bandwidth)
    halved = changed(planned, **few | {"at_once": 4}).seconds(load, machine)
    assert halved["answers"] > step.seconds(load, machine)["answers"]
    more = changed(planned, **few, updates=2, frozen_models=1).seconds(load, machine)
    assert more["training"] == pytest.approx(2 * step.seconds(load, machine)["training"]) and more["frozen models"] > 0
    assert changed(planned, by_server=True).seconds(load, machine)["answers"] == 0


def test_the_lines_say_both_passes_and_the_assumption(planned):
    step = changed(planned)
    text = "\n".join(drawing_lines(step, 80e9, step.seconds(planned[2].load, planned[2].machine)))
    for part in (
        "8 answers of at most 256 tokens",
        "sampling",
        "cache",
        "training pass",
        "fits",
        "no answer ends early",
    ):
        assert part in text
    assert "sampled by the server" in drawing_lines(changed(planned, by_server=True), None)[1]
