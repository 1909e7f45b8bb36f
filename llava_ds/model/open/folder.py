"""What the folder that --model_name_or_path names holds, and where the weights of each part lie in it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from llava_ds.config.arguments import Arguments, ModelArguments, trains_projector_only
from llava_ds.config.rules import data_problems
from llava_ds.constants import ConfigError, DataError
from llava_ds.files.model_files import check_folder, is_there, library_errors, own_file, read_config, shown
from llava_ds.model.language import config_of, read_text_config, trunk_name
from llava_ds.model.lora import ADAPTER_CONFIG, NON_LORA, trained_with_it
from llava_ds.model.open import adapters
from llava_ds.model.open import names as formats
from llava_ds.model.open.checkpoint_defaults import said_by_hf, said_by_llava, taken
from llava_ds.model.open.weight_files import WeightFiles, Weights, tensor_names
from llava_ds.model.open.weight_sources import Overlaid, Source, Sources
from llava_ds.model.vision import TowerPlan, plan_tower, read_processor, read_tower, vision_config

FLAG = "--model_name_or_path"

# Language models by model_type of a config.json in LLaVA's format, which has their fields and LLaVA's on one level.
LLAVA = {
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_mixtral": "mixtral",
    "llava_qwen": "qwen2",
    "llava_qwen_moe": "qwen2_moe",
    "llava_gemma": "gemma",
    "llava_phi": "phi",
}
# As published, its model_type is "llava" whatever the language model; architectures tells.
PUBLISHED = "llava"
ARCHITECTURES = {
    "LlavaLlamaForCausalLM": "llama",
    "LlavaMistralForCausalLM": "mistral",
    "LlavaMixtralForCausalLM": "mixtral",
    "LlavaQwenForCausalLM": "qwen2",
    "LlavaQwenMoeForCausalLM": "qwen2_moe",
    "LlavaGemmaForCausalLM": "gemma",
    "LlavaPhiForCausalLM": "phi",
}
HF = ("llava", "llava_next", "llava_onevision")  # with a text_config and a vision_config inside

# Beginnings and names of the fields that are LLaVA's own.
_LLAVA_FIELDS = ("mm_", "llava_ds_", "image_", "tune_mm_", "freeze_mm_", "unfreeze_mm_", "tokenizer_", "s2")
_LLAVA_NAMES = {
    "use_mm_proj", "model_type", "architectures", "auto_map", "_name_or_path", "vision_tower_pretrained",
    "split_special_tokens",
}  # fmt: skip
_OF_STAGE_1 = "it is what stage 1 leaves, which --pretrain_mm_mlp_adapter takes, beside the language model's"
# What has to be equal for the weights of one tower to be another's.
_TOWER_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size")


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


@dataclass(frozen=True)
class Parts:
    """Configurations and sources of a model's parts."""

    folder: ModelFolder
    text_config: PreTrainedConfig
    tower: TowerPlan
    sources: Sources


def read_parts(args: ModelArguments) -> Parts:
    """What the flags compose, from configurations and the names of tensors. Raises ConfigError and DataError."""
    folder = read_folder(args.model_name_or_path, args.model_base)
    if args.lora_enable and folder.base is not None:
        raise ConfigError(
            f"--lora_enable True over {FLAG} {folder.path}, which is a LoRA adapter itself: an adapter of an adapter "
            f"opens nowhere. Go on with it by --lora_weight_path {folder.path} over {FLAG} {folder.base}, or merge it "
            "with run/export.py first"
        )
    tower, own, rest = _tower_of(folder, args)
    projector, newline = folder.projector, folder.newline
    beside = trained_with_it(args)  # what was trained beside an adapter wins over what that training began with
    for flag, given in (("--pretrain_mm_mlp_adapter", args.pretrain_mm_mlp_adapter), ("--lora_weight_path", beside)):
        if given is not None:
            projector = Source(flag, given, formats.projector_from_llava)
            brought = Source(flag, given, formats.newline_from_llava)
            if newline is None or brought.open().shapes:
                newline = brought
    if beside is not None:
        trained = Source("--lora_weight_path", beside, _behind_prefix(formats.tower_from_llava))
        if trained.open().shapes:
            own, rest = trained, rest or own
    sources = Sources(folder.language_model, own, projector, newline, rest)
    return Parts(folder, folder.text_config, tower, sources)


def read_folder(path: str, model_base: str | None = None) -> ModelFolder:
    """What a folder holds. model_base: the model under an adapter. Raises ConfigError and DataError."""
    if adapters.is_adapter(path):
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
    if _is_llavas(kind):
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


def _is_llavas(kind: object) -> bool:
    """Whether a model_type is of LLaVA's own format: one of LLaVA's, or "llava_" before another language model's.

    That is how export/llava_config.py calls those that LLaVA has no class for.
    """
    return isinstance(kind, str) and (kind == PUBLISHED or kind in LLAVA or _other_family(kind) is not None)


def _other_family(kind: object) -> str | None:
    family = str(kind).removeprefix("llava_")
    is_causal = family != kind and family in CONFIG_MAPPING and CONFIG_MAPPING[family] in MODEL_FOR_CAUSAL_LM_MAPPING
    return family if is_causal else None


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
    text_config = _flat_text_config(path, config)
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


