"""Read folders of trained models in LLaVA's or transformers' format, and the flags that they were trained with."""

import os
import typing
from functools import cache, partial
from typing import Annotated

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments
from llava_ds.config.model_flags import tower_folders
from llava_ds.constants import ConfigError
from llava_ds.files.model_files import shown
from llava_ds.model.families.language import config_of, text_config_of_llava, trunk_name
from llava_ds.model.families.towers import TOWERS
from llava_ds.model.open import names as formats
from llava_ds.model.open.file_order import ignored_files_of_folder
from llava_ds.model.open.model_folder import (
    FLAG,
    STAGE_1_HINT,
    ModelFolder,
    has_only_projector,
    language_model_source,
)
from llava_ds.model.open.tower import read_processor, vision_config
from llava_ds.model.open.weights import Source, tensor_names

# Flags that LLaVA's config.json stores in fields of the same name, with LLaVA's defaults.
LLAVA_FLAGS = {
    "mm_projector_type": "linear",
    "mm_vision_select_layer": None,
    "mm_vision_select_feature": "patch",
    "mm_patch_merge_type": "flat",
    "image_aspect_ratio": "square",
    "image_grid_pinpoints": None,
    "mm_use_im_start_end": False,
    "mm_use_im_patch_token": None,
    "split_special_tokens": None,
    "mm_native_resolution": False,
    "s2": False,
    "s2_scales": None,
    "mm_newline_position": None,
    "mm_spatial_pool_stride": None,
    "mm_spatial_pool_mode": None,
    "image_value_range": None,
}
# Fields of the image options in this package's exports -> flags.
IMAGE_OPTION_FLAGS = {
    "aspect_ratio": "image_aspect_ratio",
    "pinpoints": "image_grid_pinpoints",
    "merge_type": "mm_patch_merge_type",
    "newline_position": "mm_newline_position",
    "pool_stride": "mm_spatial_pool_stride",
    "pool_mode": "mm_spatial_pool_mode",
    "value_range": "image_value_range",
}
# Flags on which a trained projector depends, so that other values need another projector.
PROJECTOR_FLAGS = ("mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "s2", "s2_scales")
_PINPOINTS = Annotated[list[tuple[PositiveInt, PositiveInt]], Field(min_length=1, max_length=10_000)]


def read_llava(path: str, config: dict) -> ModelFolder:
    """Read a folder in LLaVA's format, with or without the tower's weights."""
    if has_only_projector(path):
        raise ConfigError(f"{FLAG} {path} holds only a projector: {STAGE_1_HINT}")
    names = tensor_names(path)
    has_tower = any(formats.tower_from_llava(name) for name in names)
    has_newline = any(formats.newline_from_llava(name) for name in names)
    resampler = config.get("mm_resampler_type")
    if resampler not in (None, "", "None", "none", "spatial_pool"):
        raise ConfigError(
            f"{FLAG} {path} has a {resampler} resampler between tower and projector: this is not supported"
        )
    text_config = text_config_of_llava(config, f"{FLAG} {path}")
    rename = partial(formats.language_model_from_llava, trunk=trunk_name(text_config))
    return ModelFolder(
        path,
        "a LLaVA in LLaVA's format",
        text_config,
        language_model_source(path, text_config, rename),
        tokenizer=path,
        flags=flags_of_llava(config),
        projector=Source(FLAG, path, formats.projector_from_llava),
        newline=Source(FLAG, path, formats.newline_from_llava) if has_newline else None,
        vision_tower=Source(FLAG, path, formats.tower_from_llava) if has_tower else None,
        trained_with=tower_in_config(path, config),
    )


def tower_in_config(path: str, config: dict) -> tuple[str | None, int | None]:
    """Return the tower that a config.json in LLaVA's format names, and the width of its features."""
    for name, kind in (("mm_vision_tower", str), ("mm_hidden_size", int)):
        if not isinstance(value := config.get(name), (kind, type(None))):
            raise ConfigError(f"{FLAG} {path}: config.json says {name} {shown(value)}: copy the folder again")
    return config.get("mm_vision_tower"), config.get("mm_hidden_size")


def read_hf(path: str, config: dict) -> ModelFolder:
    """Read a folder of transformers' Llava, LlavaNext or LlavaOnevision, with the tensor names of any version."""
    where = f"{FLAG} {path}"
    whole = config_of(config, where, path)
    text = whole.text_config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{where}: its text_config is a {text.model_type}, expected a language model")
    rename = partial(formats.language_model_from_hf, inner=trunk_name(text))
    names = tensor_names(path)
    # transformers 4 reads text_config, 5 the whole config. If they disagree, an output layer in the files means untied.
    has_output = any(rename(name) == "lm_head.weight" for name in names)
    parts = [part for part in (config, config["text_config"]) if isinstance(part, dict)]
    tied = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    tied = tied or [text.tie_word_embeddings]
    text.tie_word_embeddings = all(tied) if has_output else any(tied)
    return ModelFolder(
        path,
        f"a LLaVA in transformers' format ({config['model_type']})",
        text,
        language_model_source(path, text, rename),
        tokenizer=path,
        flags=_flags_of_hf(whole, read_processor(path, where), where),
        projector=Source(FLAG, path, formats.projector_from_hf),
        newline=Source(FLAG, path, formats.newline_from_llava) if any(map(formats.newline_from_llava, names)) else None,
        vision_tower=Source(FLAG, path, formats.tower_from_hf),
        vision_config=vision_config(whole.vision_config.to_dict(), where),
    )


def flags_of_llava(config: dict) -> dict[str, object]:
    """Return the flags in a config.json of LLaVA's format."""
    values = {name: config.get(name, default) for name, default in LLAVA_FLAGS.items()}
    values["version"] = config.get("llava_ds_version")  # only in exports of this package
    return _as_flags(values, "config.json")


def _flags_of_hf(config: PreTrainedConfig, processor: dict, where: str) -> dict[str, object]:
    """Return the flags that correspond to a folder of transformers' Llava, LlavaNext or LlavaOnevision.

    processor: settings of its image processor. Raises ConfigError for settings that no flag can express.
    """
    problems = []
    if config.projector_hidden_act != "gelu" or not getattr(config, "multimodal_projector_bias", True):
        problems.append("its projector is not two layers with biases around a GELU")
    layer, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
    family = TOWERS.get(config.vision_config.model_type)
    num_first = 0 if family is None else family.first_tokens(config.vision_config)
    if not isinstance(layer, int):
        problems.append(f"vision_feature_layer is {layer}, several layers at once")
    if strategy == "default" and not num_first:
        problems.append("it would drop the first patch, because its tower has no class token")
    if num_first > 1:
        problems.append("its tower's registers would be features of the image")
    if problems:
        raise ConfigError(f"{where} can't be trained here: {'; '.join(problems)}")
    values = {
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": layer,
        "mm_vision_select_feature": "cls_patch" if strategy == "full" and num_first else "patch",
        "mm_use_im_start_end": getattr(config, "mm_use_im_start_end", None),
        "split_special_tokens": getattr(config, "split_special_tokens", None),
        "version": getattr(config, "llava_ds_version", None),
    }
    ours = getattr(config, "llava_ds_pictures", None)
    if not isinstance(ours, (dict, type(None))):
        raise ConfigError(f"{where}: config.json says llava_ds_pictures {shown(ours)}, expected an object")
    if ours is not None:
        values |= {flag: ours[name] for name, flag in IMAGE_OPTION_FLAGS.items() if ours.get(name)}
    elif config.model_type == "llava":
        values |= {"mm_patch_merge_type": "flat", "image_aspect_ratio": "pad" if processor.get("do_pad") else "square"}
    else:
        values |= {
            "mm_patch_merge_type": "spatial_unpad",
            "image_aspect_ratio": getattr(config, "vision_aspect_ratio", "anyres"),
            "image_grid_pinpoints": [pair[::-1] for pair in read_pinpoints(config.image_grid_pinpoints, where)],
        }
    if config.model_type == "llava_onevision" and ours is None:
        values |= {"mm_newline_position": "one_token", "mm_spatial_pool_mode": "bilinear", "mm_spatial_pool_stride": 2}
    return _as_flags(values, where)


def read_pinpoints(pinpoints: object, where: str) -> list[tuple[int, int]]:
    """Return the resolutions in a config.json. Raises ConfigError unless they are a list of pairs of sizes."""
    try:
        return TypeAdapter(_PINPOINTS).validate_python(pinpoints)
    except ValidationError:
        raise ConfigError(
            f"{where}: image_grid_pinpoints is {shown(pinpoints)}, expected a list of pairs of sizes in pixels"
        ) from None


def _as_flags(values: dict[str, object], where: str) -> dict[str, object]:
    """Remove values that are None or have no effect, and write pinpoints in the flag's syntax."""
    flags = {name: value for name, value in values.items() if value is not None}
    pinpoints = flags.get("image_grid_pinpoints")
    if isinstance(pinpoints, (list, tuple)):
        sizes = ",".join(f"({width},{height})" for width, height in read_pinpoints(pinpoints, where))
        flags["image_grid_pinpoints"] = f"[{sizes}]"
    if not str(flags.get("image_aspect_ratio", "")).startswith("anyres"):
        flags.pop("image_grid_pinpoints", None)
    if not flags.get("s2", False):
        flags.pop("s2_scales", None)
    return flags


def ignored_files(args: Arguments, folder: ModelFolder) -> list[str]:
    """Return a line for each folder (of the model, an adapter's base, and the towers) whose files disagree."""
    where = f"{FLAG} {folder.path}"
    has_tower, has_template = folder.vision_config is not None, folder.architecture is not None
    own = folder.base or folder.path
    lines = ignored_files_of_folder(own, where, images=has_tower, template=has_template)
    if folder.base is not None:  # the adapter's folder may have its own image sizes
        lines += ignored_files_of_folder(folder.path, where, images=has_tower)
    for tower in () if has_tower else tower_folders(args.model.vision_tower):
        lines += ignored_files_of_folder(tower, f"--vision_tower {tower}")
    return lines


def flag_defaults(args: Arguments, folder: ModelFolder, keeps_projector: bool) -> dict[str, object]:
    """Return the folder's values for the flags that the user did not give.

    keeps_projector: True if training starts from the folder's projector. Raises ConfigError that lists all given
    flags that contradict this projector, and all values that their flags don't accept.
    """
    values, flags = args.as_dict(), folder.flags
    problems = [
        f"--{name} {values[name]} contradicts the projector in {folder.path}, trained with "
        f"{flags[name]}: leave the flag out, or give another projector by --pretrain_mm_mlp_adapter"
        for name in PROJECTOR_FLAGS
        if keeps_projector and name in args.given and name in flags and values[name] != flags[name]
    ]
    defaults = {name: value for name, value in flags.items() if name not in args.given}
    if not str(defaults.get("image_aspect_ratio", values["image_aspect_ratio"])).startswith("anyres"):
        defaults.pop("image_grid_pinpoints", None)
    for name, value in defaults.items():
        try:
            TypeAdapter(_flag_types()[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            problems.append(f"{folder.path} says {name} {shown(value)}: {problem}; give --{name}")
    if problems:
        raise ConfigError("\n".join(problems))
    tower = folder.trained_with[0]
    if args.model.vision_tower is None and tower is not None and all(map(os.path.isdir, tower_folders(tower))):
        defaults["vision_tower"] = tower
    return defaults if folder.base is None else {**defaults, "model_base": folder.base}


@cache
def _flag_types() -> dict[str, object]:
    return {**typing.get_type_hints(ModelArguments), **typing.get_type_hints(DataArguments)}
