"""Flags of the model: its folders, its composition, and its trained parts."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llava_ds.config.bounds import Count, NotNegative, Whole
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

# Functions that declare flags of a group; the ones named _free declare flags that a resumed run may change freely.
_model, _model_free = flags_of("model")
_tower, _tower_free = flags_of("tower")
_trainable, _ = flags_of("trainable")
_images, _ = flags_of("images")


@dataclass(frozen=True)
class ModelArguments:
    """Flags of the model and its trained parts. own: sections in Arguments.own of extensions that change the model."""

    model_name_or_path: str | None = _model_free(
        None,
        "Folder of a causal language model, or of a LLaVA to continue from: in LLaVA's format, in transformers' "
        "(Llava, LlavaNext, LlavaOnevision), or an adapter; or of a ready model in transformers' format "
        "(docs/ready.md). The settings in its folder replace the defaults of "
        "flags that are not given. Absent: the tiny model that ships with the package.",
        path="model",
    )
    model_base: str | None = _model_free(
        None,
        "Folder of the model that an adapter in --model_name_or_path belongs to. Absent: the one that its "
        "adapter_config.json names.",
        path="model",
    )
    vision_tower: str | None = _tower_free(
        None,
        "Folder of the vision tower: CLIP, SigLIP, SigLIP 2, DINOv2, DINOv3, AIMv2 or InternViT; or two separated by "
        "a comma, with concatenated features. Not needed for a LLaVA with its own tower: that tower's weights are "
        "used in any case.",
        path="model",
    )
    mm_projector_type: str = _model(
        "mlp2x_gelu",
        "Projector from tower features to the language model's width: linear, mlpNx_gelu, mlpNx_resMx_gelu, "
        "pooler (one feature of each 2 x 2) or identity. The mlps take _psK after their name: a pixel shuffle first "
        "concatenates each K x K patches to one feature (mlp2x_gelu_ps2: a quarter of the tokens), and "
        "_avgK takes their mean.",
    )
    mm_vision_select_layer: Whole = _tower(
        -2, "Hidden state of the tower that is projected; -1 is the last layer's. Later layers are not computed."
    )
    mm_vision_select_feature: Literal["patch", "cls_patch"] = _tower(
        "patch",
        "Project the tower's patches, or its class token, where it has one, and the patches. Registers are never "
        "projected.",
    )
    mm_native_resolution: bool = _tower(
        False,
        "Show a SigLIP 2 of any shape (NaFlex) every image in its own shape, scaled to about as many patches as its "
        "image processor has for one. False: as a square.",
    )
    s2: bool = _tower(False, "Run the tower on every image at several scales, and concatenate their features.")
    s2_scales: str = _tower("336,672,1008", "Scales of --s2 in pixels: multiples of the tower's size, that size first.")
    pretrain_mm_mlp_adapter: str | None = _model_free(
        None, "Projector of stage 1 to start from (mm_projector.bin or .safetensors).", path="file", only_to_train=True
    )
    tune_mm_mlp_adapter: bool = _trainable(False, "Stage 1: train the projector only, and write mm_projector.bin.")
    freeze_mm_mlp_adapter: bool = _trainable(False, "Freeze the projector.")
    freeze_backbone: bool = _trainable(False, "Freeze the language model, but not its output layer (as in LLaVA).")
    unfreeze_mm_vision_tower: bool = _trainable(False, "Also train the vision tower.")
    mm_tunable_parts: str | None = _trainable(
        None,
        "Parts that train, instead of the four flags before: any of mm_vision_tower, mm_mlp_adapter and "
        "mm_language_model, separated by commas (LLaVA-NeXT).",
    )
    tune_mm_vision: bool | None = _trainable(
        None, "Train the tower. With the next two flags (a vendor's names), replaces the flags before."
    )
    tune_mm_mlp: bool | None = _trainable(None, "The projector.")
    tune_mm_llm: bool | None = _trainable(None, "The language model.")
    unfreeze_topk_llm: NotNegative = _trainable(
        0, "Number of last layers to train in a language model that other flags freeze."
    )
    unfreeze_topk_vision: NotNegative = _trainable(
        0, "Likewise for the vision tower, counting only layers that are computed."
    )
    version: str = _model(
        "v1",
        "Conversation template (ready models have their own): plain (stage 1), v1 (Vicuna), llava_v0, llama_2, "
        "mistral_instruct, mpt, chatml (Qwen), llama_3, gemma, phi, or chat_template for the tokenizer's own. LLaVA's "
        "names for them are known too.",
    )
    chat_template_kwargs: str | None = _model(
        None,
        "Variables of a ready model's chat template, or of the tokenizer's with --version chat_template, as a JSON "
        'object like {"enable_thinking": false}. The finished model keeps them in its chat template, so that every '
        "program uses them.",
    )
    mm_use_im_start_end: bool = _model(
        False,
        "Put <im_start> and <im_end> around every image. Adds them to a tokenizer without them, with rows that "
        "start as the mean of the others. With --tune_mm_mlp_adapter the input embeddings also train (as in LLaVA).",
    )
    split_special_tokens: bool = _model(
        False,
        "Tokenize a special token that is spelled out in a record, like </s> or <|im_end|> in a question, as plain "
        "text. False: as the token, as in LLaVA. The templates' own markers are tokens in any case.",
    )
    mm_use_im_patch_token: bool = _model(
        False, "Also add <im_patch> to the tokenizer; it occurs in no text (as in LLaVA)."
    )
    resize_token_embeddings: bool = _model(
        False,
        "Add a row to the input embedding and the output layer for every token of the tokenizer that lacks one, such "
        "as tokens added to its files. New rows start as the mean of the others and train with the language model. "
        "Rows are never removed. Absent: records that spell such a token are rejected.",
    )
    pad_embeddings_to_multiple_of: Count | None = _model(
        None,
        "With --resize_token_embeddings True: round the number of rows up to a multiple of this, such as 64 for GPUs' "
        "matrix products (transformers' pad_to_multiple_of).",
    )
    mm_patch_merge_type: Literal[
        "flat",
        "spatial",
        "spatial_nobase",
        "spatial_unpad",
        "spatial_unpad_nobase",
        "spatial_maxpool2x2",
        "spatial_maxpool2x2_nobase",
        "spatial_unpad_maxpool2x2",
        "spatial_unpad_maxpool2x2_nobase",
    ] = _images(
        "flat",
        "Order of the features of an anyres image. flat: tile by tile; spatial: row by row of the whole image; unpad: "
        "without its padding, and with a learned newline after each row (spatial_unpad is LLaVA-NeXT's); nobase: "
        "without the overview; maxpool2x2: the largest of each 2 x 2 features, padding included.",
    )
    own: Mapping[str, ExtensionFlags] = field(default_factory=dict, init=False, repr=False, compare=False)


# Names in --mm_tunable_parts -> parts of the model.
TUNABLE_PARTS = {
    "mm_vision_tower": "vision_tower",
    "mm_mlp_adapter": "projector",
    "mm_language_model": "language_model",
}


# A vendor's flags -> parts of the model. If one of these flags is given, the parts of omitted ones stay frozen.
TUNING_FLAGS = {"tune_mm_vision": "vision_tower", "tune_mm_mlp": "projector", "tune_mm_llm": "language_model"}


def adapted_parts(model: ModelArguments) -> frozenset[str]:
    """Return the parts in which extensions train adapters: a subset of vision_tower, projector, language_model."""
    return frozenset(part for flags in model.own.values() for part in flags.adapted_parts)


def trained_parts(model: ModelArguments) -> frozenset[str]:
    """Return the parts that train: vision_tower, projector, language_model, output_layer (only the LLM's output layer).

    Of adapted_parts, only the language model is included; the other parts in the result train all their weights. A part
    is also included if only its last layers train (--unfreeze_topk_llm, --unfreeze_topk_vision).
    """
    last = {"language_model": model.unfreeze_topk_llm, "vision_tower": model.unfreeze_topk_vision}
    parts, adapted = chosen_parts(model) | {part for part, count in last.items() if count}, adapted_parts(model)
    if adapted:
        parts -= adapted | {"language_model", "output_layer"}
    return parts | ({"language_model"} & adapted)


def tower_folders(vision_tower: str | None) -> tuple[str, ...]:
    """Return the folders in --vision_tower: one, or several separated by commas."""
    if vision_tower is None:
        return ()
    return (vision_tower,) if os.path.isdir(vision_tower) else tuple(vision_tower.split(","))


def chosen_parts(model: ModelArguments) -> frozenset[str]:
    """Return the parts that LLaVA's and the vendor's flags choose, before adapters and last layers are considered.

    Source: LLaVA's and LLaVA-NeXT's train() (its --freeze_backbone leaves the output layer trainable), and
    qwen-vl-finetune's set_model.
    """
    tuned = {flag: getattr(model, flag) for flag in TUNING_FLAGS}
    if any(value is not None for value in tuned.values()):
        return frozenset(TUNING_FLAGS[flag] for flag, value in tuned.items() if value)
    if model.mm_tunable_parts is not None:
        named = {name.strip() for name in model.mm_tunable_parts.split(",")}
        return frozenset(part for name, part in TUNABLE_PARTS.items() if name in named)
    parts = {"vision_tower"} if model.unfreeze_mm_vision_tower else set()
    if not model.freeze_mm_mlp_adapter:
        parts.add("projector")
    if not model.tune_mm_mlp_adapter:
        # With adapters, --freeze_backbone changes nothing, because the whole language model is frozen anyway.
        parts.add("output_layer" if model.freeze_backbone and not adapted_parts(model) else "language_model")
    return frozenset(parts)


def trains_projector_only(model: ModelArguments) -> bool:
    """True if only the projector trains (stage 1), so the run exports only the projector."""
    return trained_parts(model) == {"projector"} and not adapted_parts(model)


def trains_new_rows(model: ModelArguments) -> bool:
    """True if stage 1 also trains the input embeddings, because it adds tokens around images.

    Source: LLaVA's initialize_vision_tokenizer.
    """
    return model.tune_mm_mlp_adapter and model.mm_use_im_start_end