def _flat_text_config(path: str, config: dict) -> PreTrainedConfig:
    """The language model's part of a config.json in LLaVA's format, as its own class reads it."""
    kind = config["model_type"]
    if kind == PUBLISHED:
        architectures = config.get("architectures") or ["LlavaLlamaForCausalLM"]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{FLAG} {path}: architectures is {shown(architecture)}, expected one of {', '.join(ARCHITECTURES)}"
            )
        language_model = ARCHITECTURES[architecture]
    else:
        language_model = LLAVA.get(kind) or _other_family(kind)
    own = {key: value for key, value in config.items() if key not in _LLAVA_NAMES and not key.startswith(_LLAVA_FIELDS)}
    with library_errors(f"{FLAG} {path}", "config.json is not what transformers expects"):
        return CONFIG_MAPPING[language_model].from_dict(own)


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
    adapter = adapters.read_adapter(path)
    base_path = model_base or adapter.base
    if base_path is None or not Path(base_path).is_dir():
        raise ConfigError(
            f"{FLAG} {path} is a LoRA adapter of {base_path}, which is no folder here: name its folder by --model_base"
        )
    if adapters.is_adapter(base_path):
        raise ConfigError(f"--model_base {base_path} is an adapter itself: merge it, and give the folder of the result")
    base = read_folder(base_path)
    config = _read_config(path) if (Path(path) / "config.json").is_file() else {}
    is_llava = _is_llavas(config.get("model_type")) and "text_config" not in config
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
        over = Source(FLAG, str(beside), _behind_prefix(rename)) if beside.is_file() else None
        if over is not None and not over.files().shapes:
            over = None
        if source is not None:
            changes = (*source.changes, partial(adapters.Merged, adapter=adapter, rename=rename))
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


def _behind_prefix(rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    return lambda name: rename(formats.plain_name(name))


def _overlay(over: Source, below: Weights, is_tower: bool) -> Overlaid:
    """A tower comes whole in LLaVA's files, and is wanted up to its last layer that runs."""
    return Overlaid(below, over.open(below.shapes.__contains__) if is_tower else over.open())


def _refuse_strange(adapter: adapters.Adapter, beside: Path, renames) -> None:
    """Raise DataError for what is in an adapter's files and in no part of the model."""
    for file in (adapter.file, beside):
        if file.is_file():
            for name in WeightFiles(file).shapes:
                plain = formats.plain_name(name).partition(".lora_")[0]
                plain = plain if plain.endswith((".weight", ".bias", "image_newline")) else f"{plain}.weight"
                if all(rename(plain) is None for rename in renames):
                    raise DataError(f"{file} holds {name}, which is in no part of the model")


def _tower_of(folder: ModelFolder, args: ModelArguments) -> tuple[TowerPlan, Source, Source | None]:
    """The tower, where the weights of what runs lie, and where the rest of it does if that is elsewhere."""
    given = args.vision_tower
    elsewhere = given and Source("--vision_tower", given, formats.tower_from_disk)
    if folder.vision_config is not None:
        if given is not None:
            _refuse_other_tower(folder, read_tower(given, args))
        where = f"{FLAG} {folder.path}"
        processor = read_processor(folder.base or folder.path, where)
        return plan_tower(folder.vision_config, processor, where, args), folder.vision_tower, None
    trained_with, width = folder.wants_tower
    if given is None:
        was = f"; it was trained with {trained_with}" if trained_with else ""
        raise ConfigError(
            f"--vision_tower is missing: {FLAG} {folder.path} is {folder.kind}, which brings none that is on this "
            f"machine{was}: name the tower's folder"
        )
    tower = read_tower(given, args)
    if width is not None and width != tower.width:
        raise ConfigError(
            f"--vision_tower {given} gives features {tower.width} wide, but {FLAG} {folder.path} was trained on "
            f"{trained_with}, {width} wide: give that one"
        )
    if folder.vision_tower is not None:
        return tower, folder.vision_tower, elsewhere
    return tower, elsewhere, None


def _refuse_other_tower(folder: ModelFolder, given: TowerPlan) -> None:
    own = folder.vision_config
    other = [name for name in _TOWER_SHAPE if getattr(own, name, None) != getattr(given.config, name, None)]
    if other:
        raise ConfigError(
            f"--vision_tower is another tower than the one in {FLAG} {folder.path}: "
            + ", ".join(f"{name} {getattr(given.config, name, None)} for {getattr(own, name, None)}" for name in other)
            + ": leave it out, for the model brings its own"
        )


def take_from_model(args: Arguments) -> tuple[Arguments, list[str]]:
    """The flags with what the model says of itself in the place of what was not given, and lines that say so.

    Flags that name no model are returned as they are. Raises ConfigError for given flags that contradict the model.
    """
    path = args.model.model_name_or_path
    folder = None if path is None else read_folder(path, args.model.model_base)
    brings_projector = folder is not None and folder.projector is not None
    given_projector = args.model.pretrain_mm_mlp_adapter is not None or trained_with_it(args.model) is not None
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
