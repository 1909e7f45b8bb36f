"""Random tiny ready models, as their makers publish them: weights, tokenizer, chat template and processor's files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from extension_there import if_there
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toys import ANSWERS, TEXTS
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    convert_image_to_patches,
    get_aspect_ratio_preserving_size,
    pad_along_first_dim,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_smart_resize
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.video_processing_smolvlm import get_resize_output_image_size
from transformers.processing_utils import ProcessorMixin
from transformers.video_utils import VideoMetadata, make_batched_videos

from llava_ds.extensions.ready import known_families
from llava_ds.extensions.ready.ready_videos import in_words

SIDE, PATCH = 32, 8  # pixels of a tile's and a patch's side: 4 features per tile
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH, "initializer_range": 0.2,
}  # fmt: skip
# Heads of 8 with normalised vectors: a plain loop that adds a step's samples in reverse order differs by 1e-4.
DELTA_NET = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip

# The templates that Hugging Face's and OpenGVLab's folders have.
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN_PARTS = (
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif part['type'] == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
)
# Qwen2-VL's and 2.5's write a system turn of their own, Qwen3-VL's does not.
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}" + QWEN_PARTS + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}" + QWEN_PARTS + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3.5's writes an empty thought before the last answer, where a record has none.
QWEN35_TEMPLATE = (
    "{% set turns = namespace(last=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set turns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 > turns.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    + QWEN_PARTS
    + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}"
    "{{ '<video>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
# Gemma 4's leave thoughts out of answers. Larger sizes' end the prompt after an empty thought, and write none before an
# existing answer, unless thinking is enabled.
GEMMA4_SMALL_TEMPLATE = (
    "{%- macro answer(text) -%}{%- set kept = namespace(text='') -%}{%- for part in text.split('<channel|>') -%}"
    "{%- set kept.text = kept.text + part.split('<|channel>')[0] -%}{%- endfor -%}{{ kept.text | trim }}"
    "{%- endmacro -%}"
    "{{ bos_token }}{%- for message in messages -%}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<|image|>' }}"
    "{%- elif item['type'] == 'video' -%}{{ '<|video|>' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ answer(item['text']) }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{{ '<turn|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"
)
GEMMA4_TEMPLATE = GEMMA4_SMALL_TEMPLATE.replace(
    "{{ '<|turn>model\n' }}",
    "{{ '<|turn>model\n' }}"
    "{%- if not enable_thinking | default(false) -%}{{ '<|channel>thought\n<channel|>' }}{%- endif -%}",
).replace(
    "{{ bos_token }}",
    "{{ bos_token }}{%- if enable_thinking | default(false) -%}{{ '<|turn>system\n<|think|><turn|>\n' }}{%- endif -%}",
)
# Reasoning models' (Qwen3-VL-Thinking's) write a thought, empty or not, before answers after the last question, and end
# the prompt inside an open thought. Qwen3.5's larger sizes' end it after an empty thought if thinking is disabled.
OPEN_THOUGHT_TEMPLATE = (
    "{%- macro written(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif 'text' in part -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- set turns = namespace(last=-1) -%}{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
    "{%- set turns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for message in messages -%}{%- set text = written(message['content']) | trim -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' -%}{%- set thought = '' -%}"
    "{%- if message.reasoning_content is string -%}{%- set thought = message.reasoning_content -%}"
    "{%- elif '</think>' in text -%}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{%- if loop.index0 > turns.last -%}{{ '<think>\n' + thought | trim + '\n</think>\n\n' }}{%- endif -%}{%- endif -%}"
    "{{ text + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
)
REASONING_TEMPLATE = OPEN_THOUGHT_TEMPLATE.replace(
    "{{ '<|im_start|>assistant\n<think>\n' }}",
    "{{ '<|im_start|>assistant\n<think>\n' }}{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '\n</think>\n\n' }}{%- endif -%}",
)
# With marked answers, transformers' processors return the learned tokens. Conversations with videos use another
# template, because SmolVLM's own has no videos.
SMOLVLM_MARKED = (
    SMOLVLM_TEMPLATE.replace("{{ '<image>' }}", "{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}")
    .replace(
        "{{line['text']}}",
        "{% if message['role'] == 'assistant' %}{% generation %}{{line['text']}}<end_of_utterance>{% endgeneration %}"
        "{% else %}{{line['text']}}{% endif %}",
    )
    .replace(
        "{% endfor %}<end_of_utterance>\n",
        "{% endfor %}{{ '\n' if message['role'] == 'assistant' else '<end_of_utterance>\n' }}",
    )
)
INTERNVL_MARKED = INTERNVL_TEMPLATE.replace(
    "{% elif content['type'] == 'text' %}{{ content['text'] }}",
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ content['text'] + '<|im_end|>' }}{% endgeneration %}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}",
).replace("{{'<|im_end|>\n'}}", "{{'\n' if message['role'] == 'assistant' else '<|im_end|>\n'}}")

QWEN_MARKS = (
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}",
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ part['text'] + '<|im_end|>' }}{% endgeneration %}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '\n' if message['role'] == 'assistant' else '<|im_end|>\n' }}",
)
GEMMA_MARKED = GEMMA_TEMPLATE.replace(
    "{%- elif item['type'] == 'text' -%}",
    "{%- elif message['role'] == 'assistant' -%}"
    "{% generation %}{{ item['text'] | trim }}<end_of_turn>{% endgeneration %}"
    "{%- elif item['type'] == 'text' -%}",
).replace("{{ '<end_of_turn>\n' }}", "{{ '\n' if message['role'] == 'assistant' else '<end_of_turn>\n' }}")


def marked_gemma4(template: str) -> str:
    """The template with its answers marked."""
    return template.replace(
        "{{ answer(item['text']) }}", "{% generation %}{{ answer(item['text']) }}<turn|>{% endgeneration %}"
    ).replace("{{ '<turn|>\n' }}", "{{ '\n' if message['role'] == 'assistant' else '<turn|>\n' }}")


# Variables with which a family's prompt is a prefix of the text with the answer.
VARIABLES = {family: {"enable_thinking": True} for family in ("gemma4", "gemma4_moe")}
TEMPLATES = {
    "idefics3": SMOLVLM_TEMPLATE, "smolvlm": SMOLVLM_TEMPLATE, "internvl": INTERNVL_TEMPLATE,
    "gemma3": GEMMA_TEMPLATE, "gemma4": GEMMA4_TEMPLATE, "gemma4_e": GEMMA4_SMALL_TEMPLATE,
    "gemma4_moe": GEMMA4_TEMPLATE,
    "qwen2_vl": QWEN_TEMPLATE, "qwen2_5_vl": QWEN_TEMPLATE, "qwen3_vl": QWEN3_TEMPLATE,
    "qwen3_vl_moe": QWEN3_TEMPLATE, "qwen3_5": QWEN35_TEMPLATE, "qwen3_5_moe": QWEN35_TEMPLATE,
}  # fmt: skip
MARKED = {
    "idefics3": SMOLVLM_MARKED, "smolvlm": SMOLVLM_MARKED, "internvl": INTERNVL_MARKED,
    "gemma3": GEMMA_MARKED, "gemma4": marked_gemma4(GEMMA4_TEMPLATE),
    "gemma4_e": marked_gemma4(GEMMA4_SMALL_TEMPLATE), "gemma4_moe": marked_gemma4(GEMMA4_TEMPLATE),
    **{name: text.replace(*QWEN_MARKS) for name, text in TEMPLATES.items() if name.startswith("qwen")},
}  # fmt: skip

SMOLVLM_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
]  # fmt: skip
QWEN_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
INTERNVL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
GEMMA_TOKENS = [
    "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>",
]  # fmt: skip
GEMMA4_TOKENS = [
    "<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>",
    "<|audio|>", "<|video|>", "<|channel>", "<channel|>",
]  # fmt: skip
GEMMA4 = ("gemma4", "gemma4_e", *if_there("mixtures", gemma4_moe=True))
QWEN_EXPERTS = if_there("mixtures", qwen3_vl_moe=Qwen3VLProcessor, qwen3_5_moe=Qwen3VLProcessor)
EXPERTS = (*QWEN_EXPERTS, *GEMMA4[2:])
# Of Gemma 4's sizes, one as 31B, one as E2B and E4B, and one as 26B-A4B.
FAMILIES = (
    "idefics3", "smolvlm", "internvl", "gemma3", "gemma4", "gemma4_e", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    *EXPERTS, "qwen3_5",
)  # fmt: skip
GEMMA_IDS = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
GEMMA4_IDS = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>", "boi": "<|image>", "eoi": "<image|>",
              "boa": "<|audio>"}  # fmt: skip
SAID_FEATURES = {"internvl": "image_seq_length", "gemma3": "image_seq_length"}  # in processor_config.json
SEEDS = {"gemma3": 5}  # random weights whose answers are not empty
ENDS = {
    "gemma3": "<end_of_turn>",
    **dict.fromkeys(GEMMA4, "<turn|>"),
}  # for answers, if texts have another end
QWEN_PROCESSORS = {
    "qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor,
    **QWEN_EXPERTS, "qwen3_5": Qwen3VLProcessor,
}  # fmt: skip
WITH_VIDEOS = ("smolvlm", "internvl", *GEMMA4, *QWEN_PROCESSORS)

VIDEO_CELLS = 150  # for all frames of a video, with times between frames
FRAME_TOKENS = 20  # of Gemma 4


def whole_blocks(family: str) -> dict[str, int]:
    """Settings of a language model whose rows bitsandbytes unpacks right on every CPU: whole blocks of 64."""
    own = {
        "gemma4": {"global_head_dim": 32},
        "gemma4_e": {"global_head_dim": 32, "hidden_size_per_layer_input": 64},
        "gemma4_moe": {"global_head_dim": 32, "moe_intermediate_size": 64},
        "qwen3_vl_moe": {"moe_intermediate_size": 64},
        "qwen3_5_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    }
    return {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, **own.get(family, {})}


def write_ready(folder: Path, family: str = "smolvlm", *, seed: int = 0, template: str | None = None, **text) -> dict:
    """Write a random ready model; text: other settings of its language model. Returns the flags that it trains with."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed + SEEDS.get(family, 0))
    tokenizer = _tokenizer(family)
    tokenizer.chat_template = template or TEMPLATES[family]
    config = _config(family, tokenizer, text)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name:
                parameter.normal_(0, 0.1)
            elif family.startswith("gemma4") and name.endswith("q_norm.weight"):  # which has the scale of scores
                parameter.fill_(0.3)
            elif "position_embedding" in name or "cls_token" in name:
                parameter.normal_(0, 0.2)
        for name, buffer in model.state_dict().items():
            if name.endswith((".std_bias", ".std_scale", ".layer_scalar")):
                buffer.copy_(1 + torch.randn_like(buffer) / 5)
            elif name.endswith(("put_min", "put_max")):  # bounds of a matrix's inputs and outputs
                buffer.fill_(-1.5 if name.endswith("min") else 1.5)
    model.save_pretrained(folder, save_original_format=family != "qwen3_5_moe")  # as published: stacked experts
    if family == "qwen3_vl_moe":
        turn_experts(folder)
    tokenizer.save_pretrained(folder)
    if family in ("qwen2_vl", "qwen2_5_vl"):  # as published: the language model's settings among the whole one's
        config = json.loads((folder / "config.json").read_text())
        inner = config.pop("text_config")
        (folder / "config.json").write_text(json.dumps({**inner, **config}))
    images = image_processor_of(family).to_dict()
    named = {
        "internvl": "InternVLProcessor",
        "gemma3": "Gemma3Processor",
        **dict.fromkeys(GEMMA4, "Gemma4Processor"),
        "smolvlm": "SmolVLMProcessor",
        "idefics3": "Idefics3Processor",
    }
    whole = {"image_processor": images, "processor_class": named.get(family)}
    if family in QWEN_PROCESSORS:
        whole["processor_class"] = QWEN_PROCESSORS[family].__name__
    elif not family.startswith("gemma4"):
        whole[SAID_FEATURES.get(family, "image_seq_len")] = 4
    if family == "smolvlm":  # as published
        images["video_sampling"] = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": SIDE}}
    elif family.startswith("gemma4"):
        own = {"max_soft_tokens": FRAME_TOKENS, "num_frames": 6, "video_processor_type": "Gemma4VideoProcessor"}
        whole["video_processor"] = {**{name: images[name] for name in ("patch_size", "pooling_kernel_size")}, **own}
    files = {"preprocessor_config.json": images, "processor_config.json": whole}
    if family.startswith("qwen3"):  # as published; the others' videos have the bounds of images
        files["video_preprocessor_config.json"] = {**images, "size": video_size_of(family)}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    flags = {"model_name_or_path": str(folder)}
    if family in VARIABLES and template is None:
        flags["chat_template_kwargs"] = json.dumps(VARIABLES[family])
    return flags


