"""Random toy models and data for tests: seconds to train, every code path of a large one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitImageProcessorPil,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    GotOcr2ImageProcessorPil,
    PreTrainedConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.tiny.build_tokenizer import save_tokenizer, train_tokenizer

IMAGE_SIZE, PATCH_SIZE = 24, 8
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
# Further tower families by model_type, with their special settings.
TOWERS = {
    "dinov2": {"mlp_ratio": 2},
    "dinov2_with_registers": {"mlp_ratio": 2, "num_register_tokens": 3},
    "dinov3_vit": {"num_register_tokens": 4, "use_gated_mlp": True},
    "aimv2_vision_model": {"is_native": True},
    "internvl_vision": {},
}
TEXTS = [
    "USER: What is it? ASSISTANT: It is a red cat.",
    "A chat between a curious user and an assistant.",
    "yes no two",
]
ANSWERS = ["yes", "It is a red cat.", "two", "There is no dog, but a cat."]


# Special settings of each family's random language model. Windows are shorter than most samples of write_data.
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    # Sliding windows in the upper layers only.
    "qwen2_5": {
        "model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 17,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 16},  # wider together than the model
    "mistral": {"sliding_window": 17},
    "phi3": {
        "sliding_window": 33, "max_position_embeddings": 2048, "original_max_position_embeddings": 512,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [2.0, 3.0, 5.0, 7.0],
            "original_max_position_embeddings": 512,
        },
    },
    # Windows in every second layer, soft caps that matter, embeddings scaled and tied.
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 17, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    # Its own names for trunk and ends; the ends are tied.
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 48},
    # Multipliers everywhere, and logits divided by one.
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 4.0,
    },
    # Mixtures of experts: with their own width, a shared expert and a layer without experts; or as wide as an MLP.
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # As Granite; its experts are one tensor on disk.
    "granitemoe": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6,
        "attention_multiplier": 0.2, "logits_scaling": 4.0,
    },
    # Learned positions, biases, embeddings tied.
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.2, "pad_token_id": 1},
}  # fmt: skip


# From an extension that may have been deleted.
MIXTURES = tuple(family for family, own in FAMILIES.items() if "num_experts_per_tok" in own)


def language_model_config(family: str = "llama", *, vocab_size: int = 400, **changed: object) -> PreTrainedConfig:
    """The configuration of a tiny language model with grouped-query attention, where its family has that."""
    if family in MIXTURES and "mixtures" not in EXTENSIONS:
        pytest.skip("there is no extension mixtures")
    options = {
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return AutoConfig.for_model(**{**options, **FAMILIES[family], **changed})


def write_language_model(folder: Path, family: str = "llama", **changed: object) -> dict[str, str]:
    """Write a random language model with a Llama-like tokenizer; returns the flag that names it."""
    tokenizer = train_tokenizer(TEXTS, max_vocab_size=400)
    config = language_model_config(family, **{"vocab_size": tokenizer.get_vocab_size(), **changed})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return {"model_name_or_path": str(folder)}


def write_tower(folder: Path, kind: str = "clip", **changed: object) -> dict[str, str]:
    """Write a random tower with its image processor, as its makers would publish it; returns the flag that names it.

    kind: clip, siglip, siglip2 or one of TOWERS; all give 3 x 3 patches.
    """
    if kind in TOWERS:
        return _write_other_tower(folder, kind, changed)
    square, options = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}, {**TOWER, "patch_size": PATCH_SIZE, **changed}
    if kind == "clip":
        config = CLIPVisionConfig(**{"image_size": IMAGE_SIZE, **options})
        CLIPVisionModel(config).save_pretrained(folder)
        side = config.image_size
        processor = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        processor.save_pretrained(folder)
    elif kind == "siglip":
        SiglipVisionModel(SiglipVisionConfig(image_size=IMAGE_SIZE, **options)).save_pretrained(folder)
        SiglipImageProcessorPil(size=square).save_pretrained(folder)
    else:
        Siglip2VisionModel(Siglip2VisionConfig(num_patches=9, **options)).save_pretrained(folder)
        means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        settings = {"patch_size": PATCH_SIZE, "max_num_patches": 20, "resample": 2, **means}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return {"vision_tower": str(folder)}


def tower_config(kind: str, **changed: object) -> PreTrainedConfig:
    """The configuration of a tiny tower from TOWERS."""
    options = {**TOWER, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE, **TOWERS[kind], **changed}
    return AutoConfig.for_model(kind, **options)


def _write_other_tower(folder: Path, kind: str, changed: dict[str, object]) -> dict[str, str]:
    config = tower_config(kind, **changed)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # some start as zeros or ones
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    if kind.startswith("dinov2"):
        BitImageProcessorPil(size={"shortest_edge": IMAGE_SIZE + 5}, crop_size=square).save_pretrained(folder)
    elif kind == "aimv2_vision_model":
        CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=square).save_pretrained(folder)
    elif kind == "internvl_vision":
        GotOcr2ImageProcessorPil(size=square).save_pretrained(folder)
    else:  # whose class needs torchvision
        means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
        settings = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": square, "resample": 2, **means}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return {"vision_tower": str(folder)}


def write_base(
    folder: Path, *, seed: int = 0, family: str = "llama", clip: dict[str, object] | None = None, **changed: object
) -> dict[str, str]:
    """Write a random language model and a random CLIP tower; changed, clip: other options of the two.

    Returns the flags that name them.
    """
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_language_model(folder / family, family, **changed)
    write_tower(folder / "clip", **(clip or {}))
    return {"model_name_or_path": str(folder / family), "vision_tower": str(folder / "clip")}


def add_tokens(folder: Path, *tokens: str) -> None:
    """Give the tokenizer in a folder more special tokens."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_data(folder: Path, kinds: str, *, seed: int = 0, plain: bool = False) -> dict[str, str]:
    """Write a data set with one sample per letter: "i" with an image, "v" with a video's frames, "t" text only; return
    the flags that name it."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = []
    for index, kind in enumerate(kinds):
        turns = 1 if plain else int(rng.integers(1, 4))
        talk = []
        for turn in range(turns):
            mark = {"i": "<image>\n", "v": "<video>\n"}.get(kind, "") if turn == 0 else ""
            talk.append({"from": "human", "value": f"{mark}What is it, number {index}?"})
            talk.append({"from": "gpt", "value": ANSWERS[int(rng.integers(len(ANSWERS)))]})
        record = {"id": f"s{index}", "conversations": talk}
        if kind == "i":
            width, height = rng.integers(20, 50, 2)
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{index}.png")
            record["image"] = f"{index}.png"
        if kind == "v":
            record["video"] = [f"{index}-{frame}.png" for frame in range(5)]
            for name, pixels in zip(record["video"], rng.integers(0, 256, (5, 33, 44, 3), dtype=np.uint8)):
                Image.fromarray(pixels).save(folder / "images" / name)
        records.append(record)
    (folder / "data.json").write_text(json.dumps(records))
    return {"data_path": str(folder / "data.json"), "image_folder": str(folder / "images")}


def encoding_options(**changed):
    """The encoding options of toy conversations."""
    from llava_ds.data.encode import EncodingOptions

    return EncodingOptions(**{"template": "v1", "max_length": 512, **changed})


def image_options(**changed):
    """The image options of the toy tower."""
    from llava_ds.geometry import ImageOptions

    defaults = {"size": IMAGE_SIZE, "patch_size": PATCH_SIZE, "mean": (0.5, 0.4, 0.3), "aspect_ratio": "square"}
    return ImageOptions(**{**defaults, "max_pixels": 10**6, **changed})


def encoded(data_path, image_folder, *, tokenizer, cache_dir, encoding=None, images=None, ranks=None, **preflight):
    """The toy data opened as training opens it."""
    from llava_ds.data.dataset import ALONE, PreflightOptions, open_encoded
    from llava_ds.data.sources import SourceOptions, open_sources

    others = preflight.get("other_columns", False)
    options = SourceOptions(image_folder=image_folder, cache_dir=str(cache_dir), other_columns=others)
    sources = open_sources(data_path, options)
    return open_encoded(
        sources,
        tokenizer,
        encoding or encoding_options(),
        images or image_options(),
        PreflightOptions(cache_dir=str(cache_dir), **preflight),
        ranks or ALONE,
    )


def write_qwen_base(folder: Path) -> dict[str, str]:
    """A random Qwen 2 with a byte-level tokenizer that has its chat marks, and the random CLIP tower."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    flags = write_base(folder)
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*TEXTS, *ANSWERS], trainer)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "qwen")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder / "qwen")
    return {**flags, "model_name_or_path": str(folder / "qwen")}


def model_arguments(**flags: object) -> ModelArguments:
    """The model's flags, including flags from extensions."""
    plain = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset())
    return plain.replaced(**flags).model


def add_lora(model: nn.Module, args: ModelArguments, seed: int) -> object:
    """Add LoRA to a language model. Returns its layout."""
    layers = pytest.importorskip("llava_ds.extensions.lora.layers")
    whole = nn.Module()
    whole.vision_tower, whole.projector, whole.language_model = nn.Module(), nn.Module(), model
    whole.vision_tower.tower = nn.Module()
    layout = layers.lora_layout(whole, args, None, model.config)
    layers.add_lora(whole, layout, args, seed)
    return layout


def add_plain_tokens(folder: Path, *tokens: str) -> None:
    """Add ordinary tokens to the tokenizer in a folder, as a user does with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens(list(tokens)) == len(tokens)
    tokenizer.save_pretrained(folder)
