"""Parts of experts in the estimate of memory and speed. llava_ds/extensions/planning calls these by name."""

from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.extensions.mixtures.expert_parallel import expert_group
from llava_ds.extensions.mixtures.kinds import is_mixture, is_upcycled
from llava_ds.extensions.mixtures.upcycled import Mixture
from llava_ds.extensions.mixtures.upcycling import own, upcycled_config
from llava_ds.model.families.language import mlp_width


def text_of(text: PreTrainedConfig, args: ModelArguments) -> PreTrainedConfig:
    """The configuration with the mixtures of the flags."""
    return upcycled_config(text, args) if own(args).moe_enable and not is_upcycled(text) else text


def shared(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of experts, which ranks share out."""
    return {parameter for parameter in model.parameters() if expert_group(parameter)}


def widths(language_model: nn.Module, text: PreTrainedConfig, args: ModelArguments) -> dict[str, int]:
    """How often a token is sent to an expert in all layers, by the names of TextShape."""
    return {"expert_rows": len(Mixture.of(text).layers) * Mixture.of(text).top_k} if is_upcycled(text) else {}


def saving_width(text: PreTrainedConfig, uneven: float) -> int | None:
    """The width of an MLP that saves as much for backward. For each of its k experts a token's input and the expert's
    output are saved, too: 2 D beside 4 I. uneven: tokens of the busiest expert by an even share."""
    if is_upcycled(text):
        dense, part = mlp_width(text), len(Mixture.of(text).layers) / text.num_hidden_layers
        rows = uneven * Mixture.of(text).top_k
        return int((1 - part) * dense + part * rows * (dense + text.hidden_size // 2))
    if not is_mixture(text):
        return None
    expert = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    beside = getattr(text, "shared_expert_intermediate_size", None) or 0
    return text.num_experts_per_tok * (expert + text.hidden_size // 2) + beside