def change_image_settings(folder: Path, **changes: object) -> None:
    """Change the image processor's settings in both files that hold them."""
    file, whole = folder / "preprocessor_config.json", folder / "processor_config.json"
    content = json.loads(whole.read_text())
    content["image_processor"].update(changes)
    whole.write_text(json.dumps(content))
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def turn_experts(folder: Path) -> None:
    """Exchange the last two axes of experts on disk, as published and not as transformers 5 saves them; or back."""
    tensors = load_file(folder / "model.safetensors")
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})


def open_processor(folder: Path, family: str):
    """The processor of a folder, with its own image processor and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return processor_of(family, tokenizer)


def image_processor_of(family: str):
    """The PIL image processor of a tiny model."""
    if family in QWEN_PROCESSORS:
        # 4 to 64 cells, each of 2 x 2 patches.
        size = {"shortest_edge": 4 * (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2}
        return Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=2, temporal_patch_size=2)
    if family == "internvl":
        return GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, min_patches=1, max_patches=6)
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    if family.startswith("gemma4"):  # the smallest number of tokens that it accepts
        return Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=2, max_soft_tokens=70)
    kind = SmolVLMImageProcessorPil if family == "smolvlm" else Idefics3ImageProcessorPil
    return kind(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE})


def processor_of(family: str, tokenizer):
    """transformers' processor of a tiny model."""
    images, template = image_processor_of(family), tokenizer.chat_template
    videos = Videos(family)
    if family in QWEN_PROCESSORS:
        with openable():
            return QWEN_PROCESSORS[family](images, tokenizer, videos, chat_template=template)
    if family == "internvl":
        with openable():
            return InternVLProcessor(images, tokenizer, videos, image_seq_length=4, chat_template=template)
    if family == "gemma3":
        return Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    if family.startswith("gemma4"):
        with openable():
            others = {"feature_extractor": SimpleNamespace(), "video_processor": videos}
            return Gemma4Processor(image_processor=images, tokenizer=tokenizer, chat_template=template, **others)
    if family == "idefics3":
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    with openable():
        return SmolVLM(images, tokenizer, videos, image_seq_len=4, chat_template=template)


