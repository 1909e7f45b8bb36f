"""Word by word the ids and beginnings are the library's own, whatever the text; and words are remembered."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llava_ds.data import word_tokenizer as words_module
from llava_ds.data.word_tokenizer import WholeRow, words_of
from llava_ds.tiny.build_tokenizer import train_tokenizer
from llava_ds.tokenizer import SPACE, copy_of_backend

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
CORPUS = ["What is it, number 12? There's no dog here.\n\nIt is\ta red cat!  Two  cats. 猫です café"] * 3
PIECES = [
    *[
        "What",
        "is",
        "cat",
        "'s",
        "’s",
        "12",
        "3",
        "!",
        "?!",
        "...",
        "(",
        "猫",
        "🦙",
        "é",
        "e\u0301",
        "\u0301",
        "x" * 40,
    ],
    *[
        " ",
        " ",
        " ",
        " ",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\xa0",
        "\u3000",
        "\x1c",
        "\x85",
        "\u200b",
        "\0",
    ],
    *["</s>", "<s>", "<image>", "▁", "▁▁", "<0x41>", "<", "\0first ", "\0inner ", "\u2028", "\ufeff", "\u180e"],
]


def sentencepiece(first_only: bool = False) -> Tokenizer:
    backend = train_tokenizer(CORPUS, max_vocab_size=420)
    if first_only:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    return backend


def byte_level(split: str | None, normalizer=None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last]) if first else last
    backend.normalizer, backend.decoder = normalizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return backend


def backend_of(tokenizer: Tokenizer) -> Tokenizer:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    return copy_of_backend(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named))


FAST = {
    "llama": lambda: sentencepiece(),
    "llama, space at the beginning only": lambda: sentencepiece(first_only=True),
    "gpt2": lambda: byte_level(None),
    "qwen": lambda: byte_level(QWEN, normalizers.NFC()),
    "llama 3": lambda: byte_level(LLAMA_3),
}
SLOW = {"words with the space behind them": lambda: byte_level(r"\S+ ?")}


def texts(number: int) -> list[str]:
    rng = random.Random(7)
    joined = ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(number // 2)]
    spaced = [" ".join(rng.choices(PIECES, k=rng.randint(2, 9))) for _ in range(number // 2)]
    return ["", " ", *joined, *spaced]


def whole(backend: Tokenizer, some: list[str]) -> list[WholeRow]:
    return [WholeRow(c.ids, c.offsets) for c in backend.encode_batch(some, add_special_tokens=False)]


def words_for(backend: Tokenizer):
    return words_of(lambda some: ((row.ids, row.offsets) for row in whole(backend, some)), backend)


@pytest.mark.parametrize("name", FAST)
def test_ids_and_beginnings_are_the_librarys(name, monkeypatch):
    monkeypatch.setattr(words_module, "MAX_KNOWN", 300)  # so that it starts anew now and then
    backend = backend_of(FAST[name]())
    words = words_for(backend)
    every = texts(2000)
    for i in range(0, len(every), 50):
        some = every[i : i + 50]
        for text, mine, theirs in zip(some, words(some), whole(backend, some), strict=True):
            assert mine.ids == theirs.ids, repr(text)
            places = range(len(text) + 1)
            assert mine.tokens_before(places) == theirs.tokens_before(places), repr(text)


@pytest.mark.parametrize("name", SLOW)
def test_a_tokenizer_that_reaches_over_spaces_is_left_to_the_library(name):
    assert words_for(backend_of(SLOW[name]())) is None


def test_tokens_of_several_words_are_left_to_the_library():
    backend = sentencepiece()
    backend.add_special_tokens([AddedToken("two words")])
    assert words_for(backend_of(backend)) is None


def test_known_words_are_not_tokenized_again():
    backend = backend_of(sentencepiece())
    words = words_for(backend)
    [before] = words(["What is it? It is a cat."])
    words.tokenize = lambda some: iter([]) if not some else pytest.fail(f"again: {some}")
    [again] = words(["What is it? It is a cat."])
    assert again.ids == before.ids


def test_a_process_tries_each_tokenizer_once(monkeypatch):
    tried = []
    monkeypatch.setattr(words_module, "_RULES", {})
    monkeypatch.setattr(words_module, "_probes", lambda added: tried.append(added) or ["a b"])
    plain, other = backend_of(sentencepiece()), sentencepiece()
    other.add_special_tokens([AddedToken("two words")])
    for _ in range(2):
        assert words_for(plain) is not None
        assert words_for(backend_of(other)) is None  # so it is not taken for the first
    assert len(tried) == 1
    words_of(lambda some: ((row.ids, row.offsets) for row in whole(plain, some)), plain, "with a space in front")
    assert len(tried) == 2
