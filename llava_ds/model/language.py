"""The configuration of the language model: what it allows, and what families call differently in it."""

from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llava_ds.constants import ConfigError
from llava_ds.files.model_files import OWN_CODE, check_folder, library_errors, read_config, shown

# What families call the width of their MLPs.
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
HF_HEAD = "language_model.lm_head.weight"  # the output layer in a llava-hf folder


def read_text_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a language model's folder. Raises ConfigError when the folder holds none."""
    config = read_any_config(path, f"--model_name_or_path {path}")
    if not hasattr(config, "hidden_size") or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"--model_name_or_path {path} is a {config.model_type}: expected a causal language model")
    return config


def read_any_config(path: str | Path, where: str) -> PreTrainedConfig:
    """The configuration in a folder, in its class of transformers'. Raises ConfigError that says where."""
    check_folder(path, where)
    return config_of(read_config(Path(path) / "config.json", where), where, str(path))


def config_of(config: dict, where: str, path: str = "") -> PreTrainedConfig:
    """The same of what config.json says. Source: AutoConfig.from_pretrained, which reads the file by itself."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        why = f"its model_type is {shown(kind)}, which transformers does not know"
        if config.get("auto_map"):
            why = OWN_CODE
        raise ConfigError(f"{where} can't be opened: {why}")
    if kind == "mistral" and "layer_types" in config and "ministral" in CONFIG_MAPPING:
        kind = "ministral"
    with library_errors(where, "config.json is not what transformers expects"):
        return CONFIG_MAPPING[kind].from_dict(config, name_or_path=path)


def length_problem(config: PreTrainedConfig, max_length: int) -> str | None:
    """Why samples of max_length tokens are too long for the model; None if they are not."""
    longest, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if longest is not None and max_length > longest and not rope:  # a learned table has no row for more
        return (
            f"--model_max_length is {max_length}, but the language model knows {longest} positions: "
            f"give {longest} or less"
        )
    # Angles of these kinds follow the longest sample of a forward, and with it the angles of all others in a pack.
    switches = {"longrope": rope.get("original_max_position_embeddings"), "dynamic": longest}
    switch = switches.get(rope.get("rope_type"))
    if switch is not None and max_length > switch:
        return (
            f"--model_max_length is {max_length}, but from {switch} tokens on the language model turns to other "
            f"rotary angles, for all samples that lie beside a long one, too: give {switch} or less"
        )
    return None


def length_note(config: PreTrainedConfig, max_length: int) -> str | None:
    """What to say of samples longer than those that a rotary model was made for, which LLaVA's scripts allow, too."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or max_length <= longest:
        return None
    return (
        f"--model_max_length is {max_length}, but the language model was made for {longest} positions: "
        "longer samples train at positions that it has never seen"
    )


def trunk_name(config: PreTrainedConfig) -> str:
    """What the family calls all of the model but its output layer."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].base_model_prefix


def mlp_width(config: PreTrainedConfig) -> int:
    """The width of its MLPs; four times the model's if the configuration says none."""
    return next((getattr(config, name) for name in MLP_WIDTHS if getattr(config, name, None)), 4 * config.hidden_size)


def final_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """What the output layer gives, as the language model ends: under Gemma 2's final soft cap, where there is one.

    transformers' Llava leaves it out. It changes no order of the logits, and so no greedy answer.
    """
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def names_in_hf(language_model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Where each parameter goes in a llava-hf folder, by the name that its family gives it: one place, or two.

    There, the trunk is called model and the output layer lm_head. transformers' Llava ties that to an embedding called
    embed_tokens alone: one that is tied under another name goes to both places.
    """
    trunk = f"{language_model.base_model_prefix}."
    names = {}
    for name, _ in language_model.named_parameters():  # a tied one comes once
        inside = name.startswith(trunk)
        names[name] = (f"language_model.model.{name.removeprefix(trunk)}" if inside else HF_HEAD,)
    if _is_tied(language_model) and not is_tied_in_hf(language_model):
        names[embedding_name(language_model)] += (HF_HEAD,)
    return names


def is_tied_in_hf(language_model: PreTrainedModel) -> bool:
    """Whether transformers' Llava shares one matrix between both ends, as the language model does."""
    trunk = f"{language_model.base_model_prefix}."
    return _is_tied(language_model) and embedding_name(language_model) == f"{trunk}embed_tokens.weight"


def embedding_name(language_model: PreTrainedModel) -> str:
    """What the family calls the matrix of token embeddings."""
    embedding = language_model.get_input_embeddings().weight
    return next(name for name, parameter in language_model.named_parameters() if parameter is embedding)


def _is_tied(language_model: PreTrainedModel) -> bool:
    return language_model.get_input_embeddings().weight is language_model.get_output_embeddings().weight
