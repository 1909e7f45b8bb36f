"""Read, build, count and write language models with experts."""

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.export.tensors import Entry
from llava_ds.extensions.architecture import TextPart
from llava_ds.extensions.mixtures.experts import Stacked, TransposedExperts, divided_entries, from_disk, part_of
from llava_ds.extensions.mixtures.kinds import expert_names, experts_per_token, is_upcycled
from llava_ds.extensions.mixtures.native_mixture import native_config, native_name
from llava_ds.extensions.mixtures.upcycled import Mixture, expert_of
from llava_ds.extensions.mixtures.upcycling import BROKEN, add_experts
from llava_ds.model.families.language import MOE_PREFIX
from llava_ds.model.open.weights import Weights
from llava_ds.tracking.flops import MATRICES


class Experts(TextPart):
    """Language-model part for transformers' mixtures and upcycled models."""

    def breaks(self, config: PreTrainedConfig) -> Collection[str]:
        return BROKEN if is_upcycled(config) else ("routerless_mlps",)

    def from_disk(self, name: str, config: PreTrainedConfig, known: Collection[str] | None = None) -> str | None:
        if (names := expert_names(config)) is not None:
            name = from_disk(name, names)
            if known is not None and (part := part_of(name, names)) and part[0] in known:
                return name
        return super().from_disk(name, config, known)

    def stacked(self, weights: Weights, config: PreTrainedConfig) -> Weights:
        names = expert_names(config)
        if names is None:
            return weights
        if names.may_be_transposed:
            return TransposedExperts(weights, config)
        return Stacked(weights, names) if names.matrices else weights

    def on_disk(self, entries: list[Entry], config: PreTrainedConfig) -> list[Entry]:
        names = expert_names(config)
        return entries if names is None else divided_entries(entries, names)

    def assembled(self, language_model: nn.Module, config: PreTrainedConfig, args: ModelArguments) -> None:
        if is_upcycled(config):
            add_experts(language_model, config, args)

    def used_per_token(self, language_model: nn.Module, config: PreTrainedConfig, dense: int) -> float:
        if is_upcycled(config):
            mixture = Mixture.of(config)
            copies = sum(p.numel() for n, p in language_model.named_parameters() if expert_of(n) and p.ndim == 2)
            return dense - copies * (1 - mixture.top_k / mixture.num_experts)
        others = [module for module in language_model.modules() if not isinstance(module, MATRICES)]
        stacked = sum(p.numel() for m in others for p in m.parameters(recurse=False) if p.ndim == 3)
        if not stacked:
            return dense
        count = getattr(config, "num_local_experts", None) or config.num_experts
        routers = sum(m.weight.numel() for m in others if type(m).__name__.endswith("Router") and hasattr(m, "weight"))
        return dense + routers + stacked * experts_per_token(config) / count

    def in_transformers(self, config: PreTrainedConfig) -> tuple[PreTrainedConfig | None, str]:
        return native_config(config) if is_upcycled(config) else (config, "")

    def name_in_transformers(self, name: str, config: PreTrainedConfig) -> str:
        return native_name(name, config)

    def differs(self, config: PreTrainedConfig, dtype: torch.dtype) -> str:
        if not is_upcycled(config) or dtype == torch.float32:
            return ""
        return (
            "transformers' routers compute in the precision of the weights, DeepSpeed's in float32, so tokens "
            "close to a tie may go to another expert"
        )

    def llava_class(self, model_type: str, architecture: str, config: PreTrainedConfig) -> tuple[str, str]:
        if not is_upcycled(config):
            return model_type, architecture
        return MOE_PREFIX + model_type, architecture.replace("Llava", "MoELLaVA", 1)
