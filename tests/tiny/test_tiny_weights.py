"""The shipped weights: small, opened by transformers, and the Llama answers questions about descriptions."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_model.build_clip import normalise, pictures_of
from tiny_model.build_llama import Encoder, accuracy_by_kind
from tokenizers import Tokenizer
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionModel, LlamaForCausalLM

from llava_ds.tiny import CLIP_PATH, LLAMA_PATH, WEIGHTS_PATH
from llava_ds.tiny.scenes import draw_scene, sample_scene

TEXTS = [
    "Is there a red circle?",
    " leading and trailing ",
    "a  b\n\nc\td",
    "\nHow many shapes are there? ASSISTANT:",
    "naïve café — “quotes” … 你好, мир! 🙂🏳️‍🌈",
    "\u0000\u200b\uffff",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA_PATH)


def test_together_below_eight_megabytes():
    assert sum(file.stat().st_size for file in WEIGHTS_PATH.rglob("*")) < 8e6


def test_clip_opens_with_every_weight_in_the_old_spelling():
    model, report = CLIPVisionModel.from_pretrained(CLIP_PATH, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with safe_open(CLIP_PATH / "model.safetensors", "pt") as file:
        assert all(key.startswith("vision_model.") for key in file.keys())
    side = model.config.image_size
    states = model(torch.zeros(1, 3, side, side, dtype=model.dtype), output_hidden_states=True).hidden_states
    assert states[-2].shape == (1, 1 + (side // model.config.patch_size) ** 2, model.config.hidden_size)


def test_the_tower_was_trained_on_what_its_processor_gives():
    scene = sample_scene(np.random.default_rng(0))
    processed = CLIPImageProcessor.from_pretrained(CLIP_PATH)(draw_scene(scene), return_tensors="pt")["pixel_values"]
    assert torch.allclose(processed, normalise(pictures_of([scene])), atol=0.02)


def test_auto_tokenizer_gives_what_tokenizer_json_says(tokenizer):
    raw = Tokenizer.from_file(str(LLAMA_PATH / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer(text).input_ids == raw.encode(text).ids
        assert tokenizer(text).input_ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 258]) == ["<unk>", "<s>", "</s>", "<0x00>", "<0xFF>"]
    assert tokenizer.model_max_length == 2048 and tokenizer.pad_token is None
    assert "<image>" not in tokenizer.get_vocab()


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips_and_offsets_point_into_it(tokenizer, text):
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    assert tokenizer.decode(encoded.input_ids) == text
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert "<unk>" not in tokens
    for i, (token, (start, end)) in enumerate(zip(tokens, encoded.offset_mapping, strict=True)):
        word = token.replace("▁", " ", 1) if i else token.removeprefix("▁")  # the first space is the tokenizer's own
        if word and not token.startswith("<0x"):  # a lone dummy space points at the first character, as in Llama's
            assert text[start:end] == word.replace("▁", " ")
    covered = set().union(*(range(start, end) for start, end in encoded.offset_mapping))
    assert covered == set(range(len(text)))


def test_every_piece_gets_its_dummy_space(tokenizer):
    assert tokenizer.tokenize("red") == ["▁red"]
    assert tokenizer.tokenize("\nIs")[:2] == ["▁", "<0x0A>"]
    assert tokenizer.tokenize("yes</s>USER:")[:3] == ["▁yes", "</s>", "▁USER"]


def test_llama_answers_questions_about_descriptions():
    model, report = LlamaForCausalLM.from_pretrained(LLAMA_PATH, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    encode = Encoder(Tokenizer.from_file(str(LLAMA_PATH / "tokenizer.json")))
    accuracies = accuracy_by_kind(model, encode, np.random.default_rng(7), num_per_kind=30)
    assert min(accuracies.values()) > 0.7, accuracies
