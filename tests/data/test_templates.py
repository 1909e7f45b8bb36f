"""Conversations as text, against LLaVA's rules written out once more."""

import pytest

from llava_ds.constants import DataError
from llava_ds.data.templates import V1_SYSTEM, Message, image_first, render, render_prompt


def human(text: str) -> Message:
    return Message("human", text)


def gpt(text: str) -> Message:
    return Message("gpt", text)


def joined(messages: list[Message], template: str) -> str:
    return "".join(segment.text for segment in render(messages, template))


def supervised(messages: list[Message], template: str) -> list[str]:
    return [segment.text for segment in render(messages, template) if segment.supervised]


def test_v1_is_vicunas_text():
    talk = [human("What is it?<image>"), gpt("A cat."), human("Sure?"), gpt("Yes.")]
    assert joined(talk, "v1") == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: <image>\nWhat is it? ASSISTANT: A cat.</s>"
        "USER: Sure? ASSISTANT: Yes.</s>"
    )
    assert supervised(talk, "v1") == ["A cat.</s>", "Yes.</s>"]


def test_plain_is_the_picture_and_its_caption():
    talk = [human("Describe it.\n<image>"), gpt(" A cat. ")]
    assert joined(talk, "plain") == "<image> A cat. \n"
    assert supervised(talk, "plain") == [" A cat. \n"]


def test_an_opening_answer_is_dropped_as_in_llava():
    talk = [gpt("Hello!"), human("Who?"), gpt("Me.")]
    assert joined(talk, "v1") == joined(talk[1:], "v1")


def test_a_role_that_says_nothing_gets_neither_space_nor_end_marker():
    assert joined([human("Go on."), gpt("")], "v1") == f"{V1_SYSTEM} USER: Go on. ASSISTANT:"
    assert supervised([human("Go on."), gpt("")], "v1") == []
    assert joined([human(""), gpt("Hm.")], "v1") == f"{V1_SYSTEM} USER:ASSISTANT: Hm.</s>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<image>\nWhat?", "<image>\nWhat?"),
        ("What?\n<image>", "<image>\nWhat?"),
        ("  Look <image> here ", "<image>\nLook  here"),
        ("<image>", "<image>"),
        ("no picture ", "no picture "),
        ("<image> or <image>?", "<image> or <image>?"),
    ],
)
def test_image_first(text, expected):
    assert image_first(text) == expected


@pytest.mark.parametrize("template", ["v1", "plain"])
def test_a_prompt_is_the_beginning_of_what_training_saw(template):
    talk = [human("<image>\nWhat?"), gpt("A cat."), human("And?"), gpt("No more.")]
    for turns in (1, 3) if template == "v1" else (1,):
        prompt = render_prompt(talk[:turns], template)
        whole = joined(talk[: turns + 1], template)
        rest = {"v1": f" {talk[turns].text}</s>", "plain": f"{talk[turns].text}\n"}[template]
        assert prompt + rest == whole


@pytest.mark.parametrize(
    ("messages", "template", "expected"),
    [
        ([], "v1", "there is no question in the conversation"),
        ([gpt("Hello.")], "v1", "there is no question in the conversation"),
        ([human("a"), human("b")], "v1", "turn 1 is from 'human', expected 'gpt': questions and answers alternate"),
        ([human("a"), gpt("b")], "plain", "the plain template takes one question with one <image> and one answer"),
        ([human("<image>")], "plain", "the plain template takes one question with one <image> and one answer"),
        ([gpt("b"), human("<image>")], "plain", "found gpt with 0 <image>, human with 1 <image>"),
        (
            [human("<image>"), gpt("b"), human("c")],
            "plain",
            "found human with 1 <image>, gpt with 0 <image>, human with 0 <image>",
        ),
        # One picture would be shown in the place of another, or not at all.
        ([human("<image><image>"), gpt("b")], "plain", "the plain template takes one question with one <image>"),
        ([gpt("<image>"), human("<image>"), gpt("b")], "v1", "<image>"),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages, template, expected):
    with pytest.raises(DataError) as caught:
        render(messages, template)
    assert expected in str(caught.value)
