"""What the folder that --model_name_or_path names holds, and where the weights of each part lie in it."""

import dataclasses
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
from llava_ds.config.rules import data_problems
from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import check_folder, is_there, own_file, read_config, shown
from llava_ds.model import lora
from llava_ds.model.families.language import (
    config_of,
    is_llava_type,
    read_text_config,
    text_config_of_llava,
    trunk_name,
)
from llava_ds.model.lora import ADAPTER_CONFIG, NON_LORA
from llava_ds.model.open import names as formats
from llava_ds.model.open.weights import Overlaid, Source, WeightFiles, Weights, tensor_names
from llava_ds.model.vision import read_processor, vision_config

FLAG = "--model_name_or_path"

HF = ("llava", "llava_next", "llava_onevision")  # with a text_config and a vision_config inside

_OF_STAGE_1 = "it is what stage 1 leaves, which --pretrain_mm_mlp_adapter takes, beside the language model's"


@dataclass(frozen=True)
class ModelFolder:
    """A folder as it is, before any flag.

    kind: for messages; flags: what the model says of itself, by the flag's name; projector, newline and vision_tower
    are None where the folder has none; vision_config: of a tower that it describes; wants_tower: what it was trained
    with, and the width of its features; tokenizer: the folder that has it; base: the folder under an adapter.
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
    wants_tower: tuple[str | None, int | None] = (None, None)
    base: str | None = None


def read_folder(path: str, model_base: str | None = None) -> ModelFolder:
    """What a folder holds. model_base: the model under an adapter. Raises ConfigError and DataError."""
    if lora.is_adapter(path):
        return _read_adapter(path, model_base)
    if model_base is not None:
        raise ConfigError(
            f"--model_base {model_base} goes with a LoRA adapter, but {FLAG} {path} has no {ADAPTER_CONFIG}: leave "
            "it out"
        )
    config = _read_config(path)
    kind = config.get("model_type")
    if kind in HF and "text_config" in config:
        return _read_hf(path, config)
    if kind == "llava_mpt":
        raise ConfigError(f"{FLAG} {path} is LLaVA's MPT, which is not here: give a model of another family")
    if is_llava_type(kind):
        return _read_llava(path, config)
    text_config = read_text_config(path)
    rename = partial(formats.language_model_from_disk, trunk=trunk_name(text_config))
    return ModelFolder(path, "a language model", text_config, Source(FLAG, path, rename), tokenizer=path)


def _read_config(path: str) -> dict:
    file = Path(path) / "config.json"
    if not is_there(file):
        hint = _OF_STAGE_1 if _is_stage_1s(path) else "expected the folder of a language model or of a LLaVA"
        raise ConfigError(f"{FLAG} {path} has no config.json: {hint}")
    check_folder(path, f"{FLAG} {path}")
    config = read_config(file, f"{FLAG} {path}")
    if config.get("quantization_config"):
        raise ConfigError(f"{FLAG} {path} is quantized: give the model that it was made from")
    return config


def _is_stage_1s(path: str) -> bool:
    """Whether a folder holds a projector alone; LLaVA's whole models may have one beside their weights."""
    names = {file.name for file in Path(path).iterdir()} if Path(path).is_dir() else set()
    weights = any(
        name.startswith(("model", "pytorch_model")) and name.endswith((".safetensors", ".bin", ".index.json"))
        for name in names
    )
    return "mm_projector.bin" in names and not weights


def _read_llava(path: str, config: dict) -> ModelFolder:
    """LLaVA's own format. The tower's weights may be in it or not."""
    if _is_stage_1s(path):
        raise ConfigError(f"{FLAG} {path} holds a projector and no model: {_OF_STAGE_1}")
    names = tensor_names(path)
    has_tower = any(formats.tower_from_llava(name) for name in names)
    has_newline = any(formats.newline_from_llava(name) for name in names)
    resampler = config.get("mm_resampler_type")
    if resampler not in (None, "", "None", "none", "spatial_pool"):
        raise ConfigError(f"{FLAG} {path} has a {resampler} resampler between tower and projector, which is not here")
    text_config = text_config_of_llava(config, f"{FLAG} {path}")
    return ModelFolder(
        path,
        "a LLaVA in LLaVA's format",
        text_config,
        Source(FLAG, path, partial(formats.language_model_from_llava, trunk=trunk_name(text_config))),
        tokenizer=path,
        flags=said_by_llava(config),
        projector=Source(FLAG, path, formats.projector_from_llava),
        newline=Source(FLAG, path, formats.newline_from_llava) if has_newline else None,
        vision_tower=Source(FLAG, path, formats.tower_from_llava) if has_tower else None,
        wants_tower=_trained_with(path, config),
    )


def _trained_with(path: str, config: dict) -> tuple[str | None, int | None]:
    """The tower that a config.json in LLaVA's format names, and the width of its features."""
    named = config.get("mm_vision_tower"), config.get("mm_hidden_size")
    for name, value, kind in zip(("mm_vision_tower", "mm_hidden_size"), named, (str, int)):
        if not isinstance(value, (kind, type(None))):
            raise ConfigError(f"{FLAG} {path}: config.json says {name} {shown(value)}: copy the folder again")
    return named


