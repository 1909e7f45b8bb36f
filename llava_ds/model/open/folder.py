"""Read a model's folder: configurations and weights of its parts, and the flags that it was trained with.

read_folder reads a language model, a LLaVA in LLaVA's or transformers' format, or an adapter over one of them.
"""

import dataclasses
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, trains_projector_only
from llava_ds.config.model_flags import tower_folders
from llava_ds.config.rules import data_problems
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import folder_part, opener_of, text_part
from llava_ds.extensions.architecture import Architecture
from llava_ds.files.model_files import (
    ADAPTER_CONFIG,
    BESIDE_ADAPTER,
    check_folder,
    is_adapter,
    is_there,
    read_config,
    shown,
)
from llava_ds.model.families.language import (
    config_of,
    is_llava_type,
    read_text_config,
    text_config_of_llava,
    trunk_name,
)
from llava_ds.model.families.towers import TOWERS
from llava_ds.model.open import names as formats
from llava_ds.model.open.tower import read_processor, vision_config
from llava_ds.model.open.weights import Over, Source, Weights, tensor_names

FLAG = "--model_name_or_path"

HF = ("llava", "llava_next", "llava_onevision")  # their config.json contains a text_config and a vision_config
PRETRAINED = "--pretrain_mm_mlp_adapter"
_STAGE_1_HINT = "it is stage 1's output: give it to --pretrain_mm_mlp_adapter, and the language model's folder here"

# Fields of LLaVA's config.json that are flags of the same name, with LLaVA's defaults.
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
# Fields of the image options in our own exports, and their flags.
IMAGE_OPTION_FLAGS = {
    "aspect_ratio": "image_aspect_ratio",
    "pinpoints": "image_grid_pinpoints",
    "merge_type": "mm_patch_merge_type",
    "newline_position": "mm_newline_position",
    "pool_stride": "mm_spatial_pool_stride",
    "pool_mode": "mm_spatial_pool_mode",
    "value_range": "image_value_range",
}
# Flags that a trained projector depends on: another value needs another projector.
PROJECTOR_FLAGS = ("mm_projector_type", "mm_vision_select_layer", "mm_vision_select_feature", "s2", "s2_scales")
_PINPOINTS = Annotated[list[tuple[PositiveInt, PositiveInt]], Field(min_length=1, max_length=10_000)]


@dataclass(frozen=True)
class ModelFolder:
    """A folder's content, independent of the flags.

    kind: for messages; tokenizer: the folder with the tokenizer; flags: values that the model was trained with, by
    flag; projector, newline, vision_tower: None if the folder lacks them; vision_config: of the tower in the folder;
    trained_with: the tower that the model was trained with, and the width of its features; base: an adapter's base
    model folder; tower_changes: the adapter's changes to a tower from another folder; architecture: of a folder that an
    extension reads.
    """

    path: str
    kind: str
    text_config: PreTrainedConfig
    language_model: Source
    tokenizer: str
    flags: dict[str, object] = dataclasses.field(default_factory=dict)
    projector: Source | None = None
    newline: Source | None = None
    vision_tower: Source | None = None
    vision_config: PreTrainedConfig | None = None
    trained_with: tuple[str | None, int | None] = (None, None)
    base: str | None = None
    tower_changes: tuple[Callable[[Weights], Weights], ...] = ()
    architecture: Architecture | None = None

    def problems(self, args: Arguments) -> list[str]:
        """Return lines about flags that an extension's architecture does not support."""
        kind = f"{FLAG} {self.path} is {self.kind}"
        return [] if self.architecture is None else self.architecture.problems(args, kind)


