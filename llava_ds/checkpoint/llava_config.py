"""The config.json that LLaVA's own code reads beside a projector or an adapter."""

from llava_ds.arguments import ModelArguments, trained_parts
from llava_ds.geometry import PictureOptions
from llava_ds.model.build import ModelPlan


def llava_config(plan: ModelPlan, args: ModelArguments, pictures: PictureOptions) -> dict[str, object]:
    """The language model's configuration with LLaVA's fields, and without the path that it lay at."""
    text_config = plan.text_config.to_dict()
    text_config.pop("_name_or_path", None)
    return {
        **text_config,
        "model_type": "llava_llama",
        "architectures": ["LlavaLlamaForCausalLM"],
        "mm_vision_tower": args.vision_tower,
        "mm_hidden_size": plan.tower.width,
        "mm_projector_type": args.mm_projector_type,
        "mm_vision_select_layer": args.mm_vision_select_layer,
        "mm_vision_select_feature": args.mm_vision_select_feature,
        "mm_use_im_start_end": args.mm_use_im_start_end,
        "mm_use_im_patch_token": False,
        "mm_patch_merge_type": pictures.merge_type,
        "mm_newline_position": pictures.newline_position,
        "mm_spatial_pool_stride": pictures.pool_stride,
        "mm_spatial_pool_mode": pictures.pool_mode,
        "image_aspect_ratio": pictures.aspect_ratio,
        "image_grid_pinpoints": [list(size) for size in pictures.pinpoints] or None,
        "use_mm_proj": True,
        "tune_mm_mlp_adapter": args.tune_mm_mlp_adapter,
        "unfreeze_mm_vision_tower": "vision_tower" in trained_parts(args),
    }
