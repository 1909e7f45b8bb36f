"""All of a finished model but its weights, and which folder it can become."""

from dataclasses import dataclass
from functools import cached_property

import torch

from llava_ds.config.arguments import Arguments, ModelArguments, trains_projector_only
from llava_ds.constants import ConfigError
from llava_ds.export.tensors import Names
from llava_ds.geometry import ImageOptions
from llava_ds.model.plan import ModelPlan


@dataclass(frozen=True)
class Finished:
    """A model that is done training, or comes from a folder.

    args and pictures: how it was built and shown pictures; dtype: of the weights to be written; max_length: longest
    sample in tokens; rows: of the embeddings before an export added tokens to them, None for as many as there are;
    tower_name: what LLaVA's format calls the tower; template: the processor's chat template, None for that of
    --version.
    """

    plan: ModelPlan
    args: ModelArguments
    image_options: ImageOptions
    dtype: torch.dtype
    max_length: int
    rows: int | None = None
    tower_name: str | None = None
    template: str | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the embeddings as the model has them now."""
        return self.plan.text_config.vocab_size

    @cached_property
    def names(self) -> Names:
        """What the language model's kind says of its parameters."""
        return Names.of(self.plan.text_config)


def hf_kind(plan: ModelPlan, args: ModelArguments, image_options: ImageOptions) -> tuple[str | None, str]:
    """The model_type of transformers' class for such a model, and ""; or None, and why there is no class."""
    kind, why = hf_container(plan, args, image_options)
    if kind is None:
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


def hf_container(plan: ModelPlan, args: ModelArguments, image_options: ImageOptions) -> tuple[str | None, str]:
    """The model_type of transformers' class that has such a model's weights, whatever its own code does with pictures,
    and ""; or None, and why there is no class."""
    if args.mm_projector_type != "mlp2x_gelu":
        return None, f"transformers has no class with --mm_projector_type {args.mm_projector_type}: give mlp2x_gelu"
    if args.s2:
        return None, "transformers has no class with --s2 True: leave it out"
    if plan.tower.config.model_type == "siglip2_vision_model":
        return None, "transformers' classes don't cut pictures for a SigLIP 2 of any shape: take another --vision_tower"
    if not image_options.has_newline:
        return "llava", ""
    return "llava_next" if image_options.max_tiles is None else "llava_onevision", ""


def export_format(args: Arguments, plan: ModelPlan, image_options: ImageOptions) -> tuple[str, list[str]]:
    """What a run's model will be written as, "hf" or "llava", and a line where that is not what was to be expected.

    To be asked before training. Raises ConfigError where --export_format can't be had.
    """
    wanted = args.training.export_format
    if wanted == "llava" or trains_projector_only(args.model):
        return wanted, []
    kind, why = hf_kind(plan, args.model, image_options)
    if kind is not None:
        return "hf", []
    if "export_format" in args.given:
        raise ConfigError(f"--export_format hf is not possible: {why}; or give --export_format llava")
    return "llava", [f"the model will be written in LLaVA's own format, for {why}"]
