"""Word by word the ids and beginnings are the library's own, whatever the text; and words are remembered."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from llava_ds.data import words as words_module
from llava_ds.data.words import _BYTE_LEVEL_SPLITS, WordTokenizer
from llava_ds.tiny.tokenizer import train_tokenizer
from llava_ds.tokenizer import SPACE, copy_of_backend

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
    "qwen": lambda: byte_level(_BYTE_LEVEL_SPLITS[0], normalizers.NFC()),
    "llama 3": lambda: byte_level(_BYTE_LEVEL_SPLITS[1]),
}
SLOW = {
    "another split": lambda: byte_level(r"\S+ ?"),
    "lower case": lambda: byte_level(None, normalizers.Lowercase()),
}


def texts(number: int) -> list[str]:
    rng = random.Random(7)
    return ["", " ", *("".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(number))]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_ids_and_beginnings_are_the_librarys(name, monkeypatch):
    monkeypatch.setattr(words_module, "MAX_WORDS", 300)  # so that it starts anew now and then
    backend = backend_of({**FAST, **SLOW}[name]())
    words = WordTokenizer(backend)
    assert (words.later is not None) == (name in FAST)
    every = texts(3000)
    for i in range(0, len(every), 50):
        some = every[i : i + 50]
        expected = [
            (coded.ids, [start for start, _ in coded.offsets])
            for coded in backend.encode_batch(some, add_special_tokens=False)
        ]
        for text, mine, theirs in zip(some, words(some), expected, strict=True):
            assert mine == theirs, repr(text)


def test_a_token_that_takes_its_surroundings_is_left_to_the_library():
    backend = sentencepiece()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert WordTokenizer(backend_of(backend)).later is None


def test_known_words_are_not_tokenized_again():
    words = WordTokenizer(backend_of(sentencepiece()))
    before = list(words(["What is it? It is a cat."]))
    words.backend = words.later = None
    words.later = object()
    assert list(words(["What is it? It is a cat."])) == before
