"""Random tiny ready models, as their makers publish them: weights, tokenizer, chat template and processor's files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toys import ANSWERS, TEXTS
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.processing_utils import ProcessorMixin

SIDE, PATCH = 32, 8  # of a tile and of a patch, in pixels: 4 features a tile
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH, "initializer_range": 0.2,
}  # fmt: skip

# The templates that Hugging Face's and OpenGVLab's folders have.
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
# Where answers are marked, transformers' processors say themselves what is learned.
SMOLVLM_MARKED = SMOLVLM_TEMPLATE.replace(
    "{{line['text']}}",
    "{% if message['role'] == 'assistant' %}{% generation %}{{line['text']}}<end_of_utterance>{% endgeneration %}"
    "{% else %}{{line['text']}}{% endif %}",
).replace(
    "{% endfor %}<end_of_utterance>\n",
    "{% endfor %}{{ '\n' if message['role'] == 'assistant' else '<end_of_utterance>\n' }}",
)
INTERNVL_MARKED = INTERNVL_TEMPLATE.replace(
    "{% elif content['type'] == 'text' %}{{ content['text'] }}",
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ content['text'] + '<|im_end|>' }}{% endgeneration %}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}",
).replace("{{'<|im_end|>\n'}}", "{{'\n' if message['role'] == 'assistant' else '<|im_end|>\n'}}")

SMOLVLM_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
]  # fmt: skip
INTERNVL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
FAMILIES = ("idefics3", "smolvlm", "internvl")


def write_ready(folder: Path, family: str = "smolvlm", *, seed: int = 0, template: str | None = None, **text) -> dict:
    """Write a random ready model; text: other settings of its language model. Returns the flag that names it."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    smol = family != "internvl"
    tokenizer = _tokenizer(SMOLVLM_TOKENS if smol else INTERNVL_TOKENS, smol)
    tokenizer.chat_template = template or (SMOLVLM_TEMPLATE if smol else INTERNVL_TEMPLATE)
    config = _config(family, tokenizer, text)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name:
                parameter.normal_(0, 0.1)
            elif "position_embeddings" in name or "cls_token" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = image_processor_of(family).to_dict()
    named = {"internvl": "InternVLProcessor", "smolvlm": "SmolVLMProcessor", "idefics3": "Idefics3Processor"}
    length = "image_seq_length" if family == "internvl" else "image_seq_len"
    whole = {"image_processor": images, length: 4, "processor_class": named[family]}
    for name, content in (("preprocessor_config.json", images), ("processor_config.json", whole)):
        (folder / name).write_text(json.dumps(content))
    return {"model_name_or_path": str(folder)}


def open_processor(folder: Path, family: str):
    """The processor of a folder, with its own image processor and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return processor_of(family, tokenizer)


def image_processor_of(family: str):
    """The PIL image processor of a tiny model."""
    if family == "internvl":
        return GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, min_patches=1, max_patches=6)
    kind = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
    return kind(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE})


def processor_of(family: str, tokenizer):
    """transformers' processor of a tiny model."""
    images, template = image_processor_of(family), tokenizer.chat_template
    if family == "internvl":
        with openable():
            return InternVLProcessor(images, tokenizer, image_seq_length=4, chat_template=template)
    if family == "idefics3":
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    with openable():
        videos = SimpleNamespace(num_frames=1, fps=1)
        return processing_smolvlm.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=template)


@contextmanager
def openable() -> Iterator[None]:
    """Let processors be made without num2words and torchvision, which videos need."""
    with (
        mock.patch.object(processing_smolvlm, "num2words", str),
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
    ):
        yield


def _tokenizer(tokens: list[str], smol: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*TEXTS, *ANSWERS], trainer)
    if smol:
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<end_of_utterance>",
            pad_token="<|endoftext|>", extra_special_tokens=tokens[3:],
        )  # fmt: skip
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens={**named, "video_token": "<video>"},
    )  # fmt: skip


def _config(family: str, tokenizer, text: dict) -> AutoConfig:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    shared = {**TEXT, "vocab_size": len(tokenizer), **ids, **text}
    if family == "internvl":
        return AutoConfig.for_model(
            "internvl",
            text_config={"model_type": "qwen2", **shared},
            vision_config={**VISION, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=4,
            tie_word_embeddings=text.get("tie_word_embeddings", False),
        )
    return AutoConfig.for_model(
        family,
        text_config={"model_type": "llama", **shared},
        vision_config=VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=ids["pad_token_id"],
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
