"""An export's chat template and tokenizer: programs that let tokenizers add tokens, and others, see training's ids."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llava_ds.constants import IMAGE_TOKEN, IMAGE_TOKEN_INDEX
from llava_ds.data.chat_template import ROLES
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.jinja_templates import CHAT_TEMPLATES, chat_template
from llava_ds.data.sample import Message
from llava_ds.data.templates import TEMPLATES
from llava_ds.export.tokenizer_files import hf_tokenizer, write_hf_tokenizer
from llava_ds.tokenizer import begins_with_bos, open_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "goldens" / "tokenizers"
QUICK = [
    ("v1", "llama_slow_legacy"),
    ("v1", "llama_slow_nolegacy"),
    ("plain", "llama_slow_nolegacy"),
    ("mistral_orca", "llama_chatml_nolegacy"),
]
FULL = [
    # sp_uds never splits some texts, which transformers' tokenizers can't do.
    *(("v1", path.name) for path in sorted(FOLDER.iterdir()) if path.name != "sp_uds"),
    ("llava_v0", "llama_slow_nolegacy"),
    ("llama_2", "llama_slow_nolegacy"),
    ("llama_2", "llama_slow_legacy"),
    ("mistral_instruct", "vicuna_split_nolegacy"),
    ("mistral_zephyr", "llama_slow_legacy"),
    ("mpt", "llama_slow_nolegacy"),
    ("mpt", "neox"),
    ("gemma", "gemma_slow"),
    ("phi", "phi"),
    ("chatml", "qwen"),
    ("llama_3", "llama3"),
    ("plain", "llama_slow_legacy"),
]
PAIRS = [*QUICK, *(pytest.param(*pair, marks=pytest.mark.long) for pair in FULL if pair not in QUICK)]
TALK = [Message("human", "<image>\nWhat is it?"), Message("gpt", "A red cat."), Message("human", "Why, 猫?")]
TALKS = [TALK[:1], [Message("human", "What?")], TALK, [Message("system", "Be brief."), *TALK]]


def exported(name: str, template: str, folder: Path, ours: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of an export, with its chat template."""
    trained = open_tokenizer(str(FOLDER / name))
    tokenizer, _ = hf_tokenizer(trained, (IMAGE_TOKEN,), ours)
    tokenizer.chat_template = chat_template(template, trained) if ours else CHAT_TEMPLATES[template]
    write_hf_tokenizer(tokenizer, FOLDER / name, folder)
    return AutoTokenizer.from_pretrained(folder)


def of_training(name_or_path: str, template: str, talk: list[Message], image_id: int) -> list[int]:
    encoder = Encoder(open_tokenizer(name_or_path), EncodingOptions(template, 2048))
    ids = encoder.prompt_ids(talk, [1] * sum(message.text.count(IMAGE_TOKEN) for message in talk))
    return [image_id if token == IMAGE_TOKEN_INDEX else token for token in ids]


def every_path(tokenizer: PreTrainedTokenizerBase, talk: list[Message]) -> list[list[int]]:
    """The ids by the ways that programs take from a chat to ids."""
    chat = [{"role": ROLES.get(message.role, "system"), "content": message.text} for message in talk]
    options = {"add_generation_prompt": True, "return_dict": False}
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    return [
        tokenizer.apply_chat_template(chat, **options),
        tokenizer(text).input_ids,
        tokenizer(text, add_special_tokens=False).input_ids,
    ]


@pytest.mark.parametrize(("template", "name"), PAIRS)
def test_every_path_gives_the_ids_of_training(template, name, tmp_path):
    tokenizer = exported(name, template, tmp_path)
    image_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    for talk in TALKS[:1] if template == "plain" else TALKS:
        expected = of_training(str(FOLDER / name), template, talk, image_id)
        assert every_path(tokenizer, talk) == [expected] * 3
        # To train on, and to ask, it is as before.
        assert of_training(str(tmp_path), template, talk, image_id) == expected
        if begins_with_bos(open_tokenizer(str(FOLDER / name))) and not TEMPLATES[template].whole:
            assert expected[0] == tokenizer.bos_token_id != expected[1]


def test_a_second_export_is_like_the_first(tmp_path):
    first = exported("llama_slow_nolegacy", "v1", tmp_path / "first")
    again, new = hf_tokenizer(open_tokenizer(str(tmp_path / "first")), (IMAGE_TOKEN,))
    assert new == [] and chat_template("v1", open_tokenizer(str(tmp_path / "first"))) == first.chat_template
    write_hf_tokenizer(again, tmp_path / "first", tmp_path / "second")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        one, other = (json.loads((tmp_path / folder / name).read_text()) for folder in ("first", "second"))
        assert one.pop("chat_template", None) == other.pop("chat_template", None) or name == "tokenizer_config.json"
        assert one == other


def test_an_earlier_export_is_read_as_it_was_written(tmp_path):
    """Its tokenizer adds bos, and its template does not write it."""
    old = exported("llama_slow_nolegacy", "v1", tmp_path / "old", ours=False)
    image_id = old.convert_tokens_to_ids(IMAGE_TOKEN)
    expected = of_training(str(FOLDER / "llama_slow_nolegacy"), "v1", TALK, image_id)
    assert every_path(old, TALK) == [expected[1:], expected, expected[1:]]
    assert of_training(str(tmp_path / "old"), "v1", TALK, image_id) == expected
    # run/export.py makes a folder of it in which every path is right.
    trained = open_tokenizer(str(tmp_path / "old"))
    tokenizer, _ = hf_tokenizer(trained, (IMAGE_TOKEN,))
    tokenizer.chat_template = chat_template("v1", trained)
    write_hf_tokenizer(tokenizer, tmp_path / "old", tmp_path / "new")
    assert every_path(AutoTokenizer.from_pretrained(tmp_path / "new"), TALK) == [expected] * 3


def test_a_template_of_its_own_keeps_its_tokenizer(tmp_path):
    tokenizer, _ = hf_tokenizer(open_tokenizer(str(FOLDER / "llama_slow_legacy")), (IMAGE_TOKEN,), False)
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
