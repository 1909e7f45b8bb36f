"""Read the experts of an upcycled model from its configuration."""

import re
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from llava_ds.constants import ConfigError
from llava_ds.extensions.mixtures.kinds import UPCYCLED
from llava_ds.files.model_files import shown

GATE, NAMES = "deepspeed_moe.gate.wg.weight", "deepspeed_moe.experts.deepspeed_experts."  # inside the MLP's module
MOST_EXPERTS = 1024  # maximum per layer in a config.json
_EXPERT = re.compile(rf"^(.*\.{re.escape(NAMES)})(\d+)(\..+)$")


@dataclass(frozen=True)
class Mixture:
    """The mixtures of an upcycled model. layers: numbers of the layers with experts; top_k: experts per token."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    use_residual: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Mixture":
        """Read the configuration's field moe. Raises ConfigError if it is invalid."""
        moe = getattr(config, UPCYCLED)
        layers, counts = moe.get("moe_layers_idx"), moe.get("num_experts")
        counts = [counts] if isinstance(counts, int) else counts
        top_k = moe.get("top_k_experts")
        problems = []
        if not _are_numbers(layers, 0, config.num_hidden_layers - 1) or len(set(layers)) < len(layers):
            last = config.num_hidden_layers - 1
            problems.append(f"moe_layers_idx is {shown(layers)}, expected different layers from 0 to {last}")
        if not _are_numbers(counts, 2, MOST_EXPERTS) or len(set(counts)) > 1:
            problems.append(
                f"num_experts is {shown(counts)}, expected one number of 2 to {MOST_EXPERTS} for all layers"
            )
        elif not _are_numbers([top_k], 1, counts[0]):
            problems.append(f"top_k_experts is {shown(top_k)}, expected 1 to {counts[0]}")
        if not isinstance(moe.get("use_residual"), bool):
            problems.append(f"use_residual is {shown(moe.get('use_residual'))}, expected true or false")
        if problems:
            raise ConfigError(f"config.json's moe can't be used ({'; '.join(problems)}): copy the folder again")
        return cls(tuple(layers), counts[0], top_k, moe["use_residual"])


def _are_numbers(values: object, least: int, most: int) -> bool:
    if not isinstance(values, list) or not values:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and least <= n <= most for n in values)


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Map names to the expert layers of an upcycled model."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "deepspeed_moe")}


def expert_of(name: str) -> tuple[str, int, str] | None:
    """Split the name of an expert's parameter into prefix, expert number and suffix; None for other names."""
    found = _EXPERT.match(name)
    return None if found is None else (found[1], int(found[2]), found[3])
