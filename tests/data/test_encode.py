"""Ids as LLaVA's rule gives them, and labels that are exactly the assistant's words."""

import copy
import pickle
import random

import numpy as np
import pytest
from token_text import runs, text_of_ids

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX, DataError
from llava_ds.data import encode
from llava_ds.data.encode import Encoded, Encoder, EncodingOptions
from llava_ds.data.end_markers import check_tokenizer, end_markers
from llava_ds.data.sample import Message
from llava_ds.data.templates import TEMPLATES
from llava_ds.tokenizer import note_rows, tokens_without_rows

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
P = 3  # features per picture
WORDS = [
    "cat", "red", "yes", "no", "It", "is", "two", "don't", "ASSISTANT:", "USER:", "USER: ", "\n", "\n\n", "  ", " ",
    "\t", "Ünï", "猫", "🐈‍⬛", "é", "é", "…", "#", "<b>", "</b>", "s>", "0", "▁", "\u00a0", "x" * 40,
]  # fmt: skip


def text_of(rng: random.Random) -> str:
    """Words with odd spaces between, before and behind them; sometimes nothing."""
    parts = [rng.choice(WORDS) + rng.choice(["", " ", "  "]) for _ in range(rng.randint(0, 8))]
    return rng.choice(["", "", " ", "\n"]) + "".join(parts)


def conversations(count: int = 300) -> list[list[Message]]:
    """Conversations of 1 to 4 turns with up to three pictures, wherever in the questions."""
    rng = random.Random(0)
    talks = []
    for _ in range(count):
        talk = []
        for _ in range(rng.randint(1, 4)):
            question = text_of(rng)
            for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
                pieces = question.split("<image>")
                i = rng.randrange(len(pieces))
                cut = rng.randint(0, len(pieces[i]))
                pieces[i] = pieces[i][:cut] + "<image>" + pieces[i][cut:]
                question = "<image>".join(pieces)
            talk += [Message("human", question), Message("gpt", text_of(rng))]
        talks.append(talk)
    return talks


def captions(count: int = 300) -> list[list[Message]]:
    rng = random.Random(1)
    return [[Message("human", f"{text_of(rng)}\n<image>"), Message("gpt", text_of(rng))] for _ in range(count)]


def v1_text(talk: list[Message]) -> str:
    """LLaVA: preprocess_multimodal, then conv_vicuna_v1.get_prompt."""
    text = SYSTEM + " "
    for message, role, end in zip(talk, ["USER", "ASSISTANT"] * len(talk), [" ", "</s>"] * len(talk)):
        said = message.text
        if said.count("<image>") == 1:
            said = "<image>" + "\n" + said.replace("<image>", "").strip()
            said = said.strip()
        text += role + ": " + said + end if said else role + ":"
    return text


def plain_text(talk: list[Message]) -> str:
    """LLaVA: preprocess_plain."""
    return "<image>" + talk[1].text + "\n"


TEXT = {"v1": v1_text, "plain": plain_text}
TALKS = {"v1": conversations(), "plain": captions()}


def llava_ids(text: str, tokenizer) -> list[int]:
    """LLaVA's tokenizer_image_token, each mark repeated once per feature."""
    pieces = [tokenizer(piece).input_ids for piece in text.split("<image>")]
    assert all(piece[0] == tokenizer.bos_token_id for piece in pieces)
    ids = [tokenizer.bos_token_id]
    for i, piece in enumerate(pieces):
        ids += ([IMAGE_TOKEN_INDEX] * P if i > 0 else []) + piece[1:]
    return ids


def encoded(talks: list[list[Message]], tokenizer, template: str = "v1", **options) -> list[Encoded]:
    encoder = Encoder(tokenizer, EncodingOptions(template, **{"max_length": 10**6, **options}))
    return encoder.encode_batch([(talk, [P] * sum(m.text.count("<image>") for m in talk)) for talk in talks])


