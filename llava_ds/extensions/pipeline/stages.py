# T tokens of all samples laid end to end, D language-model width
"""Stages of a pipeline: each has consecutive layers of the language model, with the complete model's parameter names.

The first stage also has tower, projector and embeddings, and all layers after which features of the tower are added.
The last stage has the final norm, the output layer and the value head. Modules of other stages are replaced by identity
modules without parameters, so that the language model's forward can still loop over all layers.

An output layer tied to the embedding belongs to the first stage. The last stage uses a copy that is not a parameter,
and sends the copy's gradient to the first stage (stage_runner.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.batch import Batch
from llava_ds.constants import ConfigError
from llava_ds.model.open import probe
from llava_ds.model.vision import TowerPlan
from llava_ds.tracking.flops import SAMPLE, ModelFlops

HIDDEN = "hidden"  # in Batch.extra: the hidden states (1, T, D) from the previous stage


@dataclass(frozen=True)
class Stage:
    """A rank's stage, number `index` of `size`.

    group: the ranks of one pipeline, in stage order. width: D. dtype: of the tensors sent between stages. tied_rows:
    number of rows (vocabulary size) if the output layer is tied to the embedding, otherwise 0.
    """

    index: int
    size: int
    group: torch.distributed.ProcessGroup
    width: int
    dtype: torch.dtype
    tied_rows: int = 0

    @property
    def is_first(self) -> bool:
        """True for the stage that takes ids and images."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.index == self.size - 1


def stage_of(engine: Any) -> Stage:
    """Return the stage of an engine's model."""
    return engine.module.stage


class _Elsewhere(nn.Module):
    """Replaces a module of another stage by the identity."""

    def forward(self, hidden: torch.Tensor, *_, **__) -> torch.Tensor:
        return hidden


class TiedCopy(nn.Module):
    """State of the last stage's copy of the embedding. Every stage tracks this state, and it is equal on all stages.

    is_fresh: True if the copy equals the embedding. Weights can't change while a model stays in eval mode, so only a
    change of mode marks the copy as stale.
    """

    is_fresh = False

    def train(self, mode: bool = True) -> "TiedCopy":
        """Set the mode, and mark the copy as stale."""
        self.is_fresh = False
        return super().train(mode)


def owners(model: nn.Module, flops: ModelFlops, tower: TowerPlan, size: int) -> tuple[list[int], dict[str, int]]:
    """Return the number of layers per stage, and a map from a complete LlavaModel's parameter names to stages.

    Balances the stages' FLOPs for a sample with one tile. Raises ConfigError if there are too few layers.
    """
    num_layers = len(model.language_model.base_model.layers)
    check_layers(num_layers, tower, size)
    per_image_token, supervised = SAMPLE
    tokens = per_image_token * tower.images.num_tokens
    layer = flops.of(tokens, tokens * (tokens + 1) / 2, 0, 0) / num_layers
    last = flops.per_target * supervised * tokens
    counts = layers_of_stages(flops.per_tile, layer, last, num_layers, size, max(1, tower.fed_layers))
    return counts, stage_of_parameters(model, counts)


def check_layers(num_layers: int, tower: TowerPlan, size: int) -> None:
    """Raise ConfigError if the first stage can't have all layers after which features of the tower are added."""
    if num_layers - (size - 1) < tower.fed_layers:
        most = num_layers - tower.fed_layers + 1
        raise ConfigError(
            f"--pipeline_parallel_size is {size}: features of the vision tower are added after the language model's "
            f"first {tower.fed_layers} layers, and only the first stage has them: with {num_layers} layers give {most} "
            "or fewer"
        )


def layers_of_stages(
    first: float, layer: float, last: float, num_layers: int, size: int, at_first: int = 1
) -> list[int]:
    """Return the number of layers per stage that minimizes the cost of the costliest stage. Each has at least one
    layer, the first at least at_first.

    first, last: cost of the first and last stage without layers. layer: cost of a layer, in the same unit.
    """
    beside, least = [first, *[0.0] * (size - 2), last], [at_first, *[1] * (size - 1)]
    bounds = sorted(cost + n * layer for cost in set(beside) for n in range(1, num_layers + 1))
    rooms = ([int((bound - cost) / layer + 1e-9) for cost in beside] for bound in bounds)
    enough = (room for room in rooms if all(n >= fewest for n, fewest in zip(room, least)))
    counts = next(room for room in enough if sum(room) >= num_layers)
    for _ in range(sum(counts) - num_layers):  # take a layer from the costliest stage that may have fewer
        costs = [cost + n * layer if n > fewest else -1.0 for cost, n, fewest in zip(beside, counts, least)]
        counts[costs.index(max(costs))] -= 1
    return counts


