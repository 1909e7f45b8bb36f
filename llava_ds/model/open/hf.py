# T tokens of all samples laid end to end, N image tiles, S side of the tower's square, D language-model width
"""LLaVA models in transformers' classes: the class for a folder, and the merge of image features as in training."""

import inspect
from functools import partial

import torch
from transformers import (
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from llava_ds.batch import Batch, Inputs
from llava_ds.extensions.active import architecture_of
from llava_ds.model.llava import merge_features
from llava_ds.model.projector import with_newlines
from llava_ds.model.vision import VisionTower

HFModel = LlavaForConditionalGeneration | LlavaNextForConditionalGeneration | LlavaOnevisionForConditionalGeneration

HF_CLASSES = {  # keys: model_type
    "llava": LlavaForConditionalGeneration,
    "llava_next": LlavaNextForConditionalGeneration,
    "llava_onevision": LlavaOnevisionForConditionalGeneration,
}


def hf_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' class for a LLaVA or for an extension's architecture; None for any other model."""
    if (architecture := architecture_of(config)) is not None:
        return architecture.outer_class()
    return HF_CLASSES.get(config.model_type)


# Largest difference of logits, relative to the largest magnitude, between two models that count as equal. They differ
# because they sum in different orders.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def attention_options(config: PreTrainedConfig) -> dict[str, object]:
    """Return from_pretrained's arguments for a LLaVA's attention, from its configuration.

    For models with soft caps, transformers 5.17 uses SDPA by default and ignores the caps; 5.23 does not.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return {"attn_implementation": {"text_config": "eager"}} if capped else {}


def let_generate_take_embeddings(model: HFModel) -> None:
    """Let generate() accept inputs_embeds: transformers 5.23 looks for this name in the signature of
    prepare_inputs_for_generation, but some models accept it in **kwargs."""
    own = model.prepare_inputs_for_generation
    if "inputs_embeds" in inspect.signature(own).parameters:
        return

    def prepare_inputs_for_generation(input_ids, inputs_embeds=None, **kwargs):
        return own(input_ids, inputs_embeds=inputs_embeds, **kwargs)

    model.prepare_inputs_for_generation = prepare_inputs_for_generation


def embed_batch(model: HFModel, batch: Batch, pixels: torch.Tensor) -> torch.Tensor:
    """Merge a batch's token embeddings and features as in training: (1, T, D). pixels (N, 3, S, S), normalised.

    transformers' own merge is different: it cuts every image of a LlavaNext into tiles, even in samples with several
    images, and does not support video frames.
    """
    embeds, inner = model.get_input_embeddings()(batch.input_ids), model.model
    hidden = _tower_features(model, pixels, batch.tower)
    newline = partial(with_newlines, inner.image_newline) if hasattr(inner, "image_newline") else None
    return merge_features(embeds, inner.multi_modal_projector(hidden), batch.placing, newline)[0]


def _tower_features(model: HFModel, pixels: torch.Tensor, tower_inputs: Inputs) -> torch.Tensor:
    """Compute the projector's input from normalised images (N, 3, S, S)."""
    tower = model.model.vision_tower
    if isinstance(tower, VisionTower):
        return tower.features(pixels, tower_inputs)
    hidden = tower(pixels, output_hidden_states=True).hidden_states[model.config.vision_feature_layer]
    without_class_token = model.config.vision_feature_select_strategy == "default"
    return hidden[:, 1:] if without_class_token else hidden