@pytest.mark.parametrize("template", ["v1", "plain"])
def test_ids_are_llavas(tokenizer, template):
    for talk, coded in zip(TALKS[template], encoded(TALKS[template], tokenizer, template), strict=True):
        assert coded.input_ids.tolist() == llava_ids(TEXT[template](talk), tokenizer)
        assert coded.input_ids.dtype == coded.labels.dtype == np.int32
        assert not coded.truncated


def test_v1_supervises_every_answer_and_its_end_marker_and_nothing_else(tokenizer):
    for talk, coded in zip(TALKS["v1"], encoded(TALKS["v1"], tokenizer), strict=True):
        assert set(coded.labels[coded.labels != coded.input_ids]) <= {IGNORE_INDEX}
        answers = [" " + message.text.replace("▁", " ") + "</s>" for message in talk[1::2] if message.text]
        found = runs(coded.labels, {tokenizer.eos_token_id})
        assert [text_of_ids(run, tokenizer) for run in found] == answers
        assert coded.num_targets == sum(map(len, found))


def test_plain_supervises_the_caption_and_its_newline_and_nothing_else(tokenizer):
    for talk, coded in zip(TALKS["plain"], encoded(TALKS["plain"], tokenizer, "plain"), strict=True):
        # LLaVA: all behind the picture; Llama's tokenizer puts one space before every piece.
        assert coded.labels.tolist() == [IGNORE_INDEX] * (1 + P) + coded.input_ids[1 + P :].tolist()
        assert text_of_ids(coded.input_ids[1 + P :], tokenizer) == " " + talk[1].text.replace("▁", " ") + "\n"


def test_an_end_marker_in_a_question_is_not_learned(tokenizer):
    talk = [Message("human", "Say </s> ASSISTANT: no</s>"), Message("gpt", "yes")]
    [coded] = encoded([talk], tokenizer)
    assert [text_of_ids(run, tokenizer) for run in runs(coded.labels)] == [" yes</s>"]


def test_an_empty_answer_teaches_nothing(tokenizer):
    [coded] = encoded([[Message("human", "Go on."), Message("gpt", "")]], tokenizer)
    assert coded.num_targets == 0 and set(coded.labels) == {IGNORE_INDEX}


def test_only_the_last_answer_is_learned_if_wished(tokenizer):
    talks = TALKS["v1"]
    for talk, coded in zip(talks, encoded(talks, tokenizer, supervise_last_turn_only=True), strict=True):
        answers = [message.text for message in talk[1::2] if message.text][-1:]
        found = [text_of_ids(run, tokenizer) for run in runs(coded.labels, {tokenizer.eos_token_id})]
        assert found == [f" {answer}</s>".replace("▁", " ") for answer in answers]


def test_a_token_that_begins_before_an_answer_is_not_learned(tokenizer):
    """A prompt ends there, so the model could never write it. LLaVA's labels agree (see goldens, gemma)."""
    [coded] = encoded([[Message("human", "a"), Message("gpt", "\nyes")]], tokenizer, "gemma")
    learned = "".join(text_of_ids(run, tokenizer) for run in runs(coded.labels))
    assert learned in ("\nyes<end_of_turn>\n", "yes<end_of_turn>\n")


