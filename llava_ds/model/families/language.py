"""Language-model families: names in LLaVA's format, names of configuration fields, and limits.

Most new families need no change here, because probe.py tries every causal language model of transformers on a small
copy. Add a line to llava_classes.json if LLaVA has its own class for the family, to MLP_WIDTHS if its configuration has
another name for that width, and to TENSOR_PARALLEL of extensions/infer/engines.py once
tests/extensions/infer/test_engines.py passes with it. Then add its small configuration to FAMILIES in
tests/helpers/toys.py and a row to docs/language_models.md.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llava_ds.constants import ConfigError
from llava_ds.files.model_files import OWN_CODE, check_folder, library_errors, read_config, shown

# Language model's model_type -> model_type and class in LLaVA or LLaVA-NeXT.
LLAVA_CLASSES: dict[str, tuple[str, str]] = {
    family: tuple(names)
    for family, names in json.loads(Path(__file__).with_name("llava_classes.json").read_text(encoding="utf-8")).items()
}
MOE_PREFIX = "moe_"  # prefix that MoE-LLaVA adds to LLaVA's model_type
PUBLISHED = "llava"  # model_type in LLaVA-1.5's published folders, for any language model

# Names of the configuration field with the MLPs' width.
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")

STATEFUL = "linear_attention"  # in layer_types: a layer that carries a state from token to token
WINDOWED = "sliding_attention"  # in layer_types: a layer in which a token sees a window

# Rope types whose angles depend on the longest sample in a forward pass, so samples of a pack affect each other.
FOLLOWING_ROPE = ("longrope", "dynamic")

HF_HEAD = "language_model.lm_head.weight"  # the output layer in a llava-hf folder

# Prefixes and names of LLaVA's own fields in a config.json of its format.
_LLAVA_FIELDS = ("mm_", "llava_ds_", "image_", "tune_mm_", "freeze_mm_", "unfreeze_mm_", "tokenizer_", "s2")
_LLAVA_NAMES = {
    "use_mm_proj", "model_type", "architectures", "auto_map", "_name_or_path", "vision_tower_pretrained",
    "split_special_tokens",
}  # fmt: skip


def has_state(config: PreTrainedConfig) -> bool:
    """True if some layers carry a state from token to token, and have to reset it at the start of each sample."""
    return STATEFUL in (getattr(config, "layer_types", None) or ())


def state_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the number of key heads and the number of value heads in layers with a state."""
    return config.linear_num_key_heads, config.linear_num_value_heads


def num_attention_layers(config: PreTrainedConfig) -> int:
    """Return the number of attention layers: all layers without a state."""
    return config.num_hidden_layers - (getattr(config, "layer_types", None) or []).count(STATEFUL)


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configuration of every layer. Layers may differ in head width and number of heads."""
    different = getattr(config, "is_heterogeneous", False)  # from transformers 5.23 on
    return list(config.per_layer_config) if different else [config] * config.num_hidden_layers


def head_width(layer: PreTrainedConfig) -> int:
    """Return the width of a head. layer: an item of layer_configs()."""
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def attention_widths(config: PreTrainedConfig, windowed: bool = False) -> list[int]:
    """Return the total width of all query heads in each attention layer. windowed: only layers with a window."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [
        layer.num_attention_heads * head_width(layer)
        for kind, layer in zip(kinds, layer_configs(config))
        if (kind == WINDOWED if windowed else kind != STATEFUL)
    ]


def has_layer_embeddings(config: PreTrainedConfig) -> bool:
    """True if every layer has its own token embeddings."""
    return bool(getattr(config, "hidden_size_per_layer_input", None))


def read_text_config(path: str | Path) -> PreTrainedConfig:
    """Read the configuration of a language model's folder. Raises ConfigError for other folders."""
    config = read_any_config(path, f"--model_name_or_path {path}")
    if not hasattr(config, "hidden_size") or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"--model_name_or_path {path} is a {config.model_type}: expected a causal language model")
    return config


def read_any_config(path: str | Path, where: str) -> PreTrainedConfig:
    """Read the configuration in a folder as its transformers class. where: prefix of the ConfigError it may raise."""
    check_folder(path, where)
    return config_of(read_config(Path(path) / "config.json", where), where, str(path))


def config_of(config: dict, where: str, path: str = "") -> PreTrainedConfig:
    """Build the transformers configuration from the contents of a config.json. Source: AutoConfig.from_pretrained."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        why = f"transformers does not know model_type {shown(kind)}"
        if config.get("auto_map"):
            why = OWN_CODE
        raise ConfigError(f"{where} can't be opened: {why}")
    if kind == "mistral" and "layer_types" in config and "ministral" in CONFIG_MAPPING:
        kind = "ministral"
    with library_errors(where, "config.json is not what transformers expects"):
        return CONFIG_MAPPING[kind].from_dict(config, name_or_path=path)


def is_llava_type(model_type: object) -> bool:
    """True for a model_type of LLaVA's format: one of LLaVA's own, or "llava_" and a language model's model_type.

    Export writes the second form for families without a class in LLaVA.
    """
    return model_type == PUBLISHED or (isinstance(model_type, str) and _family_of(model_type) is not None)


def _family_of(llava_type: str) -> str | None:
    """Map a model_type of LLaVA's or MoE-LLaVA's format to the language model's; None for any other."""
    llava_type = llava_type.removeprefix(MOE_PREFIX)
    for family, (known, _) in LLAVA_CLASSES.items():
        if llava_type == known:
            return family
    family = llava_type.removeprefix("llava_")
    is_causal = family in CONFIG_MAPPING and CONFIG_MAPPING[family] in MODEL_FOR_CAUSAL_LM_MAPPING
    return family if family != llava_type and is_causal else None