def _read_hf(path: str, config: dict) -> ModelFolder:
    """transformers' Llava, LlavaNext and LlavaOnevision, with the names of any version."""
    where = f"{FLAG} {path}"
    whole = config_of(config, where, path)
    text = whole.text_config
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{where}: its text_config is a {text.model_type}, expected a language model")
    rename = partial(formats.language_model_from_hf, inner=trunk_name(text))
    names = tensor_names(path)
    # Version 4 went by the text_config, 5 goes by the whole one; files that hold an output layer know better than both.
    has_output = any(rename(name) == "lm_head.weight" for name in names)
    parts = [part for part in (config, config["text_config"]) if isinstance(part, dict)]
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    said = said or [text.tie_word_embeddings]
    text.tie_word_embeddings = all(said) if has_output else any(said)
    return ModelFolder(
        path,
        f"a LLaVA in transformers' format ({config['model_type']})",
        text,
        Source(FLAG, path, rename),
        tokenizer=path,
        flags=said_by_hf(whole, read_processor(path, where), where),
        projector=Source(FLAG, path, formats.projector_from_hf),
        newline=Source(FLAG, path, formats.newline_from_llava) if any(map(formats.newline_from_llava, names)) else None,
        vision_tower=Source(FLAG, path, formats.tower_from_hf),
        vision_config=vision_config(whole.vision_config.to_dict(), where),
    )


def _read_adapter(path: str, model_base: str | None) -> ModelFolder:
    """A LoRA adapter of LLaVA's or peft's, over the model that it was trained from."""
    adapter = lora.read_adapter(path)
    base_path = model_base or adapter.base
    if base_path is None or not Path(base_path).is_dir():
        raise ConfigError(
            f"{FLAG} {path} is a LoRA adapter of {base_path}, which is no folder here: name its folder by --model_base"
        )
    if lora.is_adapter(base_path):
        raise ConfigError(f"--model_base {base_path} is an adapter itself: merge it, and give the folder of the result")
    base = read_folder(base_path)
    config = _read_config(path) if (Path(path) / "config.json").is_file() else {}
    is_llava = is_llava_type(config.get("model_type")) and "text_config" not in config
    in_llavas_names = is_llava or base.projector is None or base.vision_config is None
    from_llava = partial(formats.language_model_from_llava, trunk=trunk_name(base.text_config))
    renames: dict[str, Callable[[str], str | None]] = {
        "language_model": from_llava if in_llavas_names else base.language_model.rename,
        "projector": formats.projector_from_llava if in_llavas_names else formats.projector_from_hf,
        "newline": formats.newline_from_llava,
        "vision_tower": formats.tower_from_llava if in_llavas_names else formats.tower_from_hf,
    }
    beside = Path(path) / NON_LORA
    if is_there(beside):
        own_file(beside)
    found = {}
    for part, rename in renames.items():
        source: Source | None = getattr(base, part)
        over = Source(FLAG, str(beside), behind_prefix(rename)) if beside.is_file() else None
        if over is not None and not over.files().shapes:
            over = None
        if source is not None:
            changes = (*source.changes, partial(lora.Merged, adapter=adapter, rename=rename))
            if over is not None:
                changes = (*changes, partial(_overlay, over, is_tower=part == "vision_tower"))
            found[part] = dataclasses.replace(source, changes=changes)
        else:
            found[part] = over
    if is_llava and found["projector"] is None:
        raise DataError(f"{path} is LoRA of a LLaVA, but has no {NON_LORA} with its projector: copy it again")
    _refuse_strange(adapter, beside, renames.values())
    has_tokenizer = any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return dataclasses.replace(
        base,
        path=path,
        kind=f"a LoRA adapter over {base.kind}",
        flags=said_by_llava(config) if is_llava else base.flags,
        tokenizer=path if has_tokenizer else base.tokenizer,
        wants_tower=_trained_with(path, config) if is_llava else base.wants_tower,
        base=str(base_path),
        **found,
    )


def behind_prefix(rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    return lambda name: rename(formats.plain_name(name))


def _overlay(over: Source, below: Weights, is_tower: bool) -> Overlaid:
    """A tower comes whole in LLaVA's files, and is wanted up to its last layer that runs."""
    return Overlaid(below, over.open(below.shapes.__contains__) if is_tower else over.open())


def _refuse_strange(adapter: lora.Adapter, beside: Path, renames) -> None:
    """Raise DataError for what is in an adapter's files and in no part of the model."""
    for file in (adapter.file, beside):
        if file.is_file():
            for name in WeightFiles(file).shapes:
                plain = formats.plain_name(name).partition(".lora_")[0]
                plain = plain if plain.endswith((".weight", ".bias", "image_newline")) else f"{plain}.weight"
                if all(rename(plain) is None for rename in renames):
                    raise DataError(f"{file} holds {name}, which is in no part of the model")


def take_from_model(args: Arguments) -> tuple[Arguments, list[str]]:
    """The flags with what the model says of itself in the place of what was not given, and lines that say so.

    Flags that name no model are returned as they are. Raises ConfigError for given flags that contradict the model.
    """
    path = args.model.model_name_or_path
    folder = None if path is None else read_folder(path, args.model.model_base)
    brings_projector = folder is not None and folder.projector is not None
    given_projector = args.model.pretrain_mm_mlp_adapter is not None or lora.non_lora_file(args.model) is not None
    lines = []
    if folder is not None:
        values = taken(args, folder.flags, path, brings_projector and not given_projector)
        tower = folder.wants_tower[0]
        if args.model.vision_tower is None and tower is not None and Path(tower).is_dir():
            values["vision_tower"] = tower
        if folder.base is not None:
            values["model_base"] = folder.base
        args = args.replaced(**values)
        if problems := data_problems(args):
            raise ConfigError("\n".join(problems))
        if values or brings_projector:
            said = ", ".join(f"--{name} {value}" for name, value in values.items()) or "nothing"
            lines.append(f"{path} is {folder.kind}; taken from it: {said}")
        if args.model.vision_tower is not None and folder.vision_config is not None:
            lines.append(f"--vision_tower {args.model.vision_tower} is not read: the model brings its own weights")
    if not (brings_projector or given_projector or trains_projector_only(args.model)):
        lines.append("no --pretrain_mm_mlp_adapter: the projector starts from random numbers, without stage 1")
    return args, lines


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
