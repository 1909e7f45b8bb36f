"""Ids as LLaVA's rule gives them, and labels that are exactly the assistant's words."""

import random

import pytest

from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.encode import encode
from llava_ds.data.templates import Message, Segment, render, render_prompt

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
                cut = rng.randint(0, len(question))
                question = question[:cut] + "<image>" + question[cut:]
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


def encoded(segments: list[Segment], tokenizer, max_length: int = 10**6):
    pictures = "".join(segment.text for segment in segments).count("<image>")
    return encode(segments, tokenizer, [P] * pictures, max_length)


def written(ids: list[int], tokenizer) -> str:
    """The text that the ids spell, with nothing stripped."""
    spelled = b""
    for token in tokenizer.convert_ids_to_tokens(ids):
        is_byte = len(token) == 6 and token.startswith("<0x")
        spelled += bytes([int(token[3:5], 16)]) if is_byte else token.replace("▁", " ").encode()
    return spelled.decode()


def supervised_runs(coded, tokenizer) -> list[str]:
    """The text of every unbroken run of supervised positions; a run ends behind an end marker."""
    runs, run = [], []
    for label in [*coded.labels, IGNORE_INDEX]:
        if label != IGNORE_INDEX:
            run.append(label)
        if run and (label == IGNORE_INDEX or label == tokenizer.eos_token_id):
            runs.append(written(run, tokenizer))
            run = []
    return runs


@pytest.mark.parametrize("template", ["v1", "plain"])
def test_ids_are_llavas(tokenizer, template):
    for talk in TALKS[template]:
        coded = encoded(render(talk, template), tokenizer)
        assert coded.input_ids == llava_ids(TEXT[template](talk), tokenizer)
        assert coded.input_ids.count(tokenizer.bos_token_id) == 1
        assert not coded.truncated


def test_v1_supervises_every_answer_and_its_end_marker_and_nothing_else(tokenizer):
    for talk in TALKS["v1"]:
        coded = encoded(render(talk, "v1"), tokenizer)
        assert all(label in (IGNORE_INDEX, token) for label, token in zip(coded.labels, coded.input_ids))
        answers = [message.text.replace("▁", " ") + "</s>" for message in talk[1::2] if message.text]
        runs = supervised_runs(coded, tokenizer)
        assert len(runs) == len(answers)
        for run, answer in zip(runs, answers):
            # The space that separates an answer from "ASSISTANT:" belongs to its first token where they are one.
            assert run in (answer, " " + answer)
        assert coded.num_targets == sum(label != IGNORE_INDEX for label in coded.labels)


def test_plain_supervises_the_caption_and_its_newline_and_nothing_else(tokenizer):
    for talk in TALKS["plain"]:
        coded = encoded(render(talk, "plain"), tokenizer)
        assert coded.labels == [IGNORE_INDEX] * (1 + P) + coded.input_ids[1 + P :]  # LLaVA: all behind the picture
        # Llama's tokenizer puts one space before every piece.
        assert supervised_runs(coded, tokenizer) == [" " + talk[1].text.replace("▁", " ") + "\n"]


def test_a_decoded_answer_is_the_answer(tokenizer):
    talk = [Message("human", "<image>\nWhat?"), Message("gpt", "It is a red cat."), Message("human", "Sure?")]
    talk.append(Message("gpt", "Ünï 猫, yes."))
    coded = encoded(render(talk, "v1"), tokenizer)
    end = coded.labels.index(tokenizer.eos_token_id)
    for part, answer in ((coded.labels[: end + 1], talk[1].text), (coded.labels[end + 1 :], talk[3].text)):
        assert tokenizer.decode([label for label in part if label != IGNORE_INDEX]) == answer + "</s>"


def test_an_end_marker_in_a_question_is_not_learned(tokenizer):
    talk = [Message("human", "Say </s> ASSISTANT: no</s>"), Message("gpt", "yes")]
    coded = encoded(render(talk, "v1"), tokenizer)
    assert supervised_runs(coded, tokenizer) == [" yes</s>"]


def test_an_empty_answer_teaches_nothing(tokenizer):
    coded = encoded(render([Message("human", "Go on."), Message("gpt", "")], "v1"), tokenizer)
    assert coded.num_targets == 0 and set(coded.labels) == {IGNORE_INDEX}


def test_pictures_of_different_sizes_get_their_own_number_of_positions(tokenizer):
    segments = [Segment("<image> cat <image>", False), Segment("yes", True)]
    ids = encode(segments, tokenizer, [2, 5], 100).input_ids
    runs = "".join("i" if token == IMAGE_TOKEN_INDEX else "." for token in ids).replace(".", " ").split()
    assert runs == ["ii", "iiiii"]


@pytest.mark.parametrize("template", ["v1", "plain"])
def test_truncation_keeps_the_beginning_with_the_features_counted(tokenizer, template):
    rng = random.Random(2)
    for talk in TALKS[template][:60]:
        segments = render(talk, template)
        whole = encoded(segments, tokenizer)
        length = len(whole.input_ids)
        for limit in (2, 1 + P, length - 1, length, length + 1, rng.randint(2, length)):
            coded = encoded(segments, tokenizer, limit)
            assert coded.input_ids == whole.input_ids[:limit]
            assert coded.labels == whole.labels[:limit]
            assert coded.truncated == (limit < length)


@pytest.mark.parametrize("template", ["v1", "plain"])
def test_a_prompt_is_the_beginning_of_what_training_saw_also_as_ids(tokenizer, template):
    for talk in TALKS[template]:
        trained = encoded(render(talk, template), tokenizer)
        for turn in range(0, len(talk), 2):
            if not talk[turn + 1].text:
                continue
            ids = encoded([Segment(render_prompt(talk[: turn + 1], template), False)], tokenizer).input_ids
            # Up to the answer: nothing in the prompt is learned, and what follows is.
            assert trained.input_ids[: len(ids)] == ids
            runs_before = supervised_runs(encoded(render(talk[:turn], template), tokenizer), tokenizer) if turn else []
            part = type(trained)(trained.input_ids[: len(ids)], trained.labels[: len(ids)], False)
            assert supervised_runs(part, tokenizer) == runs_before
