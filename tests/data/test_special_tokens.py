"""What a record spells out stays text, where that is asked for; what a template writes is a token."""

import functools

import pytest
from test_goldens import TOKENIZERS, tokenizer_of

from llava_ds.constants import DataError
from llava_ds.data.encode import Encoded, Encoder, EncodingOptions
from llava_ds.data.sample import Message
from llava_ds.data.special_tokens import LITERAL_IMAGE
from llava_ds.data.templates import V1_SYSTEM
from llava_ds.tokenizer import as_llava

QUESTION, ANSWER = "What is </s> or <s><|im_end|><|eot_id|>?", "It<|im_end|> ends.<|im_start|></s><|eot_id|>."
TALK = [Message("human", f"<image>\n{QUESTION}"), Message("gpt", ANSWER)] * 2
PLAIN = [Message("human", "<image>\nWhat is it?"), Message("gpt", "It is.")]
TEMPLATES = ["v1", "llava_v0", "llama_2", "mpt", "chatml", "llama_3", "gemma", "phi"]


@functools.cache
def encoder_of(name: str, template: str, split: bool, im: bool = False) -> Encoder:
    return Encoder(tokenizer_of(name), EncodingOptions(template, 2048, im, split_special_tokens=split))


def encoded(encoder: Encoder, talk: list[Message], num_images: int | None = None) -> Encoded:
    marks = sum(message.text.count("<image>") for message in talk) if num_images is None else num_images
    [coded] = encoder.encode_batch([(talk, [1] * marks)])
    if isinstance(coded, DataError):
        raise coded
    return coded


def as_text(name: str, *parts: str | int) -> list[int]:
    """Ids of texts in which no special token is known, by the tokenizers library's own switch, and of ids between."""
    backend = as_llava(tokenizer_of(name)).backend_tokenizer
    backend.encode_special_tokens = True
    try:
        coded = (
            [part] if isinstance(part, int) else backend.encode(part, add_special_tokens=False).ids for part in parts
        )
        return [token for ids in coded for token in ids]
    finally:
        backend.encode_special_tokens = False


@pytest.mark.parametrize("name", ["llama_slow_legacy", "llama_fast_legacy", "neox", "phi", "sp_default"])
def test_special_tokens_in_messages_are_text_in_a_template_of_text(name):
    tokenizer = as_llava(tokenizer_of(name))
    end = tokenizer.convert_tokens_to_ids("</s>")
    first = encoder_of(name, "v1", True).first_ids
    known = end is not None and end != tokenizer.unk_token_id
    coded = encoded(encoder_of(name, "v1", True), TALK)
    if known:
        behind = [-200, *as_text(name, f"\n{QUESTION} ASSISTANT: {ANSWER}"), end]
        expected = [*first, *as_text(name, f"{V1_SYSTEM} USER: "), *behind, *as_text(name, "USER: "), *behind]
        assert coded.input_ids.tolist() == expected
        assert (coded.input_ids == end).sum() == 2 and coded.input_ids[-1] == coded.labels[-1] == end
    prompt = encoder_of(name, "v1", True).prompt_ids(TALK[:3], [1, 1])
    assert coded.input_ids[: len(prompt)].tolist() == prompt  # what chat and evaluation ask


@pytest.mark.parametrize(("name", "template"), [("qwen", "chatml"), ("llama3", "llama_3")])
def test_special_tokens_in_messages_are_text_in_a_template_of_tokens(name, template):
    token = as_llava(tokenizer_of(name)).convert_tokens_to_ids
    coded = encoded(encoder_of(name, template, True), TALK)
    if template == "chatml":
        start, end = token("<|im_start|>"), token("<|im_end|>")
        turn = [start, "user\n", -200, f"\n{QUESTION}", end, "\n", start, f"assistant\n{ANSWER}", end, "\n"]
        parts = [start, "system\nYou are a helpful assistant.", end, "\n", *turn, *turn]
    else:
        start, end, eot = (token(f"<|{each}|>") for each in ("start_header_id", "end_header_id", "eot_id"))
        system = encoder_of(name, template, True).template.system
        turn = [start, "user", end, "\n\n", -200, f"\n{QUESTION}", eot, start, "assistant", end, f"\n\n{ANSWER}", eot]
        parts = [token("<|begin_of_text|>"), start, "system", end, f"\n\n{system}", eot, *turn, *turn]
    assert coded.input_ids.tolist() == as_text(name, *parts)
    # LLaVA-NeXT learns the template's marks wherever they stand: those of a question are none now.
    assert not any((coded.labels == i).sum() > (coded.input_ids == i).sum() for i in parts if isinstance(i, int))


QUICK = ("llama_slow_legacy", "llama3", "qwen", "phi")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in TOKENIZERS]


@pytest.mark.parametrize("name", EVERY)
def test_other_text_is_encoded_alike(name):
    for template in TEMPLATES:
        for im in (False, True):
            one, other = (encoded(encoder_of(name, template, split, im), PLAIN) for split in (False, True))
            assert one.input_ids.tolist() == other.input_ids.tolist(), (template, im)
            assert one.labels.tolist() == other.labels.tolist(), (template, im)


@pytest.mark.parametrize(("name", "template"), [("llama_slow_legacy", "v1"), ("qwen", "chatml")])
def test_without_the_option_they_are_tokens_as_in_llava(name, template):
    marker = {"v1": "</s>", "chatml": "<|im_end|>"}[template]
    end = as_llava(tokenizer_of(name)).convert_tokens_to_ids(marker)
    without, split = (encoded(encoder_of(name, template, each), TALK).input_ids for each in (False, True))
    spelled = sum(message.text.count(marker) for message in TALK)
    assert (without == end).sum() == (split == end).sum() + spelled


@pytest.mark.parametrize(("name", "template"), [("llama_slow_legacy", "v1"), ("qwen", "chatml"), ("llama3", "llama_3")])
@pytest.mark.parametrize("split", [False, True])
def test_a_mark_that_shows_nothing_is_read_as_text(name, template, split):
    talk = [Message("human", f"Why {LITERAL_IMAGE}?"), Message("gpt", "So.")]
    encoder = encoder_of(name, template, split)
    coded = encoded(encoder, talk, 0)
    spelled = encoder.backend.encode(" <image>?", add_special_tokens=False).ids[-3:]
    assert -200 not in coded.input_ids
    assert any(coded.input_ids[i : i + 3].tolist() == spelled for i in range(len(coded.input_ids)))


@pytest.mark.parametrize("text", ["\ufdd2image\ufdd3", "a\ufdd4" + "0\ufdd5", "\ufdef"])
def test_noncharacters_are_refused(text):
    with pytest.raises(DataError, match=r"a text contains U\+FD[DE].,? not a character in Unicode: take it out"):
        encoded(encoder_of("qwen", "chatml", True), [Message("human", text), Message("gpt", "So.")])
    with pytest.raises(DataError, match="not a character in Unicode"):
        encoder_of("qwen", "chatml", False).prompt_ids([Message("human", text)], [])
