"""Flags that ready models refuse, and features that they don't support yet."""

from llava_ds.config.arguments import Arguments
from llava_ds.config.properties import Feature, clashes, features

# Flags of LLaVA's own composition and templates; a ready model's files decide these.
COMPOSING_FLAGS = (
    "vision_tower", "mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "s2", "s2_scales",
    "mm_native_resolution",
    "pretrain_mm_mlp_adapter", "version", "mm_use_im_start_end", "mm_use_im_patch_token", "split_special_tokens",
    "mm_patch_merge_type", "image_aspect_ratio", "image_grid_pinpoints", "fast_image_decoding",
)  # fmt: skip


def ready_problems(args: Arguments, kind: str) -> list[str]:
    """Return a line for every flag that a ready model ignores, and for every feature without support yet."""
    given = [name for name in COMPOSING_FLAGS if name in args.given and name != "version"]
    given += ["version"] * ("version" in args.given and args.model.version != "processor")
    problems = expert_problems(args)
    if given:
        problems.append(
            f"{', '.join(f'--{name}' for name in given)}: the files of {kind} define how images and conversations are "
            "prepared: leave them out"
        )
    return problems


def expert_problems(args: Arguments) -> list[str]:
    """Return a line for every feature that puts experts into the model."""
    needs = {"routerless_mlps": "others are untested with it"}
    return clashes([*features(args), Feature("a ready model", needs)])
