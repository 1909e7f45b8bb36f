"""Opening an exported model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaProcessor

from llava_ds.constants import ConfigError


@dataclass(frozen=True)
class LoadedModel:
    """A LLaVA in transformers' own class, with its processor, ready to answer."""

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor

    @property
    def num_image_tokens(self) -> int:
        """Features per picture."""
        return self.model.config.image_seq_length


def load_model(path: str | Path, device: str | None = None) -> LoadedModel:
    """Open a llava-hf folder from disk, on a GPU if there is one. Raises ConfigError when it is not such a folder."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} holds no exported model (no config.json): train one first, as make finetune does")
    try:
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        model, report = LlavaForConditionalGeneration.from_pretrained(
            path, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"{path} can't be opened as a LLaVA: {error}") from error
    wrong = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if wrong:
        raise ConfigError(
            f"{path} is not a whole LLaVA: {len(wrong)} tensors are missing or misshapen, first {wrong[0]}"
        )
    return LoadedModel(model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu")), processor)
