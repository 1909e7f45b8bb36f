"""Read, build, count and write language models with experts."""

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llava_ds.config.arguments import ModelArguments
from llava_ds.export.tensors import Entry
from llava_ds.extensions.architecture import TextPart
from llava_ds.extensions.mixtures.experts import (
    Stacked,
    TransposedExperts,
    divided_entries,
    from_disk,
    part_of,
    to_disk,
)
from llava_ds.extensions.mixtures.kinds import EXPERTS, UPCYCLED, expert_names, experts_per_token, is_upcycled
from llava_ds.extensions.mixtures.upcycled import GATE, Mixture, expert_of
from llava_ds.extensions.mixtures.upcycling import BROKEN, add_experts
from llava_ds.model.families.language import MOE_PREFIX
from llava_ds.model.open.weights import Weights
from llava_ds.tracking.flops import MATRICES

# Maps a dense family to the mixture with the same attention.
FAMILIES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
_WORDS = ("gate_proj", "up_proj", "down_proj")
_OWN = ("model_type", "architectures", "transformers_version", "auto_map", UPCYCLED)


def native_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig | None, str]:
    """Return an upcycled model's configuration in a transformers family and "", or None and the reason.

    Llama becomes Mixtral, and Qwen 3 becomes Qwen3-MoE. Both choose the k largest probabilities of a softmax over all
    experts and scale them to sum to 1, like DeepSpeed's gate for k >= 2. Neither combines experts with a dense MLP.
    Mixtral has experts in every layer.
    """
    family, mixture = FAMILIES.get(config.model_type), Mixture.of(config)
    dense = [layer for layer in range(config.num_hidden_layers) if layer not in mixture.layers]
    has_biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    for is_other, why in (
        (family is None, f"a {config.model_type} with experts"),
        (mixture.use_residual, "experts added to an MLP (--use_residual)"),
        (mixture.top_k == 1, "one expert per token, scaled by its probability (--top_k_experts 1)"),
        (family == "mixtral" and bool(dense), f"a {config.model_type} with experts in only some of its layers"),
        (has_biases, "experts with biases"),
        (getattr(config, "use_sliding_window", False), "experts and an attention window in some layers"),
    ):
        if is_other:
            return None, f"transformers has no class for {why}"
    known = set(CONFIG_MAPPING[family]().to_dict()) - set(_OWN) | {"head_dim"}
    fields = {key: value for key, value in config.to_dict().items() if key in known}
    fields["num_experts_per_tok"] = mixture.top_k
    if family == "mixtral":
        fields |= {"num_local_experts": mixture.num_experts, "sliding_window": getattr(config, "sliding_window", None)}
    else:
        fields |= {
            "num_experts": mixture.num_experts,
            "moe_intermediate_size": config.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
    return CONFIG_MAPPING[family].from_dict(fields), ""


def converted(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration to export: converted to a transformers mixture if one fits, else unchanged."""
    return config if not is_upcycled(config) else native_config(config)[0] or config


def native_name(name: str, config: PreTrainedConfig) -> str:
    """Map a tensor's name in an upcycled model to its name on disk in the exported family."""
    family = converted(config)
    if not is_upcycled(config) or family is config:
        return name
    names = EXPERTS[family.model_type]
    if name.endswith(f".mlp.{GATE}"):
        return to_disk(name.replace(GATE, "gate.weight"), names)
    if (parts := expert_of(name)) is None:
        return name
    block, number, rest = parts
    word = dict(zip(_WORDS, names.matrices))[rest.split(".")[1]]
    return to_disk(f"{block.partition('deepspeed_moe.')[0]}experts.{number}.{word}.weight", names)


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
