"""Write the start of `make ready`: python -m llava_ds.extensions.ready.small_model FOLDER --seed 0

FOLDER/model: a Qwen3-VL with random weights, like a published folder: transformers' class, configuration, chat template
and processor's files. Its tokenizer is learned from the generated scenes (llava_ds/tiny), which are written if they are
missing. An image becomes 96 x 96 pixels and 9 features, one for each place of a scene. FOLDER/sft.yaml: a mixture of
captions of the scenes and conversations about them. FOLDER/questions: counting questions to train, and held-out ones.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from llava_ds.files.reading import read_json
from llava_ds.tiny.default import scenes_folder
from llava_ds.tiny.scene_files import write_dataset
from llava_ds.tiny.scene_splits import write_questions

PATCH, MERGE, SIDE = 8, 4, 96  # pixels of a patch's side, patches of a feature's side, pixels of an image's side
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
          "<|video_pad|>")  # fmt: skip
MIXTURE = """datasets:
  - path: {scenes}/pretrain.json
    image_folder: {scenes}
  - path: {scenes}/finetune.json
    image_folder: {scenes}
    sampling_strategy: first:4%
"""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    """Write the small model, the data mixture and the questions from command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=5200, help="questions to train (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=1000, help="held-out questions (default: %(default)s)")
    parser.add_argument("--cache_dir", default="~/.cache/llava_ds")
    args = parser.parse_args()
    scenes = scenes_folder(args.cache_dir)
    write_dataset(scenes)
    write_start(args.folder, scenes, args.seed, args.questions, args.heldout)


def write_start(folder: Path, scenes: Path, seed: int, questions: int, heldout: int) -> None:
    """Write model, mixture and questions from generated scenes. questions, heldout: numbers of counting questions."""
    write_small_model(folder / "model", scene_texts(scenes), seed)
    (folder / "sft.yaml").write_text(MIXTURE.format(scenes=scenes))
    splits = {"train": (["count"] * questions, False), "heldout": (["count"] * heldout, True)}
    write_questions(folder / "questions", seed, splits)


def scene_texts(scenes: Path) -> list[str]:
    """Return the texts of the training scenes."""
    records = [*read_json(scenes / "pretrain.json", list), *read_json(scenes / "finetune.json", list)]
    return [turn["value"] for record in records for turn in record["conversations"]]


def write_small_model(folder: Path, texts: list[str], seed: int) -> None:
    """Write random weights from a seed, config.json, a tokenizer trained on texts, and the processor's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = learn_tokenizer(texts)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(small_config(tokenizer))
    with torch.no_grad():  # scaled to the patch embeddings' size, so positions are learned in half the steps
        model.model.visual.pos_embed.weight.mul_(10)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    images = Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2).to_dict()
    whole = {"image_processor": images, "processor_class": "Qwen3VLProcessor"}
    for name, content in (("preprocessor_config.json", images), ("processor_config.json", whole)):
        (folder / name).write_text(json.dumps(content, indent=1))


def learn_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on texts, with Qwen's special tokens and Qwen3-VL's chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=list(TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *len(texts) // 4 * ("user\n", "assistant\n")], trainer)
    ends = {"pad_token": TOKENS[0], "eos_token": TOKENS[2], "extra_special_tokens": list(TOKENS[3:])}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **ends)


def small_config(tokenizer: PreTrainedTokenizerFast) -> AutoConfig:
    """Return the configuration of a Qwen3-VL with 3 layers of width 96, and a tower with 2 of width 32."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name.removesuffix('_token_id')}|>") for name in
           ("vision_start_token_id", "vision_end_token_id")}  # fmt: skip
    ids |= {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>") for kind in ("image", "video")}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 2048,
        "initializer_range": 0.05, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
                            "mrope_interleaved": True},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "num_position_embeddings": (SIDE // PATCH) ** 2,
        "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0], "initializer_range": 0.05,
    }  # fmt: skip
    return AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)


if __name__ == "__main__":
    main()