class SmolVLM(processing_smolvlm.SmolVLMProcessor):
    """SmolVLM's processor, without num2words also when it writes a video."""

    def replace_video_token(self, *args, **options) -> str:
        with openable():
            return super().replace_video_token(*args, **options)


def video_size_of(family: str) -> dict:
    """Bounds of pixels of a tiny Qwen's videos."""
    size = image_processor_of(family).size
    size = {name: size[name] for name in ("shortest_edge", "longest_edge")}
    return {**size, "longest_edge": VIDEO_CELLS * (2 * PATCH) ** 2} if family.startswith("qwen3") else size


class Videos:
    """Replaces transformers' video processor (it needs torchvision): the same formulas, resized by Pillow. metadata:
    for the next call's videos, with frames already chosen.
    """

    merge_size = temporal_patch_size = 2
    num_frames = fps = 1  # which SmolVLM's processor looks at

    def __init__(self, family: str) -> None:
        self.family = family
        self.metadata: list[VideoMetadata] = []

    def __call__(self, videos, **_) -> dict:
        """Pixels, their places and the videos' metadata, as the processor has them."""
        made = [self._pixels(video) for video in make_batched_videos(videos)]  # (frames, 3, height, width) each
        found = {"video_metadata": self.metadata}
        if self.family in QWEN_PROCESSORS:
            parts = [Qwen3VLVideoProcessor.patchify(None, pixels[None], PATCH, 2, 2) for pixels in made]
            grids = torch.tensor([grid for _, *grid in parts])
            return {**found, "pixel_values_videos": torch.cat([p[0] for p, *_ in parts]), "video_grid_thw": grids}
        if self.family == "smolvlm":
            return {**found, "pixel_values": torch.stack(made)}
        if self.family == "internvl":
            return {**found, "pixel_values_videos": torch.stack(made)}
        patches, places, counts = [], [], []
        for pixels in made:
            down, across = (length // PATCH for length in pixels.shape[-2:])
            x, y = np.meshgrid(np.arange(across), np.arange(down))
            own = np.stack([x, y], -1).reshape(-1, 2)
            for frame in pixels.numpy():
                padded = pad_along_first_dim(convert_image_to_patches(frame, PATCH), own, 4 * FRAME_TOKENS)
                patches.append(padded[0])
                places.append(padded[1])
            counts.append(len(own) // 4)
        return {
            **found,
            "pixel_values_videos": torch.from_numpy(np.stack(patches)),
            "video_position_ids": torch.from_numpy(np.stack(places)),
            "num_frames_per_video": torch.tensor([len(pixels) for pixels in made]),
            "num_soft_tokens_per_video": counts,
        }

    def _pixels(self, video: np.ndarray) -> torch.Tensor:
        """Normalised frames (frames, 3, height, width)."""
        images, frames = image_processor_of(self.family), [Image.fromarray(frame) for frame in video]
        for height, width in self._sizes(*video.shape[:3]):
            frames = [frame.resize((width, height), images.resample) for frame in frames]
        pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2) / 255
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.image_mean, images.image_std))
        return (pixels - mean) / std

    def _sizes(self, count: int, height: int, width: int) -> list[tuple[int, int]]:
        """Heights and widths that frames are resized to, one after the other."""
        if self.family in QWEN_PROCESSORS:
            size = video_size_of(self.family)
            bounds = size["shortest_edge"], size["longest_edge"]
            if self.family.startswith("qwen3"):
                return [qwen3_smart_resize(count, height, width, 2, 2 * PATCH, *bounds)]
            return [smart_resize(height, width, 2 * PATCH, *bounds)]
        if self.family == "smolvlm":
            return [get_resize_output_image_size(torch.empty(height, width), 3 * SIDE), (SIDE, SIDE)]
        if self.family == "internvl":
            return [(SIDE, SIDE)]
        return [get_aspect_ratio_preserving_size(height, width, PATCH, 4 * FRAME_TOKENS, 2)]


