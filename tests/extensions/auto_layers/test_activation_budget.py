"""The fewest layers are checkpointed that a budget allows, and measuring changes nothing."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig

from llava_ds.batch import Batch, Placing
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.engine.activation_checkpointing import checkpoint_layers, checkpoint_spread, repeated_layers
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.engine.runner import Direct
from llava_ds.engine.warm_up import LargestMicroBatch, missing_state_bytes, warm_up
from llava_ds.extensions.auto_layers.activation_budget import (
    GB,
    ActivationMemory,
    PartLayers,
    choose_checkpointed_layers,
    measure,
)
from llava_ds.model.llava import assemble
from llava_ds.model.open.tower import plan_tower
from llava_ds.runtime.ranks import Ranks

LAYERS, TOWER_LAYERS = 5, 3
RANKS = Ranks(0, 0, 1, torch.device("cpu"))
TEXT = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, attention_dropout=0.2,
)  # fmt: skip
VISION = CLIPVisionConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=TOWER_LAYERS + 1, num_attention_heads=2, image_size=24,
    patch_size=8,
)  # fmt: skip


class Engine:
    """As much of an engine as measuring and warming up ask for: one rank, stage 0."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module, self.device, self.dp_world_size = model, torch.device("cpu"), 1
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        self.boundaries = []

    def __call__(self, batch: Batch, head: object = None) -> torch.Tensor:
        return self.module(batch)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def train(self) -> None:
        self.module.train()

    def zero_grad(self) -> None:
        self.module.zero_grad()

    def zero_optimization_stage(self) -> int:
        return 0


def an_engine(trained_tower: bool = False) -> tuple[Engine, dict[str, torch.nn.Module]]:
    flags = ModelArguments(unfreeze_mm_vision_tower=trained_tower)
    args = Arguments(flags, DataArguments(), TrainingArguments(), frozenset())
    torch.manual_seed(0)
    model = assemble(TEXT, plan_tower(VISION, {}, "toy", flags), flags, torch.zeros(3), torch.ones(3)).train()
    choose_trainable(model, args)
    parts = {"language model": model.language_model}
    if trained_tower:
        parts["vision tower"] = model.vision_tower.tower
    for part in parts.values():
        checkpoint_layers(part)
    return Engine(model), parts


def largest(accumulates: bool = False) -> LargestMicroBatch:
    lengths, tiles = [90, 50], 4
    generator = torch.Generator().manual_seed(1)
    batch = Batch(
        input_ids=torch.randint(300, (1, sum(lengths)), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seqlens=torch.tensor([0, 90, 140], dtype=torch.int32),
        max_seqlen=90,
        target_positions=torch.arange(30),
        targets=torch.randint(300, (30,), generator=generator),
        sources=torch.zeros(len(lengths), dtype=torch.int64),
        target_samples=torch.zeros(30, dtype=torch.int64),
        pixel_values=torch.randint(255, (tiles, 3, 24, 24), generator=generator, dtype=torch.uint8),
        placing=Placing(
            torch.arange(tiles * 9), torch.arange(tiles * 9), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)
        ),
    )
    return LargestMicroBatch(batch, [7, 3], accumulates)


