"""Flags of LLaVA's scripts that are accepted without effect, and synonyms for values of --gradient_checkpointing.

For flags of other trainers that have a different name here see config/other_names.py.
"""

NO = ("False", "false", "0")

# Accepted values of --gradient_checkpointing. LLaVA's and Hugging Face's scripts give True or False.
CHECKPOINTING = {
    **{name: name for name in ("off", "all", "auto")},
    **dict.fromkeys(("true", "t", "yes", "y", "1"), "all"),
    **dict.fromkeys(("false", "f", "no", "n", "0"), "off"),
}

# Flags of LLaVA's and LLaVA-NeXT's scripts that have no effect here: the accepted values (None: any), and the reason.
# If they are given, the reason is printed at the start of a run.
WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "mm_resampler_type": (("None", "none", ""), "no resampler exists between tower and projector"),
    "image_crop_resolution": (None, "the ways of cropping images that read it are not supported"),
    "image_split_resolution": (None, "the ways of cropping images that read it are not supported"),
    "lazy_preprocess": (None, "images are always decoded when they are needed, and text is encoded once"),
    "is_multimodal": (None, "text-only records are always allowed"),
    "early_mix_text": (NO, "--group_by_modality_length always puts text-only records in separate steps"),
    "add_time_instruction": (NO, "writing a video's times before its question is not supported yet"),
    "dataloader_drop_last": (None, "no sample is dropped, the last step of an epoch may be smaller"),
    "attn_implementation": (None, "the fastest attention that this machine has is chosen"),
    "per_device_eval_batch_size": (None, "eval samples are laid out like training samples"),
}


def without_effect(values: object) -> tuple[list[str], list[str]]:
    """Return problems with given flags of WITHOUT_EFFECT, and notes on them. values: has the flags as attributes."""
    problems, notes = [], []
    for name, (allowed, reason) in WITHOUT_EFFECT.items():
        value = getattr(values, name)
        if value is None:
            continue
        if allowed is not None and value not in allowed:
            problems.append(f"--{name} {value} is not supported ({reason}): leave it out or give {allowed[0]}")
        else:
            notes.append(f"--{name} {value} has no effect: {reason}")
    return problems, notes
