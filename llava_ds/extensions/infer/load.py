"""Load a model for inference into transformers' own class, from any format on disk."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IMAGE_TOKEN, PILLOW_MAX_PIXELS, ConfigError
from llava_ds.data.encode import Encoder, EncodingOptions, encoder_of
from llava_ds.data.templates import resolve_template
from llava_ds.extensions.active import architecture_of, flags_class, plugins, text_part
from llava_ds.extensions.infer.formats import UnloadedModel, open_model
from llava_ds.files.model_files import library_errors, read_json_if_there, shown
from llava_ds.geometry import FILTERS, ImageOptions
from llava_ds.model.families.towers import TOWERS
from llava_ds.model.open.hf import HFModel, attention_options, hf_class, let_generate_take_embeddings
from llava_ds.model.open.loading import check_depth, check_fit, load_weights, return_freed_memory
from llava_ds.model.open.tower import plan_tower, read_processor, vision_config
from llava_ds.model.open.trained_folder import read_pinpoints
from llava_ds.model.open.weights import WeightFiles
from llava_ds.model.vision import side_of
from llava_ds.runtime.ranks import Ranks
from llava_ds.tokenizer import note_rows, tokens_without_rows
from llava_ds.videos import Clip

if TYPE_CHECKING:
    from llava_ds.export.export_plan import ExportPlan

ROWS_OF_EXPORT = (IMAGE_TOKEN, "<video>")  # tokens that an export adds, as placeholders for features
# The settings that are read from generation_config.json, with their types.
_IDS = NonNegativeInt | list[NonNegativeInt]
GENERATION = {
    "bos_token_id": NonNegativeInt,
    "eos_token_id": _IDS,
    "pad_token_id": NonNegativeInt,
    "repetition_penalty": Annotated[float, Field(gt=0, allow_inf_nan=False)],
}


@dataclass(frozen=True)
class LoadedModel:
    """A LLaVA model in transformers' own class, with its tokenizer, ready to answer.

    mean, std: normalisation of pixels, per channel; image_options: training's options; version: conversation template;
    ranks: the processes that share the model and have to generate together, None if this process has the complete
    model; generating: additional arguments of generate(); notes: lines about the loading to print.
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

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder of training, with the exported model's template. Cached, as creating it takes 0.1 seconds."""
        config = self.model.config
        options = EncodingOptions(
            self.version,
            self.tokenizer.model_max_length,
            getattr(config, "mm_use_im_start_end", False),
            split_special_tokens=getattr(config, "split_special_tokens", False),
        )
        return encoder_of(self.tokenizer, options, self.image_options)

    @property
    def context_tokens(self) -> int:
        """The language model's number of positions; sys.maxsize if it is unlimited."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def load_model(
    path: str | Path,
    device: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    version: str | None = None,
    moved: Mapping[str, str] | None = None,
    maps: bool = False,
) -> LoadedModel:
    """Load a model of any format that open_model() reads, on a GPU if there is one.

    dtype: None to use the weights' own; version and moved: see open_model; maps: on a CPU, map the weights from their
    files instead of copying them, for a caller that moves or shards them. Raises ConfigError or DataError if the path
    has no complete LLaVA model.
    """
    with open_model(path, moved, version) as unloaded:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        # Map weights that will be moved to a GPU, so that ranks don't each need a copy in CPU memory.
        model = fill_model(unloaded, unloaded.precision(dtype), maps or torch.device(device).type != "cpu").eval()
        model = model.to(device)
        return with_settings(model, unloaded, version)


def fill_model(unloaded: UnloadedModel, dtype: torch.dtype, maps: bool = False) -> HFModel:
    """Build the model in this process's memory, and load its weights one by one. maps: see load_model."""
    check_weights(unloaded, dtype)
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    with return_freed_memory():
        with no_init_weights():
            model = construct_model(unloaded, dtype)
        load_weights(model, unloaded.weights(model), alone, "--model_path", copies=not maps)
    return model


def check_weights(unloaded: UnloadedModel, dtype: torch.dtype) -> None:
    """Raise DataError for weights that don't fit the configuration, before any memory is allocated for them."""
    if unloaded.is_folder:
        files = WeightFiles(unloaded.path)
        for part in (unloaded.config.text_config, unloaded.config.vision_config):
            check_depth(part, files, "--model_path")
    with torch.device("meta"), no_init_weights():
        model = construct_model(unloaded, dtype)
    check_fit(model, unloaded.weights(model), "--model_path")


def construct_model(unloaded: UnloadedModel, dtype: torch.dtype) -> HFModel:
    """Build the model without its weights, with the folder's settings for generate()."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = unloaded.config
        with library_errors(f"--model_path {unloaded.path}"):
            model = hf_class(config)._from_config(config, dtype=dtype, **attention_options(config))
            text = config.get_text_config()
            text_part(text).assembled(model.get_decoder(), text, ModelArguments())
            if unloaded.own is not None:
                _put_own_parts(model, unloaded.own)
            model.tie_weights()
            let_generate_take_embeddings(model)
    finally:
        torch.set_default_dtype(before)
    model.generation_config = _generation_config(unloaded)
    return model.eval()


def _put_own_parts(model: HFModel, export: "ExportPlan") -> None:
    """Replace transformers' tower and projector by the modules used in training, with uninitialised weights."""
    tower, images = export.model.tower, export.model.images
    model.model.vision_tower = tower.build(torch.tensor(images.mean), torch.tensor(images.std))
    model.model.multi_modal_projector = tower.build_projector(export.args, export.model.hidden_size)


