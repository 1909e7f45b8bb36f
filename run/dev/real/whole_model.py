# S squares of patches per image, C tower width, D language-model width
"""Compose a vision-language model in transformers' InternVL format from a DINOv2, a projector and a Llama."""

import json
import math
from pathlib import Path

import torch
from real.onnx_tower import PROCESSOR
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Dinov2Model,
    InternVLConfig,
    InternVLForConditionalGeneration,
)

SQUARE = 4  # patches along a side that become one token
TOKENS = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
# An answer's first word has the tokens that it has in the question: with a space before it. 109 of 185 nouns are one
# token with a space, and 46 without.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
)
# DINOv2's names and InternVL's, of a layer's parts.
_PARTS = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "attention.o_proj": "attention.projection_layer",
    **{name: name for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1", "mlp.fc2")},
}  # fmt: skip


def compose(tower: Path, language_model: Path, side: int, folder: Path) -> None:
    """Write the model. Its images are squares of side pixels. The tower's last layer is left out, as in LLaVA.

    The projector is random until set_projector.
    """
    vision = Dinov2Model.from_pretrained(tower).eval()
    language = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(language_model, extra_special_tokens=TOKENS)
    tokenizer.chat_template = TEMPLATE
    language.resize_token_embeddings(len(tokenizer))  # the new rows are drawn around the others' mean
    own, patches = vision.config, side // vision.config.patch_size
    config = InternVLConfig(
        text_config=language.config.to_dict(),
        vision_config={
            "hidden_size": own.hidden_size, "num_hidden_layers": own.num_hidden_layers - 1,
            "num_attention_heads": own.num_attention_heads, "intermediate_size": own.hidden_size * own.mlp_ratio,
            "attention_bias": True, "layer_norm_eps": own.layer_norm_eps, "patch_size": own.patch_size,
            "image_size": [side, side], "use_mean_pooling": True,  # without a norm after the last layer
        },
        image_token_id=tokenizer.convert_tokens_to_ids(TOKENS["context_image_token"]),
        image_seq_length=(patches // SQUARE) ** 2,
        downsample_ratio=1 / SQUARE,
    )  # fmt: skip
    model = InternVLForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(_tower_weights(vision, side))
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = {
        **PROCESSOR, "image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "min_patches": 1,
        "max_patches": 1, "size": {"height": side, "width": side},
    }  # fmt: skip
    whole = {
        "processor_class": "InternVLProcessor",
        "image_processor": images,
        "image_seq_length": config.image_seq_length,
    }
    videos = {"video_processor_type": "InternVLVideoProcessor", "size": images["size"]}
    for name, content in (("preprocessor", images), ("processor", whole), ("video_preprocessor", videos)):
        (folder / f"{name}_config.json").write_text(json.dumps(content, indent=1))


def _tower_weights(vision: Dinov2Model, side: int) -> dict[str, torch.Tensor]:
    """Return a DINOv2's weights by InternVL's names, with positions for images of side pixels."""
    embeddings = vision.embeddings
    pixels = torch.zeros(1, 1 + (side // vision.config.patch_size) ** 2, vision.config.hidden_size)
    found = {
        "embeddings.cls_token": embeddings.cls_token,
        "embeddings.position_embeddings": embeddings.interpolate_pos_encoding(pixels, side, side),
        "embeddings.patch_embeddings.projection.weight": embeddings.patch_embeddings.projection.weight,
        "embeddings.patch_embeddings.projection.bias": embeddings.patch_embeddings.projection.bias,
    }
    for i, layer in enumerate(vision.encoder.layer[:-1]):
        for name, other in _PARTS.items():
            part = layer.get_submodule(name)
            found |= {f"encoder.layer.{i}.{other}.{kind}": getattr(part, kind) for kind in ("weight", "bias")}
        for number in (1, 2):
            found[f"encoder.layer.{i}.lambda_{number}"] = getattr(layer, f"layer_scale{number}").lambda1
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def set_projector(model: InternVLForConditionalGeneration, inner: nn.Linear, outer: nn.Linear) -> None:
    """Make the projector outer(inner(x)) of the mean x of a square's normalized patches.

    inner has C inputs and D / 2 outputs, outer D / 2 inputs and D outputs. Each inner output h takes two hidden units,
    for h = GELU(h) - GELU(-h).
    """
    connector: nn.Module = model.model.multi_modal_projector
    both = torch.cat([inner.weight, -inner.weight])
    with torch.no_grad():
        connector.layer_norm.reset_parameters()
        connector.linear_1.weight.copy_(both.repeat(1, SQUARE**2) / SQUARE**2)
        connector.linear_1.bias.copy_(torch.cat([inner.bias, -inner.bias]))
        connector.linear_2.weight.copy_(torch.cat([outer.weight, -outer.weight], 1))
        connector.linear_2.bias.copy_(outer.bias)


@torch.no_grad()
def squares(model: InternVLForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Return the mean of each square's patches, normalized as the projector does: (images, S, C)."""
    inner = model.model
    states = inner.vision_tower(pixel_values=pixels).last_hidden_state[:, 1:]
    side = math.isqrt(states.shape[1])
    grid = inner.pixel_shuffle(states.unflatten(1, (side, side)), scale_factor=model.config.downsample_ratio)
    normed = nn.functional.layer_norm(
        grid.flatten(1, 2), grid.shape[-1:], eps=inner.multi_modal_projector.layer_norm.eps
    )
    return normed.unflatten(-1, (SQUARE**2, -1)).mean(-2)
