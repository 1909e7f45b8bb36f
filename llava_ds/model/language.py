"""The configuration of the language model, and what it allows."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from llava_ds.constants import ConfigError


def read_text_config(path: str | Path) -> PreTrainedConfig:
    """The configuration of a language model's folder. Raises ConfigError when the folder holds none."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--model_name_or_path {path} can't be opened: {error}") from error
    if not hasattr(config, "hidden_size"):
        raise ConfigError(f"--model_name_or_path {path} is a {config.model_type}: expected a language model")
    return config


def length_problem(config: PreTrainedConfig, max_length: int) -> str | None:
    """Why samples of max_length tokens are too long for the model; None if they are not."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or max_length <= longest:
        return None
    return (
        f"--model_max_length is {max_length}, but the language model knows {longest} positions: give {longest} or less"
    )