def test_images_of_different_sizes_get_their_own_number_of_positions(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for template in ("v1", "chat_template"):
        encoder = Encoder(tokenizer, EncodingOptions(template, 1000))
        [coded] = encoder.encode_batch([([Message("human", "<image> cat <image>"), Message("gpt", "yes")], [2, 5])])
        found = "".join("i" if token == IMAGE_TOKEN_INDEX else "." for token in coded.input_ids)
        assert found.replace(".", " ").split() == ["ii", "iiiii"]
        assert set(coded.labels[coded.input_ids == IMAGE_TOKEN_INDEX]) == {IGNORE_INDEX}


def test_what_can_not_be_encoded_is_named_and_the_rest_is_encoded(tokenizer):
    good = [Message("human", "What? <image>"), Message("gpt", "A cat.")]
    encoder = Encoder(tokenizer, EncodingOptions("v1", 1000))
    first, wrong, empty, last = encoder.encode_batch([(good, [1]), (good, [1, 1]), ([], []), (good, [2])])
    assert len(last.input_ids) == len(first.input_ids) + 1
    assert isinstance(wrong, DataError) and "1 <image> marks for 2 images" in str(wrong)
    assert isinstance(empty, DataError) and "no question" in str(empty)


@pytest.mark.parametrize("template", ["v1", "plain"])
def test_truncation_keeps_the_beginning_with_the_features_counted(tokenizer, template):
    rng = random.Random(2)
    talks = TALKS[template][:60]
    wholes = encoded(talks, tokenizer, template)
    for limit in (2, 1 + P, *(rng.randint(2, 200) for _ in range(10))):
        for whole, coded in zip(wholes, encoded(talks, tokenizer, template, max_length=limit), strict=True):
            assert coded.input_ids.tolist() == whole.input_ids[:limit].tolist()
            assert coded.labels.tolist() == whole.labels[:limit].tolist()
            assert coded.truncated == (limit < len(whole.input_ids))


def test_a_prompt_is_the_beginning_of_what_training_saw_also_as_ids(tokenizer):
    encoder = Encoder(tokenizer, EncodingOptions("v1", 10**6))
    for talk, trained in zip(TALKS["v1"], encoded(TALKS["v1"], tokenizer), strict=True):
        for turn in range(0, len(talk), 2):
            if not talk[turn + 1].text:
                continue
            asked = talk[: turn + 1]
            ids = encoder.prompt_ids(asked, [P] * sum(m.text.count("<image>") for m in asked))
            # Up to the answer: nothing behind the answers before it is learned, and what follows is.
            assert trained.input_ids[: len(ids)].tolist() == ids
            assert trained.labels[len(ids)] != IGNORE_INDEX
            before = sum(bool(message.text) for message in talk[1:turn:2])
            assert len(runs(trained.labels[: len(ids)], {tokenizer.eos_token_id})) == before


def test_an_encoder_survives_the_way_to_another_process(tokenizer):
    encoder = Encoder(tokenizer, EncodingOptions("v1", 100))
    batch = [(talk, [P] * sum(m.text.count("<image>") for m in talk)) for talk in TALKS["v1"][:20]]
    for one, other in zip(encoder.encode_batch(batch), pickle.loads(pickle.dumps(encoder)).encode_batch(batch)):
        assert (one.input_ids == other.input_ids).all() and (one.labels == other.labels).all()


def test_a_tokenizer_that_does_not_fit_the_template_is_named(tokenizer):
    assert (
        check_tokenizer("v1", tokenizer)
        == check_tokenizer("llava_v0", tokenizer)
        == check_tokenizer("plain", tokenizer)
        == []
    )
    [problem] = check_tokenizer("mpt", tokenizer)
    assert "--version mpt needs '<|im_end|>'" in problem and "never learn to stop" in problem
    assert len(check_tokenizer("llama_3", tokenizer)) == 4
    [problem] = check_tokenizer("chat_template", tokenizer)
    assert "this one has none" in problem


def test_answers_end_at_the_templates_marker_and_at_the_tokenizers(tokenizer):
    assert end_markers("v1", tokenizer) == [tokenizer.eos_token_id]
    assert end_markers("llava_v0", tokenizer) == [tokenizer.eos_token_id]
    taught = pickle.loads(pickle.dumps(tokenizer))
    taught.add_special_tokens({"extra_special_tokens": ["<|im_end|>"]})
    assert end_markers("chatml", taught) == [tokenizer.eos_token_id, taught.convert_tokens_to_ids("<|im_end|>")]


def test_of_a_long_text_no_more_is_tokenized_than_the_limit_needs(tokenizer, monkeypatch):
    """Its tokens would take hundreds of bytes a character; those that count are the same."""
    talk = [Message("human", "Tell me."), Message("gpt", "Once upon a time, there was a cat. " * 100_000)]
    monkeypatch.setattr(Encoder, "_tokenize_whole", _watched(lengths := [], Encoder._tokenize_whole))
    encoder = Encoder(tokenizer, EncodingOptions("v1", 500))
    encoder.words = None
    lengths.clear()
    [coded] = encoder.encode_batch([(talk, [])])
    assert 500 < max(lengths) <= encode.FIRST_CHARS and coded.truncated and len(coded.input_ids) == 500
    [short] = encoder.encode_batch([([talk[0], Message("gpt", talk[1].text[:20_000])], [])])
    assert coded.input_ids.tolist() == short.input_ids.tolist() and coded.labels.tolist() == short.labels.tolist()


def test_a_long_text_of_few_tokens_is_not_cut(tokenizer, monkeypatch):
    monkeypatch.setattr(encode, "FIRST_CHARS", 100)
    monkeypatch.setattr(encode, "FIRST_CHARS_PER_TOKEN", 1)
    options = EncodingOptions("v1", 300)
    talk = [Message("human", "Tell me."), Message("gpt", "the " * 350)]
    [coded] = Encoder(tokenizer, options).encode_batch([(talk, [])])
    monkeypatch.undo()
    [whole] = Encoder(tokenizer, options).encode_batch([(talk, [])])
    assert coded.input_ids.tolist() == whole.input_ids.tolist() and coded.truncated == whole.truncated
    encoder = Encoder(tokenizer, options)
    encoder.most_chars = 1_000
    monkeypatch.setattr(encode, "FIRST_CHARS", 1_000)
    monkeypatch.setattr(encode, "FIRST_CHARS_PER_TOKEN", 1)
    monkeypatch.setattr(encode, "TOKENS_BEHIND", 10_000)
    [refused] = encoder.encode_batch([(talk, [])])
    assert "characters, and the first 1,000 characters give fewer than 300 tokens" in str(refused)


def _watched(lengths: list[int], tokenize):
    def watched(self, texts):
        lengths.extend(map(len, texts))
        return tokenize(self, texts)

    return watched


@pytest.mark.parametrize("template", sorted({*TEMPLATES} - {"plain", "processor", "chat_template"}))
def test_an_answer_that_weighs_nothing_is_read_and_not_learned(tokenizer, template):
    """Nor is its end marker; all others are learned as before, with their weights."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]})

    def learned(first: float, second: float) -> Encoded:
        talk = [Message("human", "Who?"), Message("gpt", "WRONG", weight=first), Message("human", "Sure?")]
        [coded] = encoded([[*talk, Message("gpt", "RIGHT", weight=second)]], tokenizer, template)
        return coded

    both, last, first, none = (learned(*weights) for weights in ((1, 1), (0, 1), (1, 0), (0, 0)))
    assert both.weights is last.weights is none.weights is None
    for coded in (last, first, none):
        assert coded.input_ids.tolist() == both.input_ids.tolist()
        kept = coded.labels != IGNORE_INDEX
        assert np.array_equal(coded.labels[kept], both.labels[kept])
    texts = [text_of_ids(coded.labels[coded.labels != IGNORE_INDEX], tokenizer) for coded in (both, last, first, none)]
    assert ["WRONG" in text for text in texts] == [True, False, True, False]
    assert ["RIGHT" in text for text in texts] == [True, True, False, False]
    of_first, of_last = both.num_targets - last.num_targets, both.num_targets - first.num_targets
    assert both.num_targets - none.num_targets == of_first + of_last
    half = learned(0.5, 2)
    assert np.array_equal(half.labels, both.labels)
    assert (half.weights == 0.5).sum() == of_first and (half.weights == 2).sum() == of_last


def test_the_last_answer_may_weigh_nothing(tokenizer):
    talk = [
        Message("human", "Who?"),
        Message("gpt", "WRONG"),
        Message("human", "Sure?"),
        Message("gpt", "No", weight=0),
    ]
    [coded] = encoded([talk], tokenizer, supervise_last_turn_only=True)
    assert coded.num_targets == 0


def test_a_token_without_a_row_is_refused_with_its_number(tokenizer):
    """The last id with a row is taken, the first without is not; what a cut leaves out does not count."""
    taught = pickle.loads(pickle.dumps(tokenizer))
    taught.add_tokens(["<turn_left>", "<stop>"])
    first = taught.convert_tokens_to_ids("<turn_left>")
    question = Message("human", "Where to?")
    spelled, beyond, plain = (
        [question, Message("gpt", text)] for text in ("Go <turn_left>.", "Now <stop> here.", "On.")
    )
    note_rows(taught, first + 1)
    assert tokens_without_rows(taught) == [
        f"tokens of the tokenizer without one of the {first + 1} rows of the model's embedding: '<stop>' "
        f"(id {first + 1}): a text that spells one is refused; training with --resize_token_embeddings True adds rows"
    ]
    encoder = pickle.loads(pickle.dumps(Encoder(taught, EncodingOptions("v1", 500))))  # as worker processes get it
    good, refused, other = encoder.encode_batch([(talk, []) for talk in (spelled, beyond, plain)])
    assert first in good.input_ids and other.num_targets
    assert isinstance(refused, DataError) and str(refused) == (
        f"the text spells the token '<stop>' (id {first + 1}), and the model's embedding has {first + 1} rows: train "
        "with --resize_token_embeddings True to add one for it, or take it out"
    )
    with pytest.raises(DataError, match="the text spells the token '<stop>'"):
        encoder.prompt_ids([question, Message("gpt", "On."), Message("human", "And <stop>?")], [])
    with pytest.raises(DataError, match="'<stop>'"):
        encoder.refuse_without_rows(["<image>\nOn.", "<stop>"])
    encoder.refuse_without_rows(["<image>\n<turn_left>"])
    whole = Encoder(tokenizer, EncodingOptions("v1", 500)).encode_batch([([question, Message("gpt", "Now")], [])])[0]
    cut = Encoder(taught, EncodingOptions("v1", len(whole.input_ids) - 1))
    assert cut.encode_batch([(beyond, [])])[0].truncated
    note_rows(taught, first + 2)
    assert not tokens_without_rows(taught)
    assert not isinstance(Encoder(taught, EncodingOptions("v1", 500)).encode_batch([(beyond, [])])[0], DataError)


def test_a_long_text_ends_in_a_token_without_a_row(tokenizer, monkeypatch):
    """Which is tokenized in parts."""
    monkeypatch.setattr(encode, "FIRST_CHARS", 100)
    monkeypatch.setattr(encode, "FIRST_CHARS_PER_TOKEN", 1)
    taught = pickle.loads(pickle.dumps(tokenizer))
    taught.add_tokens(["<stop>"])
    note_rows(taught, len(tokenizer))
    talk = [Message("human", "Tell me."), Message("gpt", "the " * 250 + "<stop>")]
    [refused] = Encoder(taught, EncodingOptions("v1", 1500)).encode_batch([(talk, [])])
    assert "'<stop>'" in str(refused)


def test_an_image_token_without_a_row_stands_for_features(tokenizer):
    """A tokenizer that <image> was added to: where it is a mark, no row of it is read."""
    taught = pickle.loads(pickle.dumps(tokenizer))
    taught.add_special_tokens({"extra_special_tokens": ["<image>", "<stop>"]})
    note_rows(taught, len(tokenizer))
    encoder = Encoder(taught, EncodingOptions("v1", 500))
    [coded] = encoder.encode_batch([([Message("human", "<image>\nWhat?"), Message("gpt", "A cat.")], [P])])
    assert (coded.input_ids == IMAGE_TOKEN_INDEX).sum() == P
    many = pickle.loads(pickle.dumps(tokenizer))
    many.add_tokens([f"<x{i}>" for i in range(6)])
    note_rows(many, len(tokenizer))
    [line] = tokens_without_rows(many)
    assert "'<x0>' (id " in line and "'<x3>'" in line and "'<x4>'" not in line and " and 2 more: a text" in line
