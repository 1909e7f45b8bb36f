"""Ready models for both sides of a comparison: shapes at toy width, random weights, and samples of LLaVA's lengths.

As in workload.py, samples are a ninth of what they are at full size: an image has a ninth of its features, which are a
third of the image's sides, and texts are scaled alike.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmark.length_mix import LengthMix
from benchmark.workload import DIFFERENT_IMAGES, records_of, tokenizer_texts
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

SHRINK = 3  # of the sides of images
MARKS = 9  # tokens of the template around a question
# Sizes of photographs as in COCO, Visual Genome, OCR-VQA's covers and TextCaps, and their parts in LLaVA-1.5's mix.
PHOTOGRAPHS = {(640, 480): 0.45, (480, 640): 0.2, (500, 375): 0.15, (350, 500): 0.1, (1024, 768): 0.1}
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ReadyShape:
    """A ready model. family: of llava_ds/model/families; tower_mlp: width of the tower's MLPs."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocab: int
    tower_hidden: int
    tower_mlp: int
    tower_layers: int
    tower_heads: int

    @property
    def scale(self) -> float:
        """By how much samples are shorter."""
        return 1 / SHRINK**2

    def output_share(self, padded_length: float) -> float:
        """The output layer's part of the language model's FLOPs, where every token gets logits."""
        queries = self.hidden * (2 * self.hidden + 2 * self.hidden * self.key_heads // self.heads)
        attention = 2 * self.hidden * padded_length  # of a token with all others, forward, halved
        layers = self.layers * (queries + 3 * self.hidden * self.intermediate + attention)
        output = self.vocab * self.hidden
        return output / (layers + output)


def write_model(folder: Path, shape: ReadyShape, seed: int = 0) -> None:
    """A folder as published: configuration, random weights, tokenizer, and the processor's files."""
    tokens, placeholder, processor, write_config = FAMILIES[shape.family]
    tokenizer = _tokenizer(tokens, min(shape.vocab, 512))
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(write_config(shape, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor().save_pretrained(folder)


def write_samples(folder: Path, shape: ReadyShape, mix: LengthMix, seed: int = 0) -> None:
    """data.json and images/: records of about the given lengths, scaled like images."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for index in range(min(DIFFERENT_IMAGES, len(mix.tokens))):
        width, height = list(PHOTOGRAPHS)[rng.choice(len(PHOTOGRAPHS), p=list(PHOTOGRAPHS.values()))]
        pixels = rng.integers(0, 256, (height // SHRINK, width // SHRINK, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png", compress_level=0)
    records = records_of(mix, shape.scale, MARKS, seed)
    (folder / "data.json").write_text(json.dumps(records), encoding="utf-8")


def _tokenizer(tokens: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*ENDS, *tokens], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(tokenizer_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=ENDS[0], eos_token=ENDS[2], extra_special_tokens=[ENDS[1], *tokens]
    )


def _text(shape: ReadyShape, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    return {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.key_heads, "vocab_size": shape.vocab,
        "max_position_embeddings": 4096, "bos_token_id": None, **ids,
    }  # fmt: skip


def _qwen2_5_vl(shape: ReadyShape, tokenizer: PreTrainedTokenizerFast) -> AutoConfig:
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{end}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>") for end in ("start", "end")}
    width = shape.hidden // shape.heads
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [width // 8, width * 3 // 16, width * 3 // 16]}
    every = shape.tower_layers // 4 or 1  # as published, every eighth of 32 sees the whole image
    vision = {
        "depth": shape.tower_layers, "hidden_size": shape.tower_hidden, "intermediate_size": shape.tower_mlp,
        "num_heads": shape.tower_heads, "patch_size": 14, "out_hidden_size": shape.hidden, "window_size": 56,
        "fullatt_block_indexes": list(range(every - 1, shape.tower_layers, every)),
    }  # fmt: skip
    text = {**_text(shape, tokenizer), "rope_parameters": rope}
    return AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=vision, **ids, tie_word_embeddings=False
    )  # fmt: skip


def _smolvlm(shape: ReadyShape, tokenizer: PreTrainedTokenizerFast) -> AutoConfig:
    vision = {
        "hidden_size": shape.tower_hidden, "intermediate_size": shape.tower_mlp, "image_size": 72, "patch_size": 8,
        "num_hidden_layers": shape.tower_layers, "num_attention_heads": shape.tower_heads,
    }  # fmt: skip
    return AutoConfig.for_model(
        "smolvlm",
        text_config={"model_type": "llama", **_text(shape, tokenizer)},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=3,  # 9 features of a tile, where SmolVLM2-2.2B has 81
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


# Of a family: its special tokens, what its template writes for an image, its image processor, its configuration.
FAMILIES = {
    "qwen2_5_vl": (
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        "<|vision_start|><|image_pad|><|vision_end|>",
        lambda: Qwen2VLImageProcessorPil(
            size={"shortest_edge": 4 * 28**2, "longest_edge": 1280 * 28**2 // SHRINK**2},
            patch_size=14, merge_size=2, temporal_patch_size=2,
        ),
        _qwen2_5_vl,
    ),
    "smolvlm": (
        ["<fake_token_around_image>", "<image>", "<global-img>",
         *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))],
        "<image>",
        lambda: SmolVLMImageProcessorPil(size={"longest_edge": 4 * 72}, max_image_size={"longest_edge": 72}),
        _smolvlm,
    ),
}  # fmt: skip
