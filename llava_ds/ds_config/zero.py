"""ZeRO: the stage, the sizes that follow from the language model's width, and where states lie."""

from llava_ds.ds_config.draft import AUTO, Draft, as_json

# Hugging Face's formulas, h the hidden size of the language model (transformers, integrations/deepspeed.py).
SIZES = {
    "reduce_bucket_size": (lambda h: h * h, "hidden size squared"),
    "stage3_prefetch_bucket_size": (lambda h: int(0.9 * h * h), "0.9 x hidden size squared"),
    "stage3_param_persistence_threshold": (lambda h: 10 * h, "10 x hidden size"),
}


def resolve_zero(draft: Draft) -> None:
    """Fill the sizes that say auto; refuse what is no stage."""
    stage = draft.get("zero_optimization.stage")
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        draft.refuse(f"zero_optimization.stage is {as_json(stage)}: write 0, 1, 2 or 3")
    for key, (formula, words) in SIZES.items():
        if draft.get(f"zero_optimization.{key}") == AUTO:
            draft.fill(f"zero_optimization.{key}", formula(draft.hidden_size), f"{words} ({draft.hidden_size})")