def read_folder(path: str, model_base: str | None = None) -> ModelFolder:
    """Read a folder of any format. model_base: an adapter's base model. Raises ConfigError and DataError."""
    if is_adapter(path):
        return opener_of(ADAPTER_CONFIG)(path, model_base)
    if model_base is not None:
        raise ConfigError(
            f"--model_base {model_base} needs an adapter, but {FLAG} {path} has no {ADAPTER_CONFIG}: leave it out"
        )
    config = read_model_config(path)
    kind = config.get("model_type")
    if kind in HF and "text_config" in config:
        return _read_hf(path, config)
    if (part := folder_part(kind)) is not None:
        return part.read(path, config, f"{FLAG} {path}")
    if kind == "llava_mpt":
        raise ConfigError(f"{FLAG} {path} is LLaVA's MPT: it is not supported: give a model of another family")
    if is_llava_type(kind):
        return _read_llava(path, config)
    text_config = read_text_config(path)
    rename = partial(formats.language_model_from_disk, trunk=trunk_name(text_config))
    return ModelFolder(
        path, "a language model", text_config, language_model_source(path, text_config, rename), tokenizer=path
    )


def language_model_source(path: str, config: PreTrainedConfig, rename: Callable[[str], str | None]) -> Source:
    """Return the source of a language model's weights. rename: see Source."""
    part = text_part(config)

    def in_memory(on_disk: str) -> str | None:
        name = rename(on_disk)
        return name and part.from_disk(name, config)

    return Source(FLAG, path, in_memory, (partial(part.stacked, config=config),))


def read_model_config(path: str) -> dict:
    file = Path(path) / "config.json"
    if not is_there(file):
        hint = _STAGE_1_HINT if _has_only_projector(path) else "expected the folder of a language model or of a LLaVA"
        raise ConfigError(f"{FLAG} {path} has no config.json: {hint}")
    check_folder(path, f"{FLAG} {path}")
    config = read_config(file, f"{FLAG} {path}")
    if config.get("quantization_config"):
        raise ConfigError(f"{FLAG} {path} is quantized: give the unquantized model")
    return config


def _has_only_projector(path: str) -> bool:
    """True for stage 1's folder, not for LLaVA's whole models that also contain a projector's file."""
    names = [file.name for file in Path(path).iterdir()] if Path(path).is_dir() else []
    models = [name for name in names if name.startswith(("model", "pytorch_model"))]
    return "mm_projector.bin" in names and not any(
        name.endswith((".safetensors", ".bin", ".index.json")) for name in models
    )


def _read_llava(path: str, config: dict) -> ModelFolder:
    """Read LLaVA's own format, with or without the tower's weights."""
    if _has_only_projector(path):
        raise ConfigError(f"{FLAG} {path} holds only a projector: {_STAGE_1_HINT}")
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
        trained_with=trained_with_of(path, config),
    )


def trained_with_of(path: str, config: dict) -> tuple[str | None, int | None]:
    """Return the tower that a config.json in LLaVA's format names, and the width of its features."""
    for name, kind in (("mm_vision_tower", str), ("mm_hidden_size", int)):
        if not isinstance(value := config.get(name), (kind, type(None))):
            raise ConfigError(f"{FLAG} {path}: config.json says {name} {shown(value)}: copy the folder again")
    return config.get("mm_vision_tower"), config.get("mm_hidden_size")


def _read_hf(path: str, config: dict) -> ModelFolder:
    """Read transformers' Llava, LlavaNext or LlavaOnevision, with tensor names of any version."""
    where = f"{FLAG} {path}"
    whole = config_of(config, where, path)
    text = whole.text_config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{where}: its text_config is a {text.model_type}, expected a language model")
    rename = partial(formats.language_model_from_hf, inner=trunk_name(text))
    names = tensor_names(path)
    # transformers 4 reads the text_config, 5 the whole config; an output layer in the files overrides both.
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


def without_adapter(source: Source | None) -> Source | None:
    """Return the source of a part without its adapter; None for a part that only the adapter has."""
    if source is None or Path(source.path).name == BESIDE_ADAPTER:
        return None
    return dataclasses.replace(source, changes=tuple(each for each in source.changes if not isinstance(each, Over)))


