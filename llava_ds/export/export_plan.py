"""The plan of an export: the format of its folder, and everything about the model except its weights."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llava_ds.config.arguments import Arguments, ModelArguments, adapted_parts, trains_projector_only
from llava_ds.config.bounds import DEFAULT_SHARD_SIZE, parse_size
from llava_ds.constants import ConfigError
from llava_ds.extensions.active import active, text_part, values_of
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

    args: flags that the model was built with. dtype: dtype of the written weights. max_length: longest sample in
    tokens. max_shard_bytes: maximum size of a weight file. rows: number of embedding rows before an earlier export
    added tokens, None if it added none. tower_name: name of the tower in LLaVA's config.json. template: chat template
    of the processor, None for --version's. matrix_type: type of matrices, in formats with types of their own.
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
        """Number of rows of the model's embeddings."""
        return self.model.text_config.vocab_size

    @property
    def uses_own_template(self) -> bool:
        """True if conversations use the tokenizer's chat template, False for one of LLaVA's templates."""
        return self.model.architecture is not None or self.args.version == "chat_template"

    @property
    def is_whole_model(self) -> bool:
        """True for "hf" and "llava", False for an adapter, a projector, or an extension's format."""
        return self.form in ("hf", "llava")

    @property
    def source_folder(self) -> Path:
        """For a model with an architecture: the folder of the original model, or of the adapter's base model."""
        return Path(self.model.sources.vision_tower.path)

    @cached_property
    def adapter(self) -> "Adapter | None":
        """The object that writes the adapter; None for a model without adapters."""
        return active(self.args.own).adapter

    @cached_property
    def names(self) -> "Names":
        """Names and ties of the language model's parameters, as in transformers."""
        from llava_ds.export.tensors import Names  # imports everything that reads weights

        return Names.of(self.model.text_config)


def hf_kind(plan: ModelPlan, args: ModelArguments, image_options: ImageOptions) -> tuple[str | None, str]:
    """Return (model_type, "") of the transformers class that fits a model, or (None, reason) if none fits."""
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
    """Return the model_type of the transformers class that can hold the model's language model and newline.

    The class may process images differently.
    """
    if plan.architecture is not None:
        return plan.architecture.config.model_type
    if not image_options.has_newline:
        return "llava"
    return "llava_next" if image_options.max_tiles is None else "llava_onevision"


def own_vision(plan: ModelPlan, args: ModelArguments, image_options: ImageOptions) -> str:
    """Return the reason why no class in transformers has this tower and projector; "" if one has."""
    if args.mm_projector_type != "mlp2x_gelu":
        is_own = args.mm_projector_type.partition(":")[0] in values_of("mm_projector_type")
        instead = "whoever opens the model needs its plugin's file" if is_own else "give mlp2x_gelu"
        return f"transformers has no class with --mm_projector_type {args.mm_projector_type}: {instead}"
    if args.s2:
        return "transformers has no class with --s2 True: leave it out"
    if plan.tower.config.model_type == "siglip2_vision_model":
        return "transformers' classes don't cut images for a SigLIP 2 of any shape: take another --vision_tower"
    kind, tower = plan.tower.config.model_type, plan.tower
    if tower.second is not None:
        return "transformers' classes have one tower: give one --vision_tower"
    if tower.num_first_tokens > 1:
        return f"transformers' classes would treat the registers of a {kind} as patches: take another --vision_tower"
    if image_options.has_newline and plan.images.size != tower.config.image_size:
        return (
            f"transformers' LlavaNext expects images for a {kind} to have the size in its config.json, not "
            f"{plan.images.size} pixels: give --mm_patch_merge_type flat, or take another --vision_tower"
        )
    return ""


def not_llavas(plan: ModelPlan, args: ModelArguments) -> str:
    """Return a line about what LLaVA's own code lacks to open the model in LLaVA's format; "" if nothing."""
    kind, lacks = plan.tower.config.model_type, ""
    if square_stride(args.mm_projector_type) > 1:
        lacks = f"--mm_projector_type {args.mm_projector_type}"
    elif plan.tower.second is not None:
        lacks = "place for a second tower"
    elif not TOWERS[kind].llavas:
        lacks = f"class for a {kind}"
    return lacks and f"LLaVA's own code has no {lacks}: only llava_ds opens the model"


def export_format(args: Arguments, plan: ModelPlan, image_options: ImageOptions) -> tuple[str, list[str]]:
    """Choose the format of a run's export before training. Returns it, and lines to print about an unexpected choice.

    Raises ConfigError if --export_format is not possible, or if LLaVA's format would lose tokens.
    """
    if trains_projector_only(args.model) and plan.architecture is None:
        return "projector", []
    if adapted_parts(args.model):
        return "adapter", []
    wanted = args.training.export_format
    if wanted == "llava" and plan.architecture is not None:
        kind = plan.architecture.config.model_type
        raise ConfigError(
            f"--export_format llava can't represent a {kind}: leave the flag out, to export in transformers' own format"
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
    line = f"the model will be written in LLaVA's own format, because {why}"
    return "llava", [f"{line}; {note}" if note else line]


def _refuse_lost_tokens(plan: ModelPlan) -> None:
    from llava_ds.export.tokenizer_files import refuse_lost_tokens

    refuse_lost_tokens(plan.tokenizer)