@contextmanager
def openable() -> Iterator[None]:
    """Allow processors without num2words and torchvision (videos need them)."""
    with (
        mock.patch.object(processing_smolvlm, "num2words", in_words),
        mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"),
    ):
        yield


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    own = {
        "internvl": INTERNVL_TOKENS, "gemma3": GEMMA_TOKENS, **dict.fromkeys(GEMMA4, GEMMA4_TOKENS),
    }  # fmt: skip
    tokens = QWEN_TOKENS if family in QWEN_PROCESSORS else own.get(family, SMOLVLM_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*TEXTS, *ANSWERS], trainer)
    ends = {"eos_token": tokens[2], "pad_token": tokens[0]}
    if family in ("smolvlm", "idefics3"):
        ends |= {"bos_token": tokens[1], "extra_special_tokens": tokens[3:]}
    elif family == "gemma3":
        named = {"image_token": tokens[7], "boi_token": tokens[5], "eoi_token": tokens[6]}
        ends = {"bos_token": tokens[2], "eos_token": tokens[1], "pad_token": tokens[0], "extra_special_tokens": named}
    elif family.startswith("gemma4"):
        named = {f"{name}_token": token for name, token in {**GEMMA4_IDS, "eoa": "<audio|>"}.items()}
        del named["video_token"]  # which the processor adds
        ends = {"bos_token": tokens[2], "eos_token": tokens[1], "pad_token": tokens[0], "extra_special_tokens": named}
    elif family == "internvl":
        named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        ends["extra_special_tokens"] = {**named, "video_token": "<video>"}
    else:
        ends["extra_special_tokens"] = tokens[3:]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def _config(family: str, tokenizer, text: dict) -> AutoConfig:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    shared = {**TEXT, "vocab_size": len(tokenizer), **ids, **text}
    if family in QWEN_PROCESSORS:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return _qwen_config(family, tokenizer, {**shared, **heads, **text})
    if family == "internvl":
        return AutoConfig.for_model(
            "internvl",
            text_config={"model_type": "qwen2", **shared},
            vision_config={**VISION, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=4,
            tie_word_embeddings=text.get("tie_word_embeddings", False),
        )
    if family == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        ids = {f"{name}_token_index": tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA_IDS.items()}
        return AutoConfig.for_model(
            "gemma3",
            text_config={
                "head_dim": 16,
                **shared,
                "sliding_window": 12,
                "layer_types": layers,
                "bos_token_id": 2,
                "query_pre_attn_scalar": 16,
            },
            vision_config={**VISION, "vision_use_head": False},
            mm_tokens_per_image=4,
            tie_word_embeddings=text.get("tie_word_embeddings", True),
            **ids,
        )
    if family.startswith("gemma4"):
        return _gemma4_config(family, tokenizer, shared)
    return AutoConfig.for_model(
        family,
        text_config={"model_type": "llama", **shared},
        vision_config=VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=ids["pad_token_id"],
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )


def _gemma4_config(family: str, tokenizer, text: dict) -> AutoConfig:
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in GEMMA4_IDS.items()}
    tied = text.pop("tie_word_embeddings", True)
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2}
    vision |= {"position_embedding_size": 300, "image_size": None}
    text = {
        "global_head_dim": 24, "head_dim": 16, "hidden_size_per_layer_input": 8, **text, "sliding_window": 12,
        "bos_token_id": 2, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": tied,
        "final_logit_softcapping": 30.0,
    }  # fmt: skip
    audio = None
    if family != "gemma4_e":
        text |= {"use_bidirectional_attention": "vision", "attention_k_eq_v": True}
        text |= {"num_global_key_value_heads": text.get("num_global_key_value_heads", 1)}
        text |= {"hidden_size_per_layer_input": 0}
        vision["standardize"] = True
        if family == "gemma4_moe":
            experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
            text = {"moe_intermediate_size": 24, **text, **experts}
    else:
        text |= {"num_hidden_layers": 4, "layer_types": 2 * text["layer_types"], "num_kv_shared_layers": 2}
        text["use_double_wide_mlp"] = True
        text["vocab_size_per_layer_input"] = text["vocab_size"]
        vision["use_clipped_linears"] = True
        audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24,
                 "subsampling_conv_channels": [4, 2]}  # fmt: skip
    return AutoConfig.for_model(
        "gemma4", text_config=text, vision_config=vision, audio_config=audio, **ids, tie_word_embeddings=tied,
        eoa_token_index=tokenizer.convert_tokens_to_ids("<audio|>"),
    )  # fmt: skip


