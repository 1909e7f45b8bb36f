"""The plan of an export: all of a model but its weights, and the folder that it becomes."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llava_ds.config.arguments import Arguments, ModelArguments, adapted_parts, trains_projector_only
from llava_ds.constants import ConfigError
from llava_ds.export.shard_size import DEFAULT_SHARD_SIZE, parse_size
from llava_ds.extensions.active import active, text_part
from llava_ds.geometry import ImageOptions
from llava_ds.model.families.towers import TOWERS
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.model.projector import square_stride

if TYPE_CHECKING:
    from llava_ds.export.tensors import Names
    from llava_ds.extensions.base import Adapter


@dataclass(frozen=True)
class ExportPlan:
    """The model to write, and its form: "hf" (for transformers), "llava", "adapter", "projector", or an extension's.

    args: those the model was built with; dtype: of the weights to be written; max_length: longest sample in tokens;
    max_shard_bytes: largest file of weights; rows: of the embeddings before an export added tokens to them, None for
    as many as there are; tower_name: the tower's name in LLaVA's format; template: the processor's chat template, None
    for that of --version; matrix_type: of matrices, in a form
    with types of its own.
    """

    model: ModelPlan
    args: ModelArguments
    image_options: ImageOptions
    dtype: torch.dtype
    max_length: int
    form: str = "hf"
    max_shard_bytes: int = parse_size(DEFAULT_SHARD_SIZE)
    rows: int | None = None
    tower_name: str | None = None
    template: str | None = None
    matrix_type: str = ""

    @property
    def vocab_size(self) -> int:
        """Rows of the embeddings as the model has them now."""
        return self.model.text_config.vocab_size

    @property
    def uses_own_template(self) -> bool:
        """True if the tokenizer's own chat template writes conversations, and none of LLaVA's."""
        return self.model.architecture is not None or self.args.version == "chat_template"

    @property
    def is_whole_model(self) -> bool:
        """True for a model folder, false for an adapter and for a projector."""
        return self.form in ("hf", "llava")

    @property
    def source_folder(self) -> Path:
        """The folder that an architecture's model came from, or the one under its adapter."""
        return Path(self.model.sources.vision_tower.path)

    @cached_property
    def adapter(self) -> "Adapter | None":
        """How an adapter is written; None for a whole model."""
        return active(self.args.own).adapter

    @cached_property
    def names(self) -> "Names":
        """Names and ties of the language model's parameters."""
        from llava_ds.export.tensors import Names  # with all that reads weights

        return Names.of(self.model.text_config)


def hf_kind(plan: ModelPlan, args: ModelArguments, image_options: ImageOptions) -> tuple[str | None, str]:
    """The model_type of transformers' class for such a model, and ""; or None, and why there is no class."""
    kind = hf_container(plan, image_options)
    if plan.architecture is not None:
        return kind, ""
    if why := own_vision(plan, args, image_options):
        return None, why
    if why := text_part(plan.text_config).in_transformers(plan.text_config)[1]:
        return None, why
    ratio, merge = image_options.aspect_ratio, image_options.merge_type
    flags = f"--image_aspect_ratio {ratio} with --mm_patch_merge_type {merge}"
    if image_options.is_anyres and merge != "spatial_unpad":
        does = "always leaves padding out"
        does = does if image_options.has_overview else "always begins with the overview"
        does = "never pools tiles" if image_options.pools_tiles else does
        return None, f"{flags}: transformers' LlavaNext {does}: give --mm_patch_merge_type spatial_unpad"
    if not image_options.is_anyres and image_options.has_newline:
        instead = "give --mm_patch_merge_type flat, or --image_aspect_ratio anyres"
        return None, f"{flags}: transformers' Llava has no newline: {instead}"
    return kind, ""


def hf_container(plan: ModelPlan, image_options: ImageOptions) -> str:
    """The model_type of transformers' class that has such a model's language model and newline, whatever its own code
    does with images."""
    if plan.architecture is not None:
        return plan.architecture.config.model_type
    if not image_options.has_newline:
        return "llava"
    return "llava_next" if image_options.max_tiles is None else "llava_onevision"


def own_vision(plan: ModelPlan, args: ModelArguments, image_options: ImageOptions) -> str:
    """Why no class of transformers' has such a tower and projector; "" if one has them."""
    if args.mm_projector_type != "mlp2x_gelu":
        return f"transformers has no class with --mm_projector_type {args.mm_projector_type}: give mlp2x_gelu"
    if args.s2:
        return "transformers has no class with --s2 True: leave it out"
    if plan.tower.config.model_type == "siglip2_vision_model":
        return "transformers' classes don't cut images for a SigLIP 2 of any shape: take another --vision_tower"
    kind, tower = plan.tower.config.model_type, plan.tower
    if tower.second is not None:
        return "transformers' classes have one tower: give one to --vision_tower"
    if tower.num_first_tokens > 1:
        return f"transformers' classes would take the registers of a {kind} for patches: take another --vision_tower"
    if image_options.has_newline and plan.images.size != tower.config.image_size:
        return (
            f"transformers' LlavaNext takes images of a {kind} to be as large as its config.json says, not "
            f"{plan.images.size} pixels: give --mm_patch_merge_type flat, or take another --vision_tower"
        )
    return ""


def not_llavas(plan: ModelPlan, args: ModelArguments) -> str:
    """What LLaVA's own code does not know of a model in its format; "" if it opens it."""
    kind, lacks = plan.tower.config.model_type, ""
    if square_stride(args.mm_projector_type) > 1:
        lacks = f"--mm_projector_type {args.mm_projector_type}"
    elif plan.tower.second is not None:
        lacks = "place for a second tower"
    elif not TOWERS[kind].llavas:
        lacks = f"class for a {kind}"
    return lacks and f"LLaVA's own code has no {lacks}: llava_ds alone opens the model"


def export_format(args: Arguments, plan: ModelPlan, image_options: ImageOptions) -> tuple[str, list[str]]:
    """Choose the form of a run's export, before training, and return it with lines about an unexpected choice.

    Raises ConfigError where --export_format is not possible, or LLaVA's format would lose tokens.
    """
    if trains_projector_only(args.model) and plan.architecture is None:
        return "projector", []
    if adapted_parts(args.model):
        return "adapter", []
    wanted = args.training.export_format
    if wanted == "llava" and plan.architecture is not None:
        kind = plan.architecture.config.model_type
        raise ConfigError(
            f"--export_format llava has no place for a {kind}: leave it out, for transformers' own format"
        )
    note = "" if plan.architecture is not None else not_llavas(plan, args.model)
    if wanted == "llava":
        _refuse_lost_tokens(plan)
        return wanted, [note] if note else []
    kind, why = hf_kind(plan, args.model, image_options)
    if kind is not None:
        return "hf", []
    if "export_format" in args.given:
        raise ConfigError(f"--export_format hf is not possible: {why}; or give --export_format llava")
    _refuse_lost_tokens(plan)
    line = f"the model will be written in LLaVA's own format, for {why}"
    return "llava", [f"{line}; {note}" if note else line]


def _refuse_lost_tokens(plan: ModelPlan) -> None:
    from llava_ds.export.tokenizer_files import refuse_lost_tokens

    refuse_lost_tokens(plan.tokenizer)
