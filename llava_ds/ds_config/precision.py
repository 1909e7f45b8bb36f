"""Precision from the JSON and the flags: bf16, fp16 with its loss scale, fp32, torch's autocast."""

from llava_ds.ds_config.draft import Draft


def resolve_precision(draft: Draft) -> None:
    """Fill bf16.enabled and fp16.enabled, and refuse what the device or DeepSpeed can't train in."""
    bf16, fp16 = draft.agree("bf16.enabled", "bf16"), draft.agree("fp16.enabled", "fp16")
    if bf16 is True and fp16 is True:
        draft.refuse("bf16.enabled and fp16.enabled are both true: choose one")
    if fp16 is True and draft.device_type == "cpu":
        draft.refuse("fp16 is on, but there is no GPU and DeepSpeed trains in float16 on GPUs only: use --bf16 or fp32")
    if draft.get("zero_optimization.stage") in (0, None) and (bf16 is True or fp16 is True):
        draft.refuse(
            "zero_optimization.stage is 0 with bf16 or fp16, where DeepSpeed takes an optimizer step before training: "
            "use ds_configs/zero1.json, which holds the same and shards the optimizer"
        )