def _generation_config(unloaded: UnloadedModel) -> GenerationConfig:
    """Return the token ids and repetition penalty in the folder, without its settings for sampling."""
    where = f"--model_path {unloaded.path}"
    config = read_json_if_there(unloaded.folder / "generation_config.json", where)
    settings = {name: config[name] for name in GENERATION if config.get(name) is not None}
    for name, value in settings.items():
        try:
            TypeAdapter(GENERATION[name]).validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError(f"{where}: generation_config.json says {name} {shown(value)}: copy it again") from None
    return GenerationConfig(**settings)


def with_settings(model: HFModel, unloaded: UnloadedModel, version: str | None = None) -> LoadedModel:
    """Return the model with its tokenizer, image options and template. version: see open_model."""
    note_rows(unloaded.tokenizer, _trained_rows(unloaded), ROWS_OF_EXPORT)
    unloaded = replace(unloaded, notes=(*unloaded.notes, *tokens_without_rows(unloaded.tokenizer)))
    # AutoProcessor isn't used because transformers 5 needs torchvision for LlavaOnevision's processor.
    processor = read_processor(unloaded.folder, str(unloaded.path))
    mean, std = (tuple(processor[name]) for name in ("image_mean", "image_std"))
    exported = getattr(model.config, "llava_ds_version", None)
    own = (flags_class(name).differs for name in plugins())
    notes = (*unloaded.notes, *(f"{unloaded.path} answers without its plugin: {why}" for why in own if why))
    if architecture_of(model.config) is not None:
        options, version = _own_settings(unloaded, version)
        return LoadedModel(model, unloaded.tokenizer, mean, std, options, version, notes=notes)
    if version is None and exported is not None:
        try:
            version = resolve_template(str(exported))
        except ConfigError as error:
            raise ConfigError(f"{unloaded.path}: its config.json has llava_ds_version {exported!r}; {error}") from error
    elif version is not None:
        version = resolve_template(version)
    else:
        version = "v1"
        notes += (f"{unloaded.path} has no conversation template: Vicuna's is used; --version names another",)
    own = unloaded.own
    image_options = _image_options(model, processor, unloaded.path) if own is None else own.image_options
    return LoadedModel(model, unloaded.tokenizer, mean, std, image_options, version, notes=notes)


def _trained_rows(unloaded: UnloadedModel) -> int:
    """Return the number of embedding rows in training, llava_ds_vocab_size: exports as LLaVA append rows."""
    rows = getattr(unloaded.config, "llava_ds_vocab_size", None)
    if rows is None:
        return unloaded.config.get_text_config().vocab_size
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise ConfigError(
            f"--model_path {unloaded.path}: config.json says llava_ds_vocab_size {shown(rows)}, expected a number of "
            "rows: copy it again"
        )
    return rows


def _own_settings(unloaded: UnloadedModel, version: str | None) -> tuple[ImageOptions, str]:
    """Return the image options and template of an extension's architecture, read from its processor's files."""
    where = f"--model_path {unloaded.path}"
    architecture = architecture_of(unloaded.config)
    if version not in (None, "processor"):
        raise ConfigError(
            f"--version {version}: {where} is {architecture.kind} with its own chat template: leave it out"
        )
    tower = architecture.plan_tower(unloaded.folder, unloaded.tokenizer, where)
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    return tower.image_options(args), "processor"


def _image_options(model: HFModel, processor: dict, path: Path) -> ImageOptions:
    """Return the image options that an export stores; for llava-hf folders, derive them from class and processor."""
    config = model.config
    written = getattr(config, "llava_ds_pictures", None)
    if written is not None:
        try:
            adapter = TypeAdapter(ImageOptions)
            adapter.rebuild(_types_namespace={"Clip": Clip})  # geometry imports Clip for type checking only
            options = adapter.validate_python(written)
            if not _fits(options, config.vision_config):
                raise ValueError("its sizes are not the tower's")
            return options
        except ValueError as error:  # includes pydantic's ValidationError
            raise ConfigError(
                f"{path}: llava_ds_pictures in its config.json is invalid ({error}): export it again"
            ) from error
    where, takes_all = f"--model_path {path}", config.vision_feature_select_strategy == "full"
    feature: Literal["patch", "cls_patch"] = "cls_patch" if takes_all else "patch"
    vision = vision_config(config.vision_config.to_dict(), where)
    spec = plan_tower(vision, processor, where, ModelArguments(mm_vision_select_feature=feature)).images
    if config.model_type != "llava":
        ratio = "anyres" if config.model_type == "llava_next" else config.vision_aspect_ratio
        pinpoints = tuple(pair[::-1] for pair in read_pinpoints(config.image_grid_pinpoints, str(path)))
        return ImageOptions(spec.size, spec.patch_size, spec.mean, ratio, pinpoints, "spatial_unpad")
    return ImageOptions(
        spec.size,
        spec.patch_size,
        spec.mean,
        "pad" if processor.get("do_pad") else "square",
        stretch=spec.stretch,
        class_token=spec.class_token,
        short_side=spec.short_side,
        square_resample=spec.resample,
    )


def _fits(options: ImageOptions, vision: PreTrainedConfig) -> bool:
    """Return True if images with these options fit the tower."""
    family = TOWERS.get(vision.model_type)
    own = side_of(getattr(vision, "image_size", None))
    is_size = options.size == own or (family is not None and family.any_size(vision))
    is_bounded = 0 < options.size <= options.scaled_side and 0 < options.max_pixels <= PILLOW_MAX_PIXELS
    return is_size and is_bounded and options.square_resample in FILTERS
