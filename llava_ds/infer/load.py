"""Opening a model to be asked: an exported folder, any other of transformers' Llava, or a run's checkpoint."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds import formats
from llava_ds.checkpoint import commit
from llava_ds.constants import ConfigError, DataError
from llava_ds.data.templates import resolve_template
from llava_ds.distributed import Ranks
from llava_ds.geometry import PictureOptions
from llava_ds.model.hf import HF_CLASSES, HFModel, attention_options
from llava_ds.model.vision import read_processor
from llava_ds.model.weight_files import WeightFiles, Weights
from llava_ds.tokenizer import why_not_opened


@dataclass(frozen=True)
class LoadedModel:
    """A LLaVA in transformers' own class, with its tokenizer, ready to answer.

    mean, std: how its tower scales pixels, per channel; pictures: how it was shown pictures in training; version: its
    conversation template; ranks: the processes that hold it together, which have to be asked the same at the same
    time, None where this one has all of it; generating: what generate() has to be told besides; notes: lines about
    how it was opened.
    """

    model: HFModel
    tokenizer: PreTrainedTokenizerBase
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pictures: PictureOptions
    version: str
    ranks: Ranks | None = None
    generating: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where inputs go; parameters may lie elsewhere."""
        return self.model.device if self.ranks is None else self.ranks.device

    @property
    def context_tokens(self) -> int:
        """The longest conversation that the language model has positions for; without end where it counts none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


@dataclass(frozen=True)
class Described:
    """All of a model but its weights. path: as the user named it; folder: where configuration and tokenizer lie;
    weights: of the class as it lives in memory, by its own names."""

    path: Path
    folder: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights: Callable[[HFModel], Weights]
    is_folder: bool

    def precision(self, asked: torch.dtype | None) -> torch.dtype:
        """What is asked for, what the configuration says, or float32."""
        return asked or self.config.dtype or torch.float32


def load_model(
    path: str | Path, device: str | None = None, *, dtype: torch.dtype | None = None, version: str | None = None
) -> LoadedModel:
    """Open a llava-hf folder or a checkpoint-<step> from disk, on a GPU if there is one.

    dtype: None for the weights' own; version: the conversation template of a folder that does not say it. Raises
    ConfigError or DataError when it is neither, or not whole.
    """
    with described(path) as found:
        model = _from_pretrained(found, dtype) if found.is_folder else filled(found, found.precision(dtype))
        model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return loaded(model, found, version)


@contextlib.contextmanager
def described(path: str | Path) -> Iterator[Described]:
    """What there is at a path, before any weight is read; its folder may be gone afterwards.

    Raises ConfigError where it is no LLaVA in transformers' format and no checkpoint, DataError for a damaged one.
    """
    path = Path(path)
    if (path / commit.MANIFEST).is_file():
        with _checkpoint(path) as found:
            yield found
        return
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} holds no exported model (no config.json) and is no whole checkpoint-<step> (no {commit.MANIFEST}):"
            " train one first, as make finetune does"
        )
    with _told(path):
        config, tokenizer = _settings(path)
    yield Described(path, path, config, tokenizer, lambda model: WeightFiles(path, _renaming(model)), True)


def filled(found: Described, dtype: torch.dtype) -> HFModel:
    """The model in this process's memory, its weights streamed in one by one."""
    from llava_ds.model.weights import load_weights  # with DeepSpeed, which a folder does without

    with no_init_weights():
        model = constructed(found, dtype)
    load_weights(model, found.weights(model), Ranks(0, 0, 1, torch.device("cpu")), str(found.path))
    return model


