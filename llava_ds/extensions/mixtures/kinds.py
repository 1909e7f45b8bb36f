"""Language models with experts, by their configurations, and the names of their experts on disk."""

from typing import NamedTuple

from transformers import PreTrainedConfig

UPCYCLED = "moe"  # the field of a configuration that describes its experts, as in MoE-LLaVA


class ExpertNames(NamedTuple):
    """Names on disk in a layer of a mixture.

    matrices: of an expert's gate, up and down; None where the experts of a layer are one tensor on disk, too; renamed:
    parts of names on disk, and what stands for them in memory; may_be_turned: True if such a tensor is (E, I, O) in
    some folders, for (E, O, I) in memory.
    """

    matrices: tuple[str, str, str] | None
    renamed: tuple[tuple[str, str], ...] = ()
    may_be_turned: bool = False


_PROJECTIONS = ExpertNames(("gate_proj", "up_proj", "down_proj"))
# Mixtures of experts, by model_type, as table.py has them.
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
    "qwen3_vl_moe_text": ExpertNames(None, may_be_turned=True),  # as published it is
}


def is_mixture(config: PreTrainedConfig) -> bool:
    """True for a mixture of experts of transformers'."""
    return config.model_type in EXPERTS


def is_upcycled(config: PreTrainedConfig) -> bool:
    """True for a dense family some of whose MLPs are mixtures of experts (upcycling.py)."""
    return isinstance(getattr(config, UPCYCLED, None), dict)
