# N tiles of S x S pixels, B prompts, T tokens, D width of the language model
"""Convert this project's batches to arguments of transformers' class of a ready model."""

import itertools

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from llava_ds.batch import Batch
from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample, padded_left
from llava_ds.export.layer_by_layer import NotCompared
from llava_ds.extensions.ready.family import ReadyFamily, media_ids
from llava_ds.layouts import MediaLayout
from llava_ds.model.families.language import has_layer_embeddings
from llava_ds.model.llava import merge_features


def embed(family: ReadyFamily, model: PreTrainedModel, batch: Batch, pixels: torch.Tensor) -> torch.Tensor:
    """Return a batch's embeddings (1, T, D), merged as in training. pixels (N, 3, S, S), normalised."""
    embeds = model.get_input_embeddings()(batch.input_ids)
    features = family.features(model.get_submodule(family.vision), pixels, batch.tower)
    connected = family.connect(model.get_submodule(*family.connector), model.config, features)
    return merge_features(embeds, connected, batch.placing, None)[0]


def first_inputs(
    family: ReadyFamily,
    model: PreTrainedModel,
    batch: Batch,
    layouts: list[MediaLayout],
    pixels: torch.Tensor,
    num_positions: int,
) -> dict[str, torch.Tensor]:
    """Return the arguments for a sample's first positions; transformers merges the images itself if it can."""
    ids = batch.input_ids.clone()
    ids[0, batch.placing.positions] = model.config.image_token_id
    if layouts and layouts[0].cells is not None:
        return _first_whole_images(family, model, batch, layouts, pixels, num_positions)
    if not layouts:
        return {"input_ids": ids[:, :num_positions]}
    is_image = torch.zeros_like(ids, dtype=torch.bool).index_fill(1, batch.placing.positions, True)
    if num_positions == ids.shape[1] and len(batch.placing.positions) == sum(one.num_tokens for one in layouts):
        return {"input_ids": ids, **family.outer_inputs(model.config, pixels, (), is_image)}
    inputs = {"inputs_embeds": embed(family, model, batch, pixels)}  # the last image may be truncated
    if family.has_image_blocks(model.config):  # transformers builds the mask of image tokens from this
        text = (~is_image[0, num_positions:]).nonzero()[:1, 0].tolist()
        num_positions = num_positions + text[0] if text else ids.shape[1]
        inputs["token_type_ids"] = is_image.long()
    return {name: tensor[:, :num_positions] for name, tensor in inputs.items()}


def _first_whole_images(
    family: ReadyFamily,
    model: PreTrainedModel,
    batch: Batch,
    layouts: list[MediaLayout],
    pixels: torch.Tensor,
    num_positions: int,
) -> dict[str, torch.Tensor]:
    """Return the arguments for a sample with images of any shape. An image at the last position is included whole."""
    places = batch.placing.positions.tolist()
    ends = list(itertools.accumulate(layout.num_tokens for layout in layouts))
    starts = [0, *ends[:-1]]
    num_images = sum(start < len(places) and places[start] < num_positions for start in starts)
    num_features = ends[num_images - 1] if num_images else 0
    if num_features > len(places):
        raise NotCompared("its last image is cut by --model_max_length, and transformers can't compute that")
    length = max(num_positions, places[num_features - 1] + 1 if num_images else 0)
    ids = batch.input_ids[:, :length].clone()
    if not num_images:
        return {"input_ids": ids}
    shown, of_media = layouts[:num_images], batch.placing.positions[:num_features]
    ids[0, of_media] = media_ids(model.config, shown).to(ids.device)
    is_media = torch.zeros_like(ids, dtype=torch.bool).index_fill(1, of_media, True)
    patches = family.processed(model.config, pixels[:num_features], shown)
    return {"input_ids": ids, **family.outer_inputs(model.config, patches, shown, is_media)}


def prompt_inputs(
    family: ReadyFamily, model: PreTrainedModel, samples: list[LoadedSample], batch: Batch, pixels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the arguments of generate() for prompts, padded on the left. pixels: in fp32."""
    layouts = [layout for sample in samples for _, layout in sample.media]
    if batch.tower:
        return _prompts_of_whole_images(family, model, samples, batch, pixels, layouts)
    embeds = embed(family, model, batch, pixels.to(model.dtype))  # (1, tokens of all prompts, D)
    rows, mask = padded_left(embeds[0], samples)
    inputs = {"inputs_embeds": rows, "attention_mask": mask}
    if family.has_image_blocks(model.config):
        is_image = torch.cat([one.input_ids == IMAGE_TOKEN_INDEX for one in samples]).to(embeds.device)
        inputs["token_type_ids"] = padded_left(is_image, samples)[0].long()
    return inputs


def _prompts_of_whole_images(
    family: ReadyFamily,
    model: PreTrainedModel,
    samples: list[LoadedSample],
    batch: Batch,
    pixels: torch.Tensor,
    layouts: list[MediaLayout],
) -> dict[str, torch.Tensor]:
    """Return the arguments for prompts with images of any shape.

    They contain ids and pixels as in training. With three axes, they also contain positions (4, B, T), text positions
    first. transformers merges the features itself, because its layers may need them again.
    """
    config, device = model.config, batch.input_ids.device
    ids = batch.input_ids[0].index_copy(0, batch.placing.positions, media_ids(config, layouts).to(device))
    ids, mask = padded_left(ids, samples)  # (B, T)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    if batch.position_ids.ndim == 3:
        lengths = [len(sample.input_ids) for sample in samples]
        axes = [pad(part, (max(lengths) - part.shape[-1], 0)) for part in batch.position_ids[:, 0].split(lengths, 1)]
        inputs["position_ids"] = torch.cat([(mask.cumsum(1) - 1).clamp(min=0)[None], torch.stack(axes, 1)])
    is_media = torch.isin(ids, media_ids(config, layouts).to(device)) & (mask == 1)
    if has_layer_embeddings(config.text_config):
        text = ids.masked_fill(is_media, config.text_config.pad_token_id)
        inputs["per_layer_inputs"] = model.model.language_model.get_per_layer_inputs(text)
    if not layouts:
        return inputs
    pixels = pixels.to(model.dtype) if family.casts_pixels else pixels
    return {**inputs, **family.outer_inputs(config, family.processed(config, pixels, layouts), layouts, is_media)}
