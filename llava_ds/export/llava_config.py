"""The config.json that LLaVA's own code reads beside a projector, an adapter or a whole model."""

import torch
from transformers import PreTrainedConfig

from llava_ds.config.arguments import ModelArguments, trained_parts
from llava_ds.geometry import ImageOptions
from llava_ds.model.families.language import LLAVA_CLASSES
from llava_ds.model.plan import ModelPlan


def llava_config(
    plan: ModelPlan,
    args: ModelArguments,
    image_options: ImageOptions,
    *,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, object]:
    """The language model's configuration with LLaVA's fields, and without the path that it lay at.

    For a family that LLaVA has no class for, model_type and architectures are spelled as LLaVA would.
    """
    family = plan.text_config.model_type
    architecture = (plan.text_config.architectures or [f"{family.title()}ForCausalLM"])[0]
    model_type, architecture = LLAVA_CLASSES.get(family, (f"llava_{family}", f"Llava{architecture}"))
    own = {} if max_length is None else {"tokenizer_model_max_length": max_length}
    return {
        **with_old_names(plain_config(plan.text_config, dtype)),
        **own,
        "model_type": model_type,
        "architectures": [architecture],
        "mm_vision_tower": args.vision_tower,
        "mm_hidden_size": plan.tower.width,
        "mm_projector_type": args.mm_projector_type,
        "mm_vision_select_layer": args.mm_vision_select_layer,
        "mm_vision_select_feature": args.mm_vision_select_feature,
        "mm_use_im_start_end": args.mm_use_im_start_end,
        "mm_use_im_patch_token": args.mm_use_im_patch_token,
        "split_special_tokens": args.split_special_tokens,  # for our own code
        "mm_patch_merge_type": image_options.merge_type,
        "mm_newline_position": image_options.newline_position,
        "mm_spatial_pool_stride": image_options.pool_stride,
        "mm_spatial_pool_mode": image_options.pool_mode,
        "image_aspect_ratio": image_options.aspect_ratio,
        "image_grid_pinpoints": [list(size) for size in image_options.pinpoints] or None,
        "s2": args.s2,
        "s2_scales": args.s2_scales,
        "tokenizer_padding_side": "right",
        "use_mm_proj": True,
        "tune_mm_mlp_adapter": args.tune_mm_mlp_adapter,
        "freeze_mm_mlp_adapter": args.freeze_mm_mlp_adapter,
        "unfreeze_mm_vision_tower": "vision_tower" in trained_parts(args),
        "llava_ds_version": args.version,  # LLaVA's own code goes by the folder's name
    }


def plain_config(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> dict[str, object]:
    """A part's configuration that does not tell where it lay on this machine."""
    plain = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    return plain if dtype is None else {**plain, "dtype": str(dtype).removeprefix("torch.")}


def with_old_names(config: dict[str, object]) -> dict[str, object]:
    """A language model's configuration in the words of transformers 4, too, which reads no rope_parameters.

    It would take the default angle for one that is not said.
    """
    config = dict(config)
    if config.get("dtype") is not None:
        config["torch_dtype"] = str(config["dtype"]).removeprefix("torch.")
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        if rest.get("rope_type", "default") != "default":
            config["rope_scaling"] = {**rest, "type": rest["rope_type"]}
    return config
