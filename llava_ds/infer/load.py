"""Opening a model to be asked, in transformers' own class whatever format it lies in."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds.constants import PILLOW_MAX_PIXELS, ConfigError
from llava_ds.data.templates import resolve_template
from llava_ds.files.model_files import library_errors, read_json_if_there, shown
from llava_ds.geometry import ImageOptions
from llava_ds.infer.formats import UnloadedModel, open_model
from llava_ds.model.hf import HF_CLASSES, HFModel, attention_options
from llava_ds.model.loading import check_depth, check_fit, load_weights
from llava_ds.model.open.folder import read_pinpoints
from llava_ds.model.open.weights import WeightFiles
from llava_ds.model.vision import read_processor
from llava_ds.runtime.ranks import Ranks

# What is taken of a generation_config.json, and its kind.
_IDS = NonNegativeInt | list[NonNegativeInt]
GENERATION = {
    "bos_token_id": NonNegativeInt,
    "eos_token_id": _IDS,
    "pad_token_id": NonNegativeInt,
    "repetition_penalty": Annotated[float, Field(gt=0, allow_inf_nan=False)],
}


@dataclass(frozen=True)
class LoadedModel:
    """A LLaVA in transformers' own class, with its tokenizer, ready to answer.

    mean, std: how its tower scales pixels, per channel; images: how it was shown images in training; version: its
    conversation template; ranks: the processes that hold it together, which have to be asked the same at the same
    time, None where this one has all of it; generating: what generate() has to be told besides; notes: lines about
    how it was opened.
    """

    model: HFModel
    tokenizer: PreTrainedTokenizerBase
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_options: ImageOptions
    version: str
    ranks: Ranks | None = None
    generating: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Device of the inputs; parameters may be elsewhere."""
        return self.model.device if self.ranks is None else self.ranks.device

    @property
    def context_tokens(self) -> int:
        """The longest conversation that the language model has positions for; without end where it counts none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def load_model(
    path: str | Path,
    device: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    version: str | None = None,
    moved: Mapping[str, str] | None = None,
) -> LoadedModel:
    """Open from disk what open_model() knows, on a GPU if there is one.

    dtype: None for the weights' own; version: the conversation template of a folder that does not say it; moved: where
    models that it does not bring lie now. Raises ConfigError or DataError when it is no LLaVA, or not whole.
    """
    with open_model(path, moved, version) as found:
        model = fill_model(found, found.precision(dtype)).eval()
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return loaded(model, found, version)


def fill_model(found: UnloadedModel, dtype: torch.dtype) -> HFModel:
    """The model in this process's memory, its weights streamed in one by one."""
    check_weights(found, dtype)
    with no_init_weights():
        model = construct_model(found, dtype)
    load_weights(model, found.weights(model), Ranks(0, 0, 1, torch.device("cpu")), "--model_path")
    return model


def check_weights(found: UnloadedModel, dtype: torch.dtype) -> None:
    """Raise DataError for weights that are not the configuration's, before memory is taken for what it says."""
    if found.is_folder:
        files = WeightFiles(found.path)
        for part in (found.config.text_config, found.config.vision_config):
            check_depth(part, files, "--model_path")
    with torch.device("meta"), no_init_weights():
        model = construct_model(found, dtype)
    check_fit(model, found.weights(model), "--model_path")


def construct_model(found: UnloadedModel, dtype: torch.dtype) -> HFModel:
    """The model in its class, before its weights, with the folder's settings for generate()."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = found.config
        with library_errors(f"--model_path {found.path}"):
            model = HF_CLASSES[config.model_type]._from_config(config, dtype=dtype, **attention_options(config))
            model.tie_weights()
    finally:
        torch.set_default_dtype(before)
    model.generation_config = _generation_config(found)
    return model.eval()


def _generation_config(found: UnloadedModel) -> GenerationConfig:
    """The folder's ids of tokens and penalty of repetition; nothing else of it is for who asks one greedy answer."""
    where = f"--model_path {found.path}"
    said = read_json_if_there(found.folder / "generation_config.json", where)
    kept = {name: said[name] for name in GENERATION if said.get(name) is not None}
    for name, value in kept.items():
        try:
            TypeAdapter(GENERATION[name]).validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError(f"{where}: generation_config.json says {name} {shown(value)}: copy it again") from None
    return GenerationConfig(**kept)


def loaded(model: HFModel, found: UnloadedModel, version: str | None = None) -> LoadedModel:
    """A model with its weights, and what has to be known to ask it. version: see load_model."""
    # Not AutoProcessor: transformers 5 makes LlavaOnevision's only where torchvision is installed.
    processor = read_processor(found.folder, str(found.path))
    mean, std = (tuple(processor.get(name, [0.5] * 3)) for name in ("image_mean", "image_std"))
    said = getattr(model.config, "llava_ds_version", None)
    notes = found.notes
    if version is None and said is not None:
        try:
            version = resolve_template(str(said))
        except ConfigError as error:
            raise ConfigError(f"{found.path}: its config.json has llava_ds_version {said!r}; {error}") from error
    elif version is not None:
        version = resolve_template(version)
    else:
        version = "v1"
        notes += (f"{found.path} does not say its conversation template: Vicuna's is taken; --version names another",)
    image_options = _image_options(model, processor, found.path)
    return LoadedModel(model, found.tokenizer, mean, std, image_options, version, notes=notes)


def _image_options(model: HFModel, processor: dict, path: Path) -> ImageOptions:
    """The image options in our own exports; for other llava-hf folders, those of their class and processor."""
    config = model.config
    written = getattr(config, "llava_ds_pictures", None)
    if written is not None:
        try:
            options = TypeAdapter(ImageOptions).validate_python(written)
            if options.size != config.vision_config.image_size or not 0 < options.max_pixels <= PILLOW_MAX_PIXELS:
                raise ValueError("its sizes are not the tower's")
            return options
        except ValueError as error:  # pydantic's is one
            raise ConfigError(
                f"{path}: llava_ds_pictures in its config.json is not what an export writes ({error}): export it again"
            ) from error
    vision, mean = config.vision_config, tuple(processor.get("image_mean", [0.5] * 3))
    size, patch_size = vision.image_size, vision.patch_size
    if config.model_type != "llava":
        ratio = "anyres" if config.model_type == "llava_next" else config.vision_aspect_ratio
        pinpoints = tuple(pair[::-1] for pair in read_pinpoints(config.image_grid_pinpoints, str(path)))
        return ImageOptions(size, patch_size, mean, ratio, pinpoints, "spatial_unpad")
    return ImageOptions(
        size,
        patch_size,
        mean,
        "pad" if processor.get("do_pad") else "square",
        stretch=not processor.get("do_center_crop", vision.model_type == "clip_vision_model"),
        class_token=config.vision_feature_select_strategy == "full" and vision.model_type == "clip_vision_model",
    )
