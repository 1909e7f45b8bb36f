"""Model and data for both sides of a comparison: a shape, random weights, and samples of LLaVA's lengths, scaled."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmark.length_mix import IMAGE_TOKENS, LengthMix
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration

WORDS = [f"{a}{b}" for a in "bdfglmnp" for b in "aeiou"]  # of one token each
DIFFERENT_IMAGES = 256  # they cost the same to read again
MARKS = 11  # tokens of the template around a question: <s>, [INST], [/INST] and a line's end
IMAGE_TOKEN_INDEX = 3  # in transformers' folder: the id of a byte that no text has


@dataclass(frozen=True)
class Shape:
    """A LLaVA: a Llama over a CLIP tower. patches: along a side of the image."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    tower_hidden: int
    tower_layers: int
    tower_heads: int
    patches: int
    patch_size: int

    @property
    def features(self) -> int:
        """Image tokens of an image."""
        return self.patches**2

    @property
    def image_size(self) -> int:
        """Pixels of a side."""
        return self.patches * self.patch_size

    @property
    def scale(self) -> float:
        """By how much samples are shorter than LLaVA-1.5's, whose images have IMAGE_TOKENS."""
        return self.features / IMAGE_TOKENS

    def output_share(self, padded_length: float) -> float:
        """The output layer's part of the FLOPs, where every token of batches of that length gets logits."""
        layers = self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate)
        attention = self.layers * 2 * self.hidden * padded_length  # of a token with all others, forward, halved
        output = self.vocab * self.hidden
        return output / (layers + attention + output)

    def config(self, **more: object) -> LlavaConfig:
        """transformers' configuration of it, LLaVA-1.5's in all but the sizes."""
        return LlavaConfig(
            text_config={
                "model_type": "llama",
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.heads,
                "vocab_size": self.vocab,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "use_cache": False,
            },
            vision_config={
                "model_type": "clip_vision_model",
                "hidden_size": self.tower_hidden,
                "intermediate_size": 4 * self.tower_hidden,
                "num_hidden_layers": self.tower_layers,
                "num_attention_heads": self.tower_heads,
                "image_size": self.image_size,
                "patch_size": self.patch_size,
            },
            image_token_index=IMAGE_TOKEN_INDEX,
            projector_hidden_act="gelu",
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            tie_word_embeddings=False,
            **more,
        )


def tokenizer_texts() -> list[str]:
    """Texts to train a tokenizer on, so that every word and mark of the template becomes few tokens."""
    return [f"[INST] {a} {b} [/INST] {b}" for a in WORDS for b in WORDS]


def write_model(folder: Path, shape: Shape, seed: int = 0) -> None:
    """A folder in transformers' format with random weights, for both sides; the tokenizer's files are the caller's."""
    torch.manual_seed(seed)
    LlavaForConditionalGeneration(shape.config()).save_pretrained(folder)
    write_processor(folder, shape)


def write_hollow_model(folder: Path, shape: Shape) -> None:
    """The same folder in bfloat16, all zeros, which take no room on the disk: the weights are drawn on the device."""
    shape.config(dtype="bfloat16").save_pretrained(folder)
    with torch.device("meta"):
        tensors = LlavaForConditionalGeneration(shape.config()).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + end)
    write_processor(folder, shape)


def write_processor(folder: Path, shape: Shape) -> None:
    """Write CLIP's settings of the image processor."""
    size = shape.image_size
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(
        folder
    )


def write_samples(folder: Path, shape: Shape, mix: LengthMix, *, captions: bool, seed: int = 0) -> None:
    """data.json and images/: records of about the given lengths, scaled like the features of an image.

    captions: for the plain template, the caption alone; else questions and answers for mistral_instruct, which has no
    system message: at these lengths it would be half of a sample.
    """
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for index in range(min(DIFFERENT_IMAGES, len(mix.tokens))):
        pixels = rng.integers(0, 256, (shape.image_size, shape.image_size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png", compress_level=0)
    records = records_of(mix, shape.scale, None if captions else MARKS, seed)
    (folder / "data.json").write_text(json.dumps(records), encoding="utf-8")


def records_of(mix: LengthMix, scale: float, marks: int | None, seed: int) -> list[dict[str, object]]:
    """Records of the mix's lengths, scaled. marks: tokens of the template around a question; None for captions."""
    records, words = [], random.Random(seed)
    text = mix.tokens - mix.images * IMAGE_TOKENS
    for index, (written, targets, has_image) in enumerate(zip(text, mix.targets, mix.images)):
        answer = max(1, round(targets * scale) - 1)  # the end marker is one
        human = "" if marks is None else _words(words, max(1, round((written - targets) * scale) - marks))
        record: dict[str, object] = {"id": f"s{index}"}
        if has_image:
            human = f"<image>\n{human}"
            record["image"] = f"{index % DIFFERENT_IMAGES}.png"
        record["conversations"] = [
            {"from": "human", "value": human},
            {"from": "gpt", "value": _words(words, answer)},
        ]
        records.append(record)
    return records


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