def text_config_of_llava(config: dict, where: str) -> PreTrainedConfig:
    """Return the language model's configuration from a config.json in LLaVA's format: it mixes its fields with
    LLaVA's. where: prefix of the ConfigError raised for invalid contents."""
    family = _family_of(config["model_type"])
    if config["model_type"] == PUBLISHED:
        by_class = {name: family for family, (_, name) in LLAVA_CLASSES.items()}
        architectures = config.get("architectures") or ["LlavaLlamaForCausalLM"]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or architecture not in by_class:
            raise ConfigError(f"{where}: architectures is {shown(architecture)}, expected one of {', '.join(by_class)}")
        family = by_class[architecture]
    own = {key: value for key, value in config.items() if key not in _LLAVA_NAMES and not key.startswith(_LLAVA_FIELDS)}
    with library_errors(where, "config.json is not what transformers expects"):
        return CONFIG_MAPPING[family].from_dict(own)


def length_problem(config: PreTrainedConfig, max_length: int) -> str | None:
    """Return the reason why samples of max_length tokens are too long for the model, or None."""
    longest, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if longest is not None and max_length > longest and not rope:  # learned positions end there
        return (
            f"--model_max_length is {max_length}, but the language model has {longest} positions: "
            f"give {longest} or less"
        )
    switches = dict(zip(FOLLOWING_ROPE, (rope.get("original_max_position_embeddings"), longest)))
    switch = switches.get(rope.get("rope_type"))
    if switch is not None and max_length > switch:
        return (
            f"--model_max_length is {max_length}, but beyond {switch} tokens the language model changes its rotary "
            f"angles, also for other samples in the same pack: give {switch} or less"
        )
    return None


def hold_rotary_angles(model: nn.Module) -> None:
    """Keep transformers from computing the longest sample's length in every forward pass: this waits for the device.

    Models of FOLLOWING_ROPE then always use the angles of short samples; length_problem refuses longer samples.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in FOLLOWING_ROPE:
            module.rope_type = "default"  # forward reads it only to choose the update


def length_note(config: PreTrainedConfig, max_length: int) -> str | None:
    """Return a warning for samples longer than a rotary model was trained for, or None. LLaVA's scripts allow them."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or max_length <= longest:
        return None
    return (
        f"--model_max_length is {max_length}, but the language model was trained for {longest} positions: "
        "longer samples use positions that it has never seen"
    )


def trunk_name(config: PreTrainedConfig) -> str:
    """Return the attribute name of the trunk: the model without its output layer."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].base_model_prefix


def mlp_width(config: PreTrainedConfig) -> int:
    """Return the width of the MLPs; four times the model's width if the configuration has no field for it."""
    return next((getattr(config, name) for name in MLP_WIDTHS if getattr(config, name, None)), 4 * config.hidden_size)


def final_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Apply Granite's division and the final soft cap to the output layer's result, if the model has them.

    transformers' Llava applies neither. Both keep the order of the logits, so greedy answers don't change.
    """
    divisor, cap = logits_divisor(config), getattr(config, "final_logit_softcapping", None)
    logits = logits if divisor == 1 else logits / divisor
    return logits if cap is None else cap * torch.tanh(logits / cap)


def logits_divisor(config: PreTrainedConfig) -> float:
    """Return the divisor of Granite's logits; 1 for other families."""
    return getattr(config, "logits_scaling", None) or 1.0


def names_in_hf(language_model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Map each parameter's name in the language model to its one or two names in a llava-hf folder.

    In such a folder the trunk is called model and the output layer lm_head. transformers' Llava ties lm_head only to an
    embedding called embed_tokens, so a tied embedding with another name is written under two names.
    """
    trunk = f"{language_model.base_model_prefix}."
    names = {}
    for name, _ in language_model.named_parameters():  # yields a tied parameter once
        inside = name.startswith(trunk)
        names[name] = (f"language_model.model.{name.removeprefix(trunk)}" if inside else HF_HEAD,)
    if _is_tied(language_model) and not is_tied_in_hf(language_model):
        names[embedding_name(language_model)] += (HF_HEAD,)
    return names


def is_tied_in_hf(language_model: PreTrainedModel) -> bool:
    """True if the language model ties its embeddings, and transformers' Llava can do so."""
    trunk = f"{language_model.base_model_prefix}."
    return _is_tied(language_model) and embedding_name(language_model) == f"{trunk}embed_tokens.weight"


def embedding_name(language_model: PreTrainedModel) -> str:
    """Return the name of the token embedding matrix."""
    embedding = language_model.get_input_embeddings().weight
    return next(name for name, parameter in language_model.named_parameters() if parameter is embedding)


def _is_tied(language_model: PreTrainedModel) -> bool:
    return language_model.get_input_embeddings().weight is language_model.get_output_embeddings().weight
