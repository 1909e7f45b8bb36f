"""Opening an exported model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from llava_ds.constants import ConfigError
from llava_ds.geometry import PictureOptions
from llava_ds.model.hf import HF_CLASSES, HFModel, attention_options
from llava_ds.model.vision import read_processor
from llava_ds.tokenizer import why_not_opened


@dataclass(frozen=True)
class LoadedModel:
    """A LLaVA in transformers' own class, with its tokenizer, ready to answer.

    mean, std: how its tower scales pixels, per channel; pictures: how it was shown pictures in training; version: its
    conversation template.
    """

    model: HFModel
    tokenizer: PreTrainedTokenizerBase
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pictures: PictureOptions
    version: str


def load_model(path: str | Path, device: str | None = None) -> LoadedModel:
    """Open a llava-hf folder from disk, on a GPU if there is one. Raises ConfigError when it is not such a folder."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} holds no exported model (no config.json): train one first, as make finetune does")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        kind = config.model_type
        if kind not in HF_CLASSES:
            raise ValueError(f"its model_type is {kind!r}, expected {' or '.join(HF_CLASSES)}")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model, report = HF_CLASSES[kind].from_pretrained(
            path, dtype="auto", local_files_only=True, output_loading_info=True, **attention_options(config)
        )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        hint = ""
        if (
            '"llava_' in (text := (Path(path) / "config.json").read_text(encoding="utf-8"))
            and "mm_vision_tower" in text
        ):
            hint = f"; it is in LLaVA's own format: convert it first, with run/export.py {path} --format hf"
        raise ConfigError(f"{path} can't be opened as a LLaVA: {why_not_opened(error)}{hint}") from error
    wrong = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if wrong:
        raise ConfigError(
            f"{path} is not a whole LLaVA: {len(wrong)} tensors are missing or misshapen, first {wrong[0]}"
        )
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # Not AutoProcessor: transformers 5 makes LlavaOnevision's only where torchvision is installed.
    processor = read_processor(path, str(path))
    mean, std = (tuple(processor.get(name, [0.5] * 3)) for name in ("image_mean", "image_std"))
    return LoadedModel(model, tokenizer, mean, std, _picture_options(model, processor), _version(model))


def _picture_options(model: HFModel, processor: dict) -> PictureOptions:
    """What our own exports say; for other llava-hf folders, what their class and processor do."""
    config = model.config
    written = getattr(config, "llava_ds_pictures", None)
    if written is not None:
        pinpoints = tuple(map(tuple, written["pinpoints"]))
        return PictureOptions(**{**written, "mean": tuple(written["mean"]), "pinpoints": pinpoints})
    vision, mean = config.vision_config, tuple(processor.get("image_mean", [0.5] * 3))
    size, patch_size = vision.image_size, vision.patch_size
    if config.model_type != "llava":
        ratio = "anyres" if config.model_type == "llava_next" else config.vision_aspect_ratio
        pinpoints = tuple((width, height) for height, width in config.image_grid_pinpoints)
        return PictureOptions(size, patch_size, mean, ratio, pinpoints, "spatial_unpad")
    return PictureOptions(
        size,
        patch_size,
        mean,
        "pad" if processor.get("do_pad") else "square",
        stretch=not processor.get("do_center_crop", vision.model_type == "clip_vision_model"),
        class_token=config.vision_feature_select_strategy == "full" and vision.model_type == "clip_vision_model",
    )


def _version(model: HFModel) -> str:
    return getattr(model.config, "llava_ds_version", "v1")
