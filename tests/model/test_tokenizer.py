"""Tokenizers as LLaVA had them, and that they stay so when they are written and read again."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from llava_ds.constants import ConfigError
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.sample import Message
from llava_ds.tokenizer import as_llava, first_space_pattern, open_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "goldens" / "tokenizers"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TALK = [
    Message("human", "a <image> b<image>\n c </s> d"),
    Message("gpt", " e  猫"),
    Message("human", "USER"),
    Message("gpt", "f"),
]


def ids_of(tokenizer) -> list[int]:
    [coded] = Encoder(tokenizer, EncodingOptions("v1", 2048)).encode_batch([(TALK, [1, 1])])
    return coded.input_ids.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_written_and_read_again_gives_the_same_ids(name, tmp_path):
    tokenizer = open_tokenizer(str(FOLDER / name))
    assert as_llava(tokenizer) is tokenizer
    tokenizer.save_pretrained(tmp_path)
    assert ids_of(AutoTokenizer.from_pretrained(tmp_path)) == ids_of(open_tokenizer(str(tmp_path))) == ids_of(tokenizer)
    assert len(open_tokenizer(str(tmp_path))) == len(tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_known_of_the_tokenizer_stays_known(name):
    plain = AutoTokenizer.from_pretrained(FOLDER / name)
    tokenizer = open_tokenizer(str(FOLDER / name))
    for attribute in ("bos_token", "eos_token", "unk_token", "chat_template", "padding_side", "model_max_length"):
        assert getattr(tokenizer, attribute) == getattr(plain, attribute)
    assert {**plain.get_vocab(), **tokenizer.get_vocab()} == plain.get_vocab()


def test_the_two_ways_of_llamas_tokenizer_differ_behind_special_tokens():
    legacy, new = (open_tokenizer(str(FOLDER / name)) for name in ("llama_slow_legacy", "llama_slow_nolegacy"))
    one, other = (tokenizer.convert_ids_to_tokens(tokenizer("a</s>b").input_ids) for tokenizer in (legacy, new))
    assert "".join(one) == "<s>▁a</s>▁b" and "".join(other) == "<s>▁a</s>b"
    assert first_space_pattern(legacy) is None and first_space_pattern(new).match(" a")


def test_a_token_of_the_tokenizer_that_is_added_by_hand_is_kept(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "llama_slow_legacy")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<im_start>"]})
    assert as_llava(tokenizer).convert_tokens_to_ids("<im_start>") == len(tokenizer) - 1


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    shutil.copy(FOLDER / "llama_slow_legacy" / "config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json or tokenizer\.model"):
        open_tokenizer(str(tmp_path))
