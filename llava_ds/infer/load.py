"""Opening an exported model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoProcessor,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    LlavaProcessor,
)

from llava_ds.constants import ConfigError
from llava_ds.geometry import PictureOptions
from llava_ds.model.hf import HF_CLASSES, attention_options


@dataclass(frozen=True)
class LoadedModel:
    """A LLaVA in transformers' own class, with its processor, ready to answer.

    pictures: how it was shown pictures in training; version: its conversation template.
    """

    model: LlavaForConditionalGeneration | LlavaNextForConditionalGeneration
    processor: LlavaProcessor | LlavaNextProcessor
    pictures: PictureOptions
    version: str


def load_model(path: str | Path, device: str | None = None) -> LoadedModel:
    """Open a llava-hf folder from disk, on a GPU if there is one. Raises ConfigError when it is not such a folder."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} holds no exported model (no config.json): train one first, as make finetune does")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        kind = config.model_type
        if kind not in HF_CLASSES:
            raise ValueError(f"its model_type is {kind!r}, expected {' or '.join(HF_CLASSES)}")
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        model, report = HF_CLASSES[kind].from_pretrained(
            path, dtype="auto", local_files_only=True, output_loading_info=True, **attention_options(config)
        )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"{path} can't be opened as a LLaVA: {error}") from error
    wrong = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if wrong:
        raise ConfigError(
            f"{path} is not a whole LLaVA: {len(wrong)} tensors are missing or misshapen, first {wrong[0]}"
        )
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return LoadedModel(model, processor, _picture_options(model, processor), _version(model))


def _picture_options(
    model: LlavaForConditionalGeneration | LlavaNextForConditionalGeneration, processor: LlavaProcessor
) -> PictureOptions:
    """What our own exports say; for other llava-hf folders, what their class and processor do."""
    written = getattr(model.config, "llava_ds_pictures", None)
    if written is not None:
        pinpoints = tuple(map(tuple, written["pinpoints"]))
        return PictureOptions(**{**written, "mean": tuple(written["mean"]), "pinpoints": pinpoints})
    vision, images = model.config.vision_config, processor.image_processor
    size, patch_size, mean = vision.image_size, vision.patch_size, tuple(images.image_mean)
    if model.config.model_type == "llava_next":
        pinpoints = tuple((width, height) for height, width in model.config.image_grid_pinpoints)
        return PictureOptions(size, patch_size, mean, "anyres", pinpoints, "spatial_unpad")
    return PictureOptions(size, patch_size, mean, "pad" if getattr(images, "do_pad", False) else "square")


def _version(model: LlavaForConditionalGeneration | LlavaNextForConditionalGeneration) -> str:
    return getattr(model.config, "llava_ds_version", "v1")
