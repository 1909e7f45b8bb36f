"""What a LLaVA's folder says of itself, as flags: the values of those that the user leaves out."""

import typing
from functools import cache
from typing import Annotated

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.files.model_files import shown

# Fields of LLaVA's config.json that are flags of the same name, and what LLaVA takes where one is not there.
LLAVA_SAYS = {
    "mm_projector_type": "linear",
    "mm_vision_select_layer": None,
    "mm_vision_select_feature": "patch",
    "mm_patch_merge_type": "flat",
    "image_aspect_ratio": "square",
    "image_grid_pinpoints": None,
    "mm_use_im_start_end": False,
    "mm_use_im_patch_token": None,
    "split_special_tokens": None,
    "s2": False,
    "s2_scales": None,
    "mm_newline_position": None,
    "mm_spatial_pool_stride": None,
    "mm_spatial_pool_mode": None,
}
# Fields of our own exports' picture options, and the flags that they were.
OUR_PICTURES = {
    "aspect_ratio": "image_aspect_ratio",
    "pinpoints": "image_grid_pinpoints",
    "merge_type": "mm_patch_merge_type",
    "newline_position": "mm_newline_position",
    "pool_stride": "mm_spatial_pool_stride",
    "pool_mode": "mm_spatial_pool_mode",
}
_PINPOINTS = Annotated[list[tuple[PositiveInt, PositiveInt]], Field(min_length=1, max_length=10_000)]
# What a projector was trained on or is; another value needs another projector.
FIXED = ("mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "s2", "s2_scales")


def said_by_llava(config: dict) -> dict[str, object]:
    """The flags that a config.json in LLaVA's format holds."""
    values = {name: config.get(name, usual) for name, usual in LLAVA_SAYS.items()}
    values["version"] = config.get("llava_ds_version")  # our own exports say it
    return _as_flags(values, "config.json")


def said_by_hf(config: PreTrainedConfig, processor: dict, where: str) -> dict[str, object]:
    """The flags that a folder of transformers' Llava, LlavaNext or LlavaOnevision amounts to.

    config: of the whole; processor: its image processor's settings. Raises ConfigError for what has no flag here.
    """
    problems = []
    if config.projector_hidden_act != "gelu" or not getattr(config, "multimodal_projector_bias", True):
        problems.append("its projector is not two layers with biases around a GELU")
    layer, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
    has_class_token = config.vision_config.model_type == "clip_vision_model"
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer is {layer}, several layers at once")
    if strategy == "default" and not has_class_token:
        problems.append("it leaves the first patch out, for its tower has no class token to leave out")
    if problems:
        raise ConfigError(f"{where} can't be trained here: {'; '.join(problems)}")
    values = {
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": layer,
        "mm_vision_select_feature": "cls_patch" if strategy == "full" and has_class_token else "patch",
        "mm_use_im_start_end": getattr(config, "mm_use_im_start_end", None),
        "split_special_tokens": getattr(config, "split_special_tokens", None),
        "version": getattr(config, "llava_ds_version", None),
    }
    ours = getattr(config, "llava_ds_pictures", None)
    if not isinstance(ours, (dict, type(None))):
        raise ConfigError(f"{where}: config.json says llava_ds_pictures {shown(ours)}, expected an object")
    if ours is not None:
        values |= {flag: ours[name] for name, flag in OUR_PICTURES.items() if ours.get(name)}
    elif config.model_type == "llava":
        values |= {"mm_patch_merge_type": "flat", "image_aspect_ratio": "pad" if processor.get("do_pad") else "square"}
    else:
        values |= {
            "mm_patch_merge_type": "spatial_unpad",
            "image_aspect_ratio": getattr(config, "vision_aspect_ratio", "anyres"),
            "image_grid_pinpoints": [pair[::-1] for pair in pairs(config.image_grid_pinpoints, where)],
        }
    if config.model_type == "llava_onevision" and ours is None:
        values |= {"mm_newline_position": "one_token", "mm_spatial_pool_mode": "bilinear", "mm_spatial_pool_stride": 2}
    return _as_flags(values, where)


def pairs(pinpoints: object, where: str) -> list[tuple[int, int]]:
    """Resolutions as a config.json lists them. Raises ConfigError for what is no list of two sizes each."""
    try:
        return TypeAdapter(_PINPOINTS).validate_python(pinpoints)
    except ValidationError:
        raise ConfigError(
            f"{where}: image_grid_pinpoints is {shown(pinpoints)}, expected a list of pairs of sizes in pixels"
        ) from None


def _as_flags(values: dict[str, object], where: str) -> dict[str, object]:
    """Without what is not said, and pinpoints as the flag spells them."""
    flags = {name: value for name, value in values.items() if value is not None}
    pinpoints = flags.get("image_grid_pinpoints")
    if isinstance(pinpoints, (list, tuple)):
        spelled = (f"({width},{height})" for width, height in pairs(pinpoints, where))
        flags["image_grid_pinpoints"] = f"[{','.join(spelled)}]"
    if not str(flags.get("image_aspect_ratio", "")).startswith("anyres"):
        flags.pop("image_grid_pinpoints", None)
    if not flags.get("s2", False):
        flags.pop("s2_scales", None)
    return flags


def taken(args: Arguments, said: dict[str, object], path: str, brings_projector: bool) -> dict[str, object]:
    """What of that is to be taken: the flags that the user did not give.

    brings_projector: whether training starts from the folder's projector. Raises ConfigError, with every given flag
    that this one was not trained with, and for values that no flag has.
    """
    values = args.as_dict()
    problems = [
        f"--{name} {values[name]} contradicts the model in {path}, whose projector was trained with {said[name]}: "
        "leave the flag out, or bring another projector by --pretrain_mm_mlp_adapter"
        for name in FIXED
        if brings_projector and name in args.given and name in said and values[name] != said[name]
    ]
    free = {name: value for name, value in said.items() if name not in args.given}
    ratio = free.get("image_aspect_ratio", values["image_aspect_ratio"])
    if not str(ratio).startswith("anyres"):
        free.pop("image_grid_pinpoints", None)
    for name, value in free.items():
        known = _choices().get(name)
        if known is not None and value not in known:
            problems.append(f"{path} says {name} {shown(value)}, which is not here: give --{name} {' or '.join(known)}")
        elif known is None and (expected := _wrong_kind(name, value)):
            problems.append(f"{path} says {name} {shown(value)}: {expected}; give --{name}")
    if problems:
        raise ConfigError("\n".join(problems))
    return free


def _wrong_kind(name: str, value: object) -> str | None:
    """Say what is expected of a flag's value, where this one is of another kind."""
    try:
        TypeAdapter(_hints()[name]).validate_python(value, strict=True)
    except ValidationError as error:
        return error.errors()[0]["msg"].lower()
    return None


@cache
def _hints() -> dict[str, object]:
    return {**typing.get_type_hints(ModelArguments), **typing.get_type_hints(DataArguments)}


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """The values that a flag may have, for those that have a list of them."""
    hints = _hints().items()
    return {name: typing.get_args(hint) for name, hint in hints if typing.get_origin(hint) is typing.Literal}
