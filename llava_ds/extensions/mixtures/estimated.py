"""Account for experts in the memory and speed estimates. llava_ds/extensions/planning calls these by name."""

from torch import nn
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments
from llava_ds.extensions.mixtures.expert_parallel import expert_group
from llava_ds.extensions.mixtures.kinds import experts_per_token, is_mixture, is_upcycled
from llava_ds.extensions.mixtures.upcycled import Mixture
from llava_ds.extensions.mixtures.upcycling import own, upcycled_config
from llava_ds.model.families.language import mlp_width


def text_of(text: PreTrainedConfig, args: ModelArguments) -> PreTrainedConfig:
    """Add the mixtures that the flags request to a configuration."""
    return upcycled_config(text, args) if own(args).moe_enable and not is_upcycled(text) else text


def shared(model: nn.Module) -> set[nn.Parameter]:
    """Return the expert parameters that are divided over ranks."""
    return {parameter for parameter in model.parameters() if expert_group(parameter)}


def widths(language_model: nn.Module, text: PreTrainedConfig, args: ModelArguments) -> dict[str, int]:
    """Count expert evaluations per token, summed over layers, keyed by TextShape field."""
    return {"expert_rows": len(Mixture.of(text).layers) * Mixture.of(text).top_k} if is_upcycled(text) else {}


def saving_width(text: PreTrainedConfig, uneven: float) -> int | None:
    """Return the width of a dense MLP that saves as much for backward as this model's MLPs; None without experts.

    Each of a token's k experts saves 4 I, and also its input and output, 2 D. uneven: load of the busiest expert
    divided by an even share.
    """
    if is_upcycled(text):
        dense, part = mlp_width(text), len(Mixture.of(text).layers) / text.num_hidden_layers
        rows = uneven * Mixture.of(text).top_k
        return int((1 - part) * dense + part * rows * (dense + text.hidden_size // 2))
    if not is_mixture(text):
        return None
    expert = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    beside = getattr(text, "shared_expert_intermediate_size", None) or 0
    if getattr(text, "enable_moe_block", False):  # Gemma 4: experts and a dense MLP in every layer
        beside = text.intermediate_size
    return experts_per_token(text) * (expert + text.hidden_size // 2) + beside