def without_prefix(rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Wrap a renaming to accept peft's prefixes, as in files of adapters."""
    return lambda name: rename(formats.plain_name(name))


def flags_of_llava(config: dict) -> dict[str, object]:
    """Return the flags in a config.json of LLaVA's format."""
    values = {name: config.get(name, default) for name, default in LLAVA_FLAGS.items()}
    values["version"] = config.get("llava_ds_version")  # only in our own exports
    return _as_flags(values, "config.json")


def _flags_of_hf(config: PreTrainedConfig, processor: dict, where: str) -> dict[str, object]:
    """Return the flags that correspond to a folder of transformers' Llava, LlavaNext or LlavaOnevision.

    processor: its image processor's settings. Raises ConfigError for settings without a flag.
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
        problems.append("it drops the first patch, because its tower has no class token to drop")
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
    """Validate the resolutions in a config.json. Raises ConfigError unless they are a list of pairs of sizes."""
    try:
        return TypeAdapter(_PINPOINTS).validate_python(pinpoints)
    except ValidationError:
        raise ConfigError(
            f"{where}: image_grid_pinpoints is {shown(pinpoints)}, expected a list of pairs of sizes in pixels"
        ) from None


def _as_flags(values: dict[str, object], where: str) -> dict[str, object]:
    """Drop values that are not set, and write pinpoints in the flag's syntax."""
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


def projector_files(args: ModelArguments) -> dict[str, str]:
    """Map flags to files that replace the model's projector; the last file also replaces newline and tower, if it has
    them."""
    found = {} if args.pretrain_mm_mlp_adapter is None else {PRETRAINED: args.pretrain_mm_mlp_adapter}
    return found | {flag: file for flags in args.own.values() for flag, file in flags.projector_files().items()}


def take_from_model(args: Arguments) -> tuple[Arguments, list[str]]:
    """Fill in flags that the user did not give from the model's own settings. Returns the flags and lines about them.

    Raises ConfigError for given flags that contradict the model, and for settings that no flag accepts.
    """
    path = args.model.model_name_or_path
    folder = None if path is None else read_folder(path, args.model.model_base)
    brings_projector = folder is not None and folder.projector is not None
    given_projector = bool(projector_files(args.model))
    lines = []
    if folder is not None:
        if problems := folder.problems(args):
            raise ConfigError("\n".join(problems))
        lines += _files_passed_over(args, folder)
        values = _defaults(args, folder, brings_projector and not given_projector)
        args = args.replaced(**values)
        if problems := data_problems(args):
            raise ConfigError("\n".join(problems))
        if values or brings_projector:
            taken = ", ".join(f"--{name} {value}" for name, value in values.items()) or "nothing"
            lines.append(f"{path} is {folder.kind}; taken from it: {taken}")
        if args.model.vision_tower is not None and folder.vision_config is not None:
            lines.append(f"--vision_tower {args.model.vision_tower} is not read: the model has its own tower weights")
    if not (brings_projector or given_projector or trains_projector_only(args.model)):
        lines.append("no --pretrain_mm_mlp_adapter: the projector starts from random numbers, without stage 1")
    return args, lines


def _files_passed_over(args: Arguments, folder: ModelFolder) -> list[str]:
    """Return a line for each folder whose files disagree: the model's, an adapter's base, and the towers'."""
    from llava_ds.model.open.file_order import passed_over

    where = f"{FLAG} {folder.path}"
    has_tower, has_template = folder.vision_config is not None, folder.architecture is not None
    own = folder.base or folder.path
    lines = passed_over(own, where, images=has_tower, template=has_template)
    if folder.base is not None:  # the adapter's folder may have its own image sizes
        lines += passed_over(folder.path, where, images=has_tower)
    for tower in () if has_tower else tower_folders(args.model.vision_tower):
        lines += passed_over(tower, f"--vision_tower {tower}")
    return lines


def _defaults(args: Arguments, folder: ModelFolder, keeps_projector: bool) -> dict[str, object]:
    """Return the folder's values for the flags that the user did not give.

    keeps_projector: training starts from the folder's projector. Raises ConfigError that lists every given flag that
    contradicts this projector, and every value that its flag does not accept.
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