def constructed(found: Described, dtype: torch.dtype) -> HFModel:
    """The model in its class, before its weights, with the folder's settings for generate()."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = found.config
        model = HF_CLASSES[config.model_type]._from_config(config, dtype=dtype, **attention_options(config))
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    if (found.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(found.folder, local_files_only=True)
    return model.eval()


def loaded(model: HFModel, found: Described, version: str | None = None) -> LoadedModel:
    """A model with its weights, and what has to be known to ask it. version: see load_model."""
    # Not AutoProcessor: transformers 5 makes LlavaOnevision's only where torchvision is installed.
    processor = read_processor(found.folder, str(found.path))
    mean, std = (tuple(processor.get(name, [0.5] * 3)) for name in ("image_mean", "image_std"))
    said = getattr(model.config, "llava_ds_version", None)
    notes = ()
    if version is not None:
        version = resolve_template(version)
    elif said is None:
        version = "v1"
        notes = (f"{found.path} does not say its conversation template: Vicuna's is taken; --version names another",)
    pictures = _picture_options(model, processor)
    return LoadedModel(model, found.tokenizer, mean, std, pictures, version or said, notes=notes)


@contextlib.contextmanager
def _checkpoint(path: Path) -> Iterator[Described]:
    """A checkpoint as the folder that its export would be, whose files of weights are holes."""
    from llava_ds.export.finished import hf_kind
    from llava_ds.export.hf import hf_entries, write_hf
    from llava_ds.export.restored import restore
    from llava_ds.export.shards import DEFAULT_SHARD_SIZE, parse_size

    try:
        restored = restore(path, {}, None)
    except ConfigError as error:
        raise ConfigError(f"{error}\nor export it with run/export.py {path}, which has flags for that") from error
    finished = restored.finished
    kind, why = hf_kind(finished.plan, finished.args, finished.pictures)
    if kind is None:
        raise ConfigError(f"{path} can't be asked: {why}")
    entries = hf_entries(finished, restored.entries)
    with tempfile.TemporaryDirectory(prefix="llava_ds-") as scratch:
        folder = Path(scratch)
        write_hf(finished, restored.entries, folder, parse_size(DEFAULT_SHARD_SIZE), holes=True)
        with _told(path):
            config, tokenizer = _settings(folder)
        yield Described(path, folder, config, tokenizer, lambda model: _Entries(path, entries, _renaming(model)), False)


class _Entries:
    """A checkpoint's tensors as weights of a class of transformers'."""

    notes = ()

    def __init__(self, path: Path, entries: list, rename: Callable[[str], str | None]) -> None:
        self.path = path
        self._entries = {new: entry for entry in entries if (new := rename(entry.name)) is not None}
        self.shapes = {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, entry in self._entries.items():
            yield name, entry.read


def _renaming(model: HFModel) -> Callable[[str], str | None]:
    """From names on disk to the model's own; None for what it does not have: layers of tables, and of other uses."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def rename(name: str) -> str | None:
        new = formats.to_transformers(name)
        for spelling in (new, new.replace("vision_tower.vision_model.", "vision_tower.")):
            if spelling in known:
                return spelling
        return None

    return rename


def _settings(folder: Path) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type not in HF_CLASSES:
        raise ValueError(f"its model_type is {config.model_type!r}, expected {' or '.join(HF_CLASSES)}")
    return config, AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _from_pretrained(found: Described, dtype: torch.dtype | None) -> HFModel:
    with _told(found.path):
        model, report = HF_CLASSES[found.config.model_type].from_pretrained(
            found.path,
            dtype=dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
            **attention_options(found.config),
        )
    wrong = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if wrong:
        raise ConfigError(
            f"{found.path} is not a whole LLaVA: {len(wrong)} tensors are missing or misshapen, first {wrong[0]}"
        )
    return model


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What transformers raises over a folder, as a ConfigError that says what to do."""
    try:
        yield
    except (ConfigError, DataError):
        raise
    except (OSError, ValueError, ImportError, AttributeError) as error:
        hint, file = "", path / "config.json"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if '"llava_' in text and "mm_vision_tower" in text:
            hint = f"; it is in LLaVA's own format: convert it first, with run/export.py {path} --format hf"
        raise ConfigError(f"{path} can't be opened as a LLaVA: {why_not_opened(error)}{hint}") from error


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
