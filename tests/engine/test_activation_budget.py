"""The fewest layers run again that a budget allows, and measuring changes nothing."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig

from llava_ds.batch import Batch
from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.engine.activation_budget import GB, Kept, LayerKind, choose_layers, measure
from llava_ds.engine.activation_checkpointing import recompute_layers, recompute_only, repeated_layers
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.engine.warm_up import Heaviest, missing_states, rehearse
from llava_ds.model.llava import assemble
from llava_ds.model.vision import plan_tower
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
    """As much of an engine as measuring and rehearsing ask for: one rank, stage 0."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module, self.device, self.dp_world_size = model, torch.device("cpu"), 1
        self.optimizer = self.basic_optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        self.boundaries = []

    def __call__(self, batch: Batch) -> torch.Tensor:
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
        recompute_layers(part)
    return Engine(model), parts


def heaviest(accumulates: bool = False) -> Heaviest:
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
        pool_index=torch.zeros(0, 1, dtype=torch.int64),
        pool_weight=torch.zeros(0, 1),
        image_positions=torch.arange(tiles * 9),
        feature_index=torch.arange(tiles * 9),
    )
    return Heaviest(batch, [7, 3], accumulates)


def really_kept(engine: Engine, parts: dict[str, torch.nn.Module]) -> int:
    """Bytes of the storages that a forward leaves for backward, with the inputs of layers that run again."""
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
        loss = engine(heaviest().batch)
    for hook in hooks:
        hook.remove()
    weights = {p.untyped_storage().data_ptr() for p in (*engine.module.parameters(), *engine.module.buffers())}
    assert loss.requires_grad
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)


@pytest.mark.parametrize("trained_tower", [False, True])
def test_what_is_measured_once_is_what_every_choice_really_keeps(trained_tower):
    engine, parts = an_engine(trained_tower)
    kept, _ = measure(engine, heaviest(), parts, num_moments=2)
    assert [len(kind.layers) for kind in kept.kinds] == [LAYERS, TOWER_LAYERS][: len(parts)]
    for num_recomputed in range(kept.num_layers + 1):
        counts = kept.counts(num_recomputed)
        assert sum(counts) == num_recomputed
        for kind, count in zip(kept.kinds, counts):
            recompute_only(kind.layers, count)
        running = max((kind.kept_bytes for kind, count in zip(kept.kinds, counts) if count), default=0)
        # Cosines and sines of the positions (8 wide) live as long as a layer that runs again, but no hook sees them.
        assert kept.need(counts) - running == pytest.approx(really_kept(engine, parts), abs=2 * 140 * 8 * 4)


@pytest.mark.parametrize("wanted", [0, 2, 4, 5, 8])
def test_a_budget_is_met_by_the_fewest_layers_and_they_change_no_gradient(wanted):
    engine, parts = an_engine(trained_tower=True)
    kept, room = measure(engine, heaviest(), parts, num_moments=2)
    assert room > GB / 10  # of this machine's memory
    budget = (kept.need(kept.counts(wanted)) + 1) / GB
    lines = choose_layers(engine, heaviest(), parts, 2, budget, RANKS)
    chosen = [[layer.gradient_checkpointing for layer in kind.layers] for kind in kept.kinds]
    assert sum(map(sum, chosen)) == wanted
    assert f"{sum(chosen[0])} of {LAYERS} layers of the language model run again" in "\n".join(lines)
    gaps = [i for i, again in enumerate(chosen[0]) if again]
    assert all(abs(b - a) <= -(-LAYERS // len(gaps)) for a, b in itertools.pairwise(gaps))  # evenly spread

    def gradients() -> tuple[float, list[torch.Tensor]]:
        engine.module.zero_grad()
        torch.manual_seed(3)
        loss = engine(heaviest().batch)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in engine.module.parameters() if p.grad is not None]

    loss, found = gradients()
    for part in parts.values():
        recompute_only(repeated_layers(part), 0)
    whole, expected = gradients()
    assert loss == whole and len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_all_layers_run_again_where_the_budget_is_too_small_and_that_is_said():
    engine, parts = an_engine()
    lines = choose_layers(engine, heaviest(), parts, 2, 1e-6, RANKS)
    assert all(layer.gradient_checkpointing for layer in repeated_layers(parts["language model"]))
    assert "may not fit" in lines[-1]


def test_layers_that_save_most_run_again_first():
    kinds = [LayerKind("small", [None] * 2, 10, 5), LayerKind("large", [None] * 3, 100, 20)]
    kept = Kept(kinds, other_bytes=7)
    assert [kept.counts(n) for n in range(6)] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 3], [2, 3]]
    assert kept.need([0, 0]) == 7 + 20 + 300 and kept.need([1, 3]) == 7 + 10 + 5 + 60 + 100
    assert kept.fewest(327) == 0 and kept.fewest(326) == 2 and kept.fewest(100) is None


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_rehearsal_leaves_nothing_behind(accumulates):
    engine, parts = an_engine()
    before = torch.get_rng_state()
    weights = [p.clone() for p in engine.module.parameters()]
    measure(engine, heaviest(accumulates), parts, 2)
    rehearse(engine, heaviest(accumulates), 10**15)  # which is held on a GPU only
    assert engine.boundaries == [*[False] * accumulates, True] * 2
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in engine.module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, engine.module.parameters()))


def test_states_that_the_first_step_makes_are_counted_until_they_are_there():
    weight = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([weight])
    engine = SimpleNamespace(basic_optimizer=optimizer, device=torch.device("cpu"))
    assert missing_states(engine, 2) == 2 * 10 * 4
    weight.grad = torch.ones(10)
    optimizer.step()
    assert missing_states(engine, 2) == 0
