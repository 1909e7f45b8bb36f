# T tokens of all samples laid end to end, D language-model width
"""Stages of a pipeline: each has consecutive layers of the language model, with the complete model's parameter names.

The first stage also has tower, projector and embeddings, the last one the final norm and the output layer. Modules of
other stages are replaced by parameterless identity modules, so that the language model's own forward runs through all
layers by number.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.batch import Batch
from llava_ds.model.open import probe
from llava_ds.tracking.flops import SAMPLE, ModelFlops

HIDDEN = "hidden"  # in Batch.extra: the hidden states (1, T, D) from the previous stage


@dataclass(frozen=True)
class Stage:
    """A rank's stage, number `index` of `size`.

    group: the ranks of one pipeline, in stage order; width: D; dtype: of the tensors sent between stages.
    """

    index: int
    size: int
    group: torch.distributed.ProcessGroup
    width: int
    dtype: torch.dtype

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


def owners(model: nn.Module, flops: ModelFlops, num_image_tokens: int, size: int) -> tuple[list[int], dict[str, int]]:
    """Return the layers of each stage, and the stage of each parameter of a complete LlavaModel, by name.

    Stages are cut to cost the same for a sample with one tile of num_image_tokens.
    """
    num_layers = len(model.language_model.base_model.layers)
    per_image_token, supervised = SAMPLE
    tokens = per_image_token * num_image_tokens
    layer = flops.of(tokens, tokens * (tokens + 1) / 2, 0, 0) / num_layers
    counts = layers_of_stages(flops.per_tile, layer, flops.per_target * supervised * tokens, num_layers, size)
    return counts, stage_of_parameters(model, counts)


def layers_of_stages(first: float, layer: float, last: float, num_layers: int, size: int) -> list[int]:
    """Return the number of layers per stage that minimizes the cost of the costliest stage; each has at least one.

    first, last: cost of the first and last stage without layers; layer: cost of a layer, in the same unit.
    """
    beside = [first, *[0.0] * (size - 2), last]
    bounds = sorted(cost + n * layer for cost in set(beside) for n in range(1, num_layers + 1))
    rooms = ([int((bound - cost) / layer + 1e-9) for cost in beside] for bound in bounds)
    counts = next(room for room in rooms if min(room) >= 1 and sum(room) >= num_layers)
    for _ in range(sum(counts) - num_layers):  # from the costliest stage with more than one
        costs = [cost + n * layer if n > 1 else -1.0 for cost, n in zip(beside, counts)]
        counts[costs.index(max(costs))] -= 1
    return counts


def keep_stage(model: nn.Module, counts: list[int], index: int, group: torch.distributed.ProcessGroup) -> None:
    """Reduce a LlavaModel without weights to stage `index`.

    counts: layers of each stage; group: the ranks of this rank's pipeline.
    """
    trunk, output = model.language_model.base_model, model.language_model.get_output_embeddings()
    layers, begin = trunk.layers, sum(counts[:index])
    assert all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
    stages = stage_of_parameters(model, counts)
    width, dtype = output.weight.shape[1], output.weight.dtype
    model.stage = Stage(index, len(counts), group, width, dtype)
    for n in range(len(layers)):
        if not begin <= n < begin + counts[index]:
            layers[n] = _Elsewhere()
    if not model.stage.is_last:
        model.short_last_layer = False
        model.end = _hand_on
        trunk.norm = _Elsewhere()
        model.language_model.set_output_embeddings(_Elsewhere())
    if not model.stage.is_first:
        model.begin = partial(_begin_from_hidden, model)
        model.language_model.set_input_embeddings(_Elsewhere())
        for name in ("vision_tower", "projector", "newline"):
            if hasattr(model, name):
                setattr(model, name, _Elsewhere())
    assert {name for name, stage in stages.items() if stage == index} == dict(model.named_parameters()).keys()


def _begin_from_hidden(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
    """Return the previous stage's hidden states instead of embeddings, and the layers' other arguments."""
    return batch.extra[HIDDEN], model.layer_options(batch)


def _hand_on(hidden: torch.Tensor, *_: object) -> torch.Tensor:
    """Return the hidden states (1, T, D) for the next stage, whatever the head."""
    return hidden


def stage_of_parameters(model: nn.Module, counts: list[int]) -> dict[str, int]:
    """Return the stage of each parameter of a complete LlavaModel, by name. counts: layers of each stage."""
    trunk, output = model.language_model.base_model, model.language_model.get_output_embeddings()
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    found = {id(p): stage for layer, stage in zip(trunk.layers, stages, strict=True) for p in layer.parameters()}
    found |= {id(p): len(counts) - 1 for part in (trunk.norm, output) for p in part.parameters()}
    return {name: found.get(id(p), 0) for name, p in model.named_parameters()}


def problem(config: PreTrainedConfig) -> str | None:
    """Return why a language model can't be cut into stages, or None. Cuts and compares a small random copy."""
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
    if language_model.get_output_embeddings().weight is language_model.get_input_embeddings().weight:
        return "output layer is its embedding, and the first and last stage would each train a copy"
    with torch.no_grad():
        expected, (first, *others), norm = trunk(**inputs)[0], trunk.layers, trunk.norm
        trunk.layers, trunk.norm = nn.ModuleList([first, *(_Elsewhere() for _ in others)]), _Elsewhere()
        hidden = trunk(**inputs)[0]
        trunk.layers, trunk.norm = nn.ModuleList([_Elsewhere(), *others]), norm
        found = trunk(**{**inputs, "inputs_embeds": hidden})[0]
    if not torch.equal(found, expected):
        return "trunk changes the inputs or outputs of its layers, and every stage would repeat that"
    return None
