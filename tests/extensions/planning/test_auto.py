"""Choices of auto: as many tokens as memory has room for and a step needs, and the fewest checkpointed layers."""

import pytest
from ds_json import arguments
from transformers import CLIPVisionConfig, LlamaConfig

from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.step_plan import largest_share
from llava_ds.engine.ds_config.resolve import resolve_ds_config
from llava_ds.extensions.planning.activations import activation_bytes
from llava_ds.extensions.planning.auto import FULL_TOKENS, Data, Devices, planned_run
from llava_ds.extensions.planning.fit import GB, Run, fits
from llava_ds.extensions.planning.shapes import shape_of
from llava_ds.model.open.tower import plan_tower

LAYERS, LONGEST = 4, 900
TEXT = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=176, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
VISION = CLIPVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=8
)
ZERO = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}


def plan(memory: float | None = None, share: int = 40_000, **flags: object) -> Run:
    args = arguments(**flags)
    shape = shape_of(TEXT, plan_tower(VISION, {}, "toy", args.model), args)
    resolved = resolve_ds_config(ZERO, args, dp=2, hidden_size=64, device_type="cuda", is_local=False)
    return planned_run(shape, resolved, Data(LONGEST, 0.2, share), Devices(2, 2, memory=memory))


AUTO = {"tokens_per_micro_batch": "auto"}


def need(tokens: int, again: int) -> float:
    """The memory that just holds a micro-batch of so many tokens."""
    how = {"gradient_checkpointing": "all"} if again else {}
    run = plan(tokens_per_micro_batch=tokens, **how)
    return run.estimate().total / 0.9 + 1


@pytest.mark.parametrize("how", ["off", "all"])
@pytest.mark.parametrize("tokens", [1024, 4096, 24576])
def test_auto_takes_the_most_tokens_that_have_room(how, tokens):
    memory = need(tokens, how == "all")
    run = plan(memory, **AUTO, gradient_checkpointing=how)
    assert run.batch.num_tokens == tokens and fits(run.estimate().total, memory)
    assert run.batch.num_recomputed == (LAYERS if how == "all" else 0)


def test_no_more_than_a_step_needs_and_no_less_than_a_sample():
    assert plan(10**12, share=5000, **AUTO).batch.num_tokens == 5000 // 64 * 64
    assert plan(1.0, **AUTO).batch.num_tokens == LONGEST
    assert plan(10**12, share=LONGEST, **AUTO).batch.num_tokens == LONGEST


def test_layers_run_again_for_a_full_micro_batch_and_for_no_more():
    auto = {**AUTO, "gradient_checkpointing": "auto"}
    ample = plan(need(16384, 0), **auto).batch
    assert (ample.num_tokens, ample.num_recomputed) == (16384, 0)
    least = plan(need(FULL_TOKENS, 0), **auto).batch
    assert (least.num_tokens, least.num_recomputed) == (FULL_TOKENS, 0)
    short = plan(need(FULL_TOKENS, 0) - 10**6, **auto).batch
    assert short.num_tokens == FULL_TOKENS and 0 < short.num_recomputed <= LAYERS
    scarce = plan(need(2048, 1), **auto).batch
    assert (scarce.num_tokens, scarce.num_recomputed) == (2048, LAYERS)


def test_the_fewest_layers_run_again():
    flags = {"tokens_per_micro_batch": 8192, "gradient_checkpointing": "auto"}
    memory = need(8192, 0)
    assert plan(memory, **flags).batch.num_recomputed == 0
    assert plan(None, **flags).batch.num_recomputed == 0  # of which nothing is known
    run = plan(memory - 10**7, **flags)
    fewer = run.batch.num_recomputed - 1
    assert fewer > 0 and fits(run.estimate().total, memory - 10**7)
    assert plan(1.0, **flags).batch.num_recomputed == LAYERS


def test_a_budget_for_activations_is_what_counts_where_it_is_given():
    run = plan(10**12, **AUTO, activation_memory_gb=0.05)
    more = plan(tokens_per_micro_batch=run.batch.num_tokens + 64)
    assert LONGEST < run.batch.num_tokens < 40_000
    assert activation_bytes(run.shape, run.batch, 4) <= 0.05 * GB < activation_bytes(run.shape, more.batch, 4)


def test_every_n_layers_are_as_many_as_run_again():
    flags = {"gradient_checkpointing": "all", "gradient_checkpointing_every_n_layers": 3}
    assert plan(**flags).batch.num_recomputed == 2  # the first and the fourth


def test_the_largest_share_lets_every_step_be_one_micro_batch():
    lengths = [10, 20, 30, 40, 50, 60, 70]
    order = SampleOrder(7, 3, seed=0, how="file")
    assert largest_share(order, lengths, 2) == (40 + 50 + 60) // 2 + 70
