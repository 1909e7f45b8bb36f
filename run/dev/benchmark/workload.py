"""Write models and data for a comparison: a shape, random weights, and samples with LLaVA's lengths, scaled."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmark.length_mix import IMAGE_TOKENS, LengthMix
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

WORDS = [f"{a}{b}" for a in "bdfglmnp" for b in "aeiou"]  # one token each
DIFFERENT_IMAGES = 256  # number of images; records share them, because reading one again costs the same
MARKS = 11  # template tokens around a question: <s>, [INST], [/INST] and a line end
IMAGE_TOKEN_INDEX = 3  # in transformers' folder: the id of a byte that is in no text

# A ready model's samples are a ninth of full size: an image has a ninth of its features, because its sides are a third,
# and texts are scaled equally.
SHRINK = 3  # divisor of image sides
READY_MARKS = 9
# Photograph sizes as in COCO, Visual Genome, OCR-VQA's covers and TextCaps, with their shares in LLaVA-1.5's mix.
PHOTOGRAPHS = {(640, 480): 0.45, (480, 640): 0.2, (500, 375): 0.15, (350, 500): 0.1, (1024, 768): 0.1}
ENDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A LLaVA (a Llama with a CLIP tower) or a ready model.

    family: name in llava_ds/model/families. tower_mlp: width of the tower's MLPs, 0 for four times its width.
    key_heads: number of key heads, 0 for the number of heads. patches: patches along an image side, for a LLaVA.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    tower_hidden: int
    tower_layers: int
    tower_heads: int
    patches: int = 0
    patch_size: int = 0
    family: str = "llava"
    key_heads: int = 0
    tower_mlp: int = 0

    @property
    def is_ready(self) -> bool:
        """True for a ready model."""
        return self.family != "llava"

    @property
    def features(self) -> int:
        """Image tokens per image of a LLaVA."""
        return self.patches**2

    @property
    def image_size(self) -> int:
        """Image side of a LLaVA in pixels."""
        return self.patches * self.patch_size

    @property
    def scale(self) -> float:
        """Length of samples relative to LLaVA-1.5's, with its IMAGE_TOKENS per image."""
        return 1 / SHRINK**2 if self.is_ready else self.features / IMAGE_TOKENS

    def output_share(self, padded_length: float) -> float:
        """Return the output layer's share of the FLOPs if every token of batches of that length gets logits."""
        projections = 2 * self.hidden**2 * (1 + (self.key_heads or self.heads) / self.heads)
        attention = 2 * self.hidden * padded_length  # a token with all others, forward, halved
        layers = self.layers * (projections + 3 * self.hidden * self.intermediate + attention)
        output = self.vocab * self.hidden
        return output / (layers + output)

    def text(self, **more: object) -> dict[str, object]:
        """Return the language model's configuration."""
        return {
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_heads or self.heads,
            "vocab_size": self.vocab, "max_position_embeddings": 4096, **more,
        }  # fmt: skip

    def config(self, **more: object) -> LlavaConfig:
        """Return transformers' configuration of a LLaVA, LLaVA-1.5's except for the sizes."""
        text = {"model_type": "llama", "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
        return LlavaConfig(
            text_config=self.text(**text),
            vision_config={
                "model_type": "clip_vision_model", "hidden_size": self.tower_hidden,
                "intermediate_size": 4 * self.tower_hidden, "num_hidden_layers": self.tower_layers,
                "num_attention_heads": self.tower_heads, "image_size": self.image_size, "patch_size": self.patch_size,
            },
            image_token_index=IMAGE_TOKEN_INDEX,
            projector_hidden_act="gelu",
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            tie_word_embeddings=False,
            **more,
        )  # fmt: skip


def _qwen2_5_vl(shape: Shape, tokenizer: PreTrainedTokenizerFast, text: dict[str, object]) -> AutoConfig:
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{end}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>") for end in ("start", "end")}
    width = shape.hidden // shape.heads
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [width // 8, width * 3 // 16, width * 3 // 16]}
    every = shape.tower_layers // 4 or 1  # in the published model, every eighth of 32 layers sees the whole image
    vision = {
        "depth": shape.tower_layers, "hidden_size": shape.tower_hidden, "intermediate_size": shape.tower_mlp,
        "num_heads": shape.tower_heads, "patch_size": 14, "out_hidden_size": shape.hidden, "window_size": 56,
        "fullatt_block_indexes": list(range(every - 1, shape.tower_layers, every)),
    }  # fmt: skip
    texts = {**text, "rope_parameters": rope}
    return AutoConfig.for_model("qwen2_5_vl", text_config=texts, vision_config=vision, **ids, tie_word_embeddings=False)


def _smolvlm(shape: Shape, tokenizer: PreTrainedTokenizerFast, text: dict[str, object]) -> AutoConfig:
    vision = {
        "hidden_size": shape.tower_hidden, "intermediate_size": shape.tower_mlp, "image_size": 72, "patch_size": 8,
        "num_hidden_layers": shape.tower_layers, "num_attention_heads": shape.tower_heads,
    }  # fmt: skip
    return AutoConfig.for_model(
        "smolvlm",
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=3,  # 9 features per tile; SmolVLM2-2.2B has 81
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


# Per family: special tokens, the template's image text, image processor, configuration.
READY = {
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


def tokenizer_texts() -> list[str]:
    """Return training texts for a tokenizer in which every word and template mark is few tokens."""
    return [f"[INST] {a} {b} [/INST] {b}" for a in WORDS for b in WORDS]


def write_model(folder: Path, shape: Shape) -> None:
    """Write a model folder in the published layout, with random weights; the caller writes a LLaVA's tokenizer."""
    torch.manual_seed(0)
    if not shape.is_ready:
        LlavaForConditionalGeneration(shape.config()).save_pretrained(folder)
        write_processor(folder, shape)
        return
    tokens, placeholder, processor, config_of = READY[shape.family]
    tokenizer = _tokenizer(tokens, min(shape.vocab, 512))
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", placeholder)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    config = config_of(shape, tokenizer, shape.text(bos_token_id=None, **ids))
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor().save_pretrained(folder)


def write_hollow_model(folder: Path, shape: Shape) -> None:
    """Write a LLaVA's folder in bfloat16 with zeros that take no disk space; weights are initialized on the device."""
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
    """Write the settings of CLIP's image processor."""
    size = shape.image_size
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(
        folder
    )


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


def write_samples(folder: Path, shape: Shape, mix: LengthMix, *, captions: bool = False) -> None:
    """Write data.json and images/: records of about the given lengths, scaled like an image's features.

    captions: only the caption, for the plain template; else questions and answers for mistral_instruct. It has no
    system message: at these lengths, one would be half of a sample.
    """
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for index in range(min(DIFFERENT_IMAGES, len(mix.tokens))):
        width = height = shape.image_size
        if shape.is_ready:
            sides = list(PHOTOGRAPHS)[rng.choice(len(PHOTOGRAPHS), p=list(PHOTOGRAPHS.values()))]
            width, height = (side // SHRINK for side in sides)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index}.png", compress_level=0)
    marks = None if captions else READY_MARKS if shape.is_ready else MARKS
    (folder / "data.json").write_text(json.dumps(records_of(mix, shape.scale, marks)), encoding="utf-8")


def records_of(mix: LengthMix, scale: float, marks: int | None) -> list[dict[str, object]]:
    """Return records with the mix's lengths, scaled. marks: template tokens around a question; None for captions."""
    records, words = [], random.Random(0)
    text = mix.tokens - mix.images * IMAGE_TOKENS
    for index, (written, targets, has_image) in enumerate(zip(text, mix.targets, mix.images)):
        answer = max(1, round(targets * scale) - 1)  # the end token is one of them
        human = "" if marks is None else _words(words, max(1, round((written - targets) * scale) - marks))
        record: dict[str, object] = {"id": f"s{index}"}
        if has_image:
            human = f"<image>\n{human}"
            record["image"] = f"{index % DIFFERENT_IMAGES}.png"
        turns = {"human": human, "gpt": _words(words, answer)}
        record["conversations"] = [{"from": name, "value": value} for name, value in turns.items()]
        records.append(record)
    return records


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