def really_saved(engine: Engine, parts: dict[str, torch.nn.Module]) -> int:
    """Bytes of the storages that a forward saves for backward, with the inputs of checkpointed layers."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    def keep_input(_: torch.nn.Module, inputs: tuple) -> None:
        keep(inputs[0])

    again = [layer for part in parts.values() for layer in repeated_layers(part) if layer.gradient_checkpointing]
    hooks = [layer.register_forward_pre_hook(keep_input) for layer in again]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine(largest().batch)
    for hook in hooks:
        hook.remove()
    weights = {p.untyped_storage().data_ptr() for p in (*engine.module.parameters(), *engine.module.buffers())}
    assert loss.requires_grad
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)


@pytest.mark.parametrize("trained_tower", [False, True])
def test_what_is_measured_once_is_what_every_choice_really_saves(trained_tower):
    engine, parts = an_engine(trained_tower)
    memory, _ = measure(engine, largest(), parts, num_moments=2)
    assert [len(part.layers) for part in memory.parts] == [LAYERS, TOWER_LAYERS][: len(parts)]
    for num_checkpointed in range(memory.num_layers + 1):
        counts = memory.counts(num_checkpointed)
        assert sum(counts) == num_checkpointed
        for part, count in zip(memory.parts, counts):
            checkpoint_spread(part.layers, count)
        recomputed = max((part.saved_bytes for part, count in zip(memory.parts, counts) if count), default=0)
        # Cosines and sines of the positions (8 wide) live as long as a recomputed layer, but no hook sees them.
        assert memory.need(counts) - recomputed == pytest.approx(really_saved(engine, parts), abs=2 * 140 * 8 * 4)


@pytest.mark.parametrize("wanted", [0, 2, 4, 5, 8])
def test_a_budget_is_met_by_the_fewest_layers_and_they_change_no_gradient(wanted):
    engine, parts = an_engine(trained_tower=True)
    memory, room = measure(engine, largest(), parts, num_moments=2)
    assert room > GB / 10  # of this machine's memory
    budget = (memory.need(memory.counts(wanted)) + 1) / GB
    lines = choose_checkpointed_layers(engine, largest(), parts, 2, budget, RANKS)
    chosen = [[layer.gradient_checkpointing for layer in part.layers] for part in memory.parts]
    assert sum(map(sum, chosen)) == wanted
    assert f"{sum(chosen[0])} of {LAYERS} layers of the language model are checkpointed" in "\n".join(lines)
    gaps = [i for i, again in enumerate(chosen[0]) if again]
    assert all(abs(b - a) <= -(-LAYERS // len(gaps)) for a, b in itertools.pairwise(gaps))  # evenly spread

    def gradients() -> tuple[float, list[torch.Tensor]]:
        engine.module.zero_grad()
        torch.manual_seed(3)
        loss = engine(largest().batch)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]

    loss, found = gradients()
    for part in parts.values():
        checkpoint_spread(repeated_layers(part), 0)
    whole, expected = gradients()
    assert loss == whole and len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_all_layers_are_checkpointed_where_the_budget_is_too_small_and_that_is_said():
    engine, parts = an_engine()
    lines = choose_checkpointed_layers(engine, largest(), parts, 2, 1e-6, RANKS)
    assert all(layer.gradient_checkpointing for layer in repeated_layers(parts["language model"]))
    assert "may not fit" in lines[-1]


def test_layers_that_save_most_are_checkpointed_first():
    parts = [PartLayers("small", [None] * 2, 10, 5), PartLayers("large", [None] * 3, 100, 20)]
    memory = ActivationMemory(parts, other_bytes=7)
    assert [memory.counts(n) for n in range(6)] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 3], [2, 3]]
    assert memory.need([0, 0]) == 7 + 20 + 300 and memory.need([1, 3]) == 7 + 10 + 5 + 60 + 100
    assert memory.fewest(327) == 0 and memory.fewest(326) == 2 and memory.fewest(100) is None


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_warm_up_leaves_nothing_behind(accumulates):
    engine, parts = an_engine()
    before = torch.get_rng_state()
    weights = [p.clone() for p in engine.module.parameters()]
    measure(engine, largest(accumulates), parts, 2)
    warm_up(Direct(engine), largest(accumulates), 10**15)  # which is held on a GPU only
    assert engine.boundaries == [*[False] * accumulates, True] * 2
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in engine.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters()))


def test_states_that_the_first_step_makes_are_counted_until_they_are_there():
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([weight])
    engine = SimpleNamespace(basic_optimizer=optimizer, device=torch.device("cpu"))
    assert missing_state_bytes(engine, 2) == 2 * 10 * 4
    weight.grad = torch.ones(10)
    optimizer.step()
    assert missing_state_bytes(engine, 2) == 0