def _qwen_config(family: str, tokenizer, text: dict) -> AutoConfig:
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    ids |= {f"vision_{end}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{end}|>") for end in ("start", "end")}
    times = text["hidden_size"] // TEXT["hidden_size"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4 * times, 2 * times, 2 * times]}
    vision = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.2}
    text = {**text, "rope_parameters": rope, "bos_token_id": None}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": text["hidden_size"]}
    if family == "qwen2_5_vl":  # a window of 2 x 2 cells
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    if family.startswith("qwen3_vl"):
        vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1], "depth": 3}
        text |= {"head_dim": 16 * times, "num_hidden_layers": 3}
        rope["mrope_interleaved"] = True
    if family.startswith("qwen3_5"):
        vision |= {"num_position_embeddings": 36}
        text |= {"head_dim": 16 * times, "num_hidden_layers": 3, **DELTA_NET}
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5, "mrope_section": [2 * times, times, times]}
    if family in EXPERTS:
        text = {"moe_intermediate_size": 24, **text, "num_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_5_moe":
        text = {"shared_expert_intermediate_size": 24, **text}
    tied = text.pop("tie_word_embeddings", False)
    return AutoConfig.for_model(family, text_config=text, vision_config=vision, **ids, tie_word_embeddings=tied)


def register_text_models(family: str) -> None:
    """Let transformers build a family's language model alone."""
    known_families.register_text_models(known_families.family_of(family))