def keep_stage(model: nn.Module, counts: list[int], index: int, group: torch.distributed.ProcessGroup) -> None:
    """Reduce a LlavaModel without weights to stage `index`.

    counts: number of layers per stage. group: the ranks of this rank's pipeline.
    """
    trunk, output = model.language_model.base_model, model.language_model.get_output_embeddings()
    layers, begin = trunk.layers, sum(counts[:index])
    assert all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    stages = stage_of_parameters(model, counts)
    rows, width = output.weight.shape
    is_tied = output.weight is model.language_model.get_input_embeddings().weight
    model.stage = Stage(index, len(counts), group, width, output.weight.dtype, rows if is_tied else 0)
    model.language_model.tied_copy = TiedCopy()
    for n in range(len(layers)):
        if not begin <= n < begin + counts[index]:
            layers[n] = _Elsewhere()
    if not model.stage.is_last:
        model.short_last_layer = False
        model.end = lambda hidden, *_: hidden  # (1, T, D) for the next stage, with any head
        trunk.norm = _Elsewhere()
        model.language_model.set_output_embeddings(_Elsewhere())
        if hasattr(model, "value_head"):
            model.value_head = _Elsewhere()
    elif is_tied:
        del output.weight
        output.weight = None  # set when the first stage sends the embedding
    if not model.stage.is_first:
        model.begin = partial(_begin_from_hidden, model)
        model.language_model.set_input_embeddings(_Elsewhere())
        for name in ("vision_tower", "projector", "newline"):
            if hasattr(model, name):
                setattr(model, name, _Elsewhere())
    assert {name for name, stage in stages.items() if stage == index} == dict(model.named_parameters()).keys()


def _begin_from_hidden(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
    """Return the previous stage's hidden states, used instead of embeddings, and the layers' other arguments."""
    return batch.extra[HIDDEN], model.layer_options(batch)


def stage_of_parameters(model: nn.Module, counts: list[int]) -> dict[str, int]:
    """Map a complete LlavaModel's parameter names to stages. counts: number of layers per stage."""
    trunk, output = model.language_model.base_model, model.language_model.get_output_embeddings()
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    found = {id(p): stage for layer, stage in zip(trunk.layers, stages, strict=True) for p in layer.parameters()}
    ends = [trunk.norm, output, *([model.value_head] if hasattr(model, "value_head") else [])]
    found |= {id(p): len(counts) - 1 for part in ends for p in part.parameters()}
    found[id(model.language_model.get_input_embeddings().weight)] = 0  # also if the output layer is tied to it
    return {name: found.get(id(p), 0) for name, p in model.named_parameters()}


def problem(config: PreTrainedConfig) -> str | None:
    """Return why a language model can't be cut into stages, or None. Cuts a small random copy and compares results."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        language_model = probe.random_copy(config)
        inputs = probe.random_inputs(language_model)
    trunk = language_model.base_model
    if not isinstance(getattr(trunk, "layers", None), nn.ModuleList) or not hasattr(trunk, "norm"):
        return "names of layers and of the final norm are not Llama's"
    beside = {name.split(".")[0] for name, _ in trunk.named_parameters()} - {"layers", "norm", "embed_tokens"}
    if beside:
        return f"{min(beside)} is not a layer and not at the start or end"
    if getattr(config, "num_kv_shared_layers", None):
        return "last layers read keys and values of earlier ones, which may be on another stage"
    with torch.no_grad():
        expected, (first, *others), norm = trunk(**inputs)[0], trunk.layers, trunk.norm
        trunk.layers, trunk.norm = nn.ModuleList([first, *(_Elsewhere() for _ in others)]), _Elsewhere()
        hidden = trunk(**inputs)[0]
        trunk.layers, trunk.norm = nn.ModuleList([_Elsewhere(), *others]), norm
        found = trunk(**{**inputs, "inputs_embeds": hidden})[0]
    if not torch.equal(found, expected):
        return "trunk changes the inputs or outputs of its layers, and every stage would repeat that"
    return None
