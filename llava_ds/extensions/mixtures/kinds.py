"""Recognize language models with experts by their configuration, and name their experts on disk."""

from typing import NamedTuple

from transformers import PreTrainedConfig

UPCYCLED = "moe"  # MoE-LLaVA's configuration field that describes the experts


class ExpertNames(NamedTuple):
    """Tensor names of a mixture's layer on disk, and the kind of its routers' output.

    matrices: names of an expert's gate, up and down matrices; None if experts are stacked on disk, too. renamed: pairs
    of a name's part on disk and in memory. may_be_transposed: True if some folders store stacked experts as (E, I, O)
    instead of (E, O, I). gives_probabilities: True if routers return probabilities instead of logits.
    """

    matrices: tuple[str, str, str] | None
    renamed: tuple[tuple[str, str], ...] = ()
    may_be_transposed: bool = False
    gives_probabilities: bool = False


_PROJECTIONS = ExpertNames(("gate_proj", "up_proj", "down_proj"))
# Mixtures of experts by model_type, as in table.py.
EXPERTS = {
    "mixtral": ExpertNames(("w1", "w3", "w2"), ((".block_sparse_moe.", ".mlp."),)),
    "qwen2_moe": _PROJECTIONS,
    "qwen3_moe": _PROJECTIONS,
    "olmoe": _PROJECTIONS,
    "granitemoe": ExpertNames(
        None,
        (
            (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
            (".block_sparse_moe.router.layer.weight", ".block_sparse_moe.router.weight"),
        ),
    ),
    "qwen3_vl_moe_text": ExpertNames(None, may_be_transposed=True),  # the published weights are (E, I, O)
    "qwen3_5_moe_text": ExpertNames(None),
    "gemma4_text": ExpertNames(None, gives_probabilities=True),
}


def expert_names(config: PreTrainedConfig) -> ExpertNames | None:
    """Return the names in a mixture of experts that transformers implements; None for other models."""
    # This is Gemma 4's field, because some of its sizes are dense.
    return EXPERTS.get(config.model_type) if getattr(config, "enable_moe_block", True) else None


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return True for a mixture of experts that transformers implements."""
    return expert_names(config) is not None


def experts_per_token(config: PreTrainedConfig) -> int:
    """Return the number of experts that process a token."""
    return getattr(config, "num_experts_per_tok", None) or config.top_k_experts


def is_upcycled(config: PreTrainedConfig) -> bool:
    """Return True for a dense model with some MLPs upcycled to mixtures of experts (upcycling.py)."""
    return isinstance(getattr(config, UPCYCLED, None), dict)
