"""Conversations as text, against LLaVA's rules written out once more."""

import pytest

from llava_ds.constants import ConfigError, DataError
from llava_ds.data.sample import Message
from llava_ds.data.templates import (
    ALIASES,
    TEMPLATES,
    V1_SYSTEM,
    image_first,
    prepare,
    render,
    render_prompt,
    resolve_template,
)


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
    assert supervised(talk, "v1") == [" A cat.</s>", " Yes.</s>"]


TALK = [human("What?\n<image>"), gpt("A cat."), human("Sure?"), gpt("Yes.")]
# What LLaVA's and LLaVA-NeXT's get_prompt and chat templates give for TALK, without the system prompt.
WRITTEN = {
    "llava_v0": "### Human: <image>\nWhat?\n### Assistant: A cat.\n### Human: Sure?\n### Assistant: Yes.\n### ",
    "v0_mmtag": "<Image>visual content</Image>.\n\n### Human: <Image><image></Image>\nWhat?\n### Assistant: A cat.\n"
    "### Human: Sure?\n### Assistant: Yes.\n### ",
    "v1_mmtag": "<Image>visual content</Image>. USER: <Image><image></Image>\nWhat? ASSISTANT: A cat.</s>"
    "USER: Sure? ASSISTANT: Yes.</s>",
    "llava_v1": "USER: <image>\nWhat? ASSISTANT: A cat.</s>USER: Sure? ASSISTANT: Yes.</s>",
    "phi": "USER: <image>\nWhat? ASSISTANT: A cat.<|endoftext|>USER: Sure? ASSISTANT: Yes.<|endoftext|>",
    "llama_2": "<image>\nWhat? [/INST] A cat. </s><s>[INST] Sure? [/INST] Yes. </s>",
    "llava_llama_2": "<image>\nWhat? [/INST] A cat. </s><s>[INST] Sure? [/INST] Yes. </s>",
    "mistral_instruct": "[INST] <image>\nWhat? [/INST] A cat. </s>[INST] Sure? [/INST] Yes. </s>",
    **dict.fromkeys(
        ("mpt", "chatml_direct", "mistral_orca"),
        "<|im_end|><|im_start|>user\n<image>\nWhat?<|im_end|><|im_start|>assistant\nA cat.<|im_end|>"
        "<|im_start|>user\nSure?<|im_end|><|im_start|>assistant\nYes.<|im_end|>",
    ),
    "mistral_zephyr": "<|system|>\nYou are a helpful AI assistant.</s><|user|>\n<image>\nWhat?</s>"
    "<|assistant|>\nA cat.</s><|user|>\nSure?</s><|assistant|>\nYes.</s>",
    "chatml": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<image>\nWhat?<|im_end|>\n"
    "<|im_start|>assistant\nA cat.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\nYes.<|im_end|>\n",
    "llama_3": "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA cat.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>",
    "gemma": "<start_of_turn>user\n<image>\nWhat?<end_of_turn>\n<start_of_turn>model\nA cat.<end_of_turn>\n"
    "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
}  # fmt: skip


@pytest.mark.parametrize("template", WRITTEN)
def test_the_text_of_every_template(template):
    text = joined(TALK, template)
    assert text.endswith(WRITTEN[template])
    assert text.startswith({"llama_2": "[INST] <<SYS>>\n", "llava_llama_2": "[INST] <<SYS>>\n"}.get(template, ""))
    # A template that has a default system prompt writes it once, and another in its place.
    default, own = TEMPLATES[template].system, "Speak like a cat."
    assert not default or text.count(default) == 1
    assert joined([Message("system", own), *TALK], template).count(own) == 1
    assert not default or default not in joined([Message("system", own), *TALK], template)


def test_every_template_is_tested():
    assert set(WRITTEN) | {"v1", "plain", "chat_template", "processor"} == set(TEMPLATES)


def test_names_of_llava_lead_to_templates_and_other_names_are_refused_with_the_known_ones():
    for name in TEMPLATES:
        assert resolve_template(name) == name
    for alias, key in ALIASES.items():
        assert resolve_template(alias) == key
    with pytest.raises(ConfigError) as caught:
        resolve_template("vicuna")
    assert "--version vicuna is not known" in str(caught.value)
    assert all(name in str(caught.value) for name in (*TEMPLATES, *ALIASES))


@pytest.mark.parametrize(
    ("text", "first", "as_next"),
    [
        ("<image>What? ", "<image>\nWhat?", "<image>What? "),
        ("What?<image>", "<image>\nWhat?", "<image>\nWhat?"),
        ("a <image> b <image>", "a <image> b <image>", "a <image> b <image>"),
    ],
)
def test_images_stand_where_llava_or_next_put_them(text, first, as_next):
    for template, expected in (("v1", first), ("chatml", as_next)):
        [placed], _ = prepare([human(text)], template)
        assert placed.text == expected
        [placed], _ = prepare([human(text)], template, mm_use_im_start_end=True)
        assert placed.text == expected.replace("<image>", "<im_start><image><im_end>")


def test_plain_is_the_image_and_its_caption():
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


@pytest.mark.parametrize("template", sorted({*TEMPLATES} - {"chat_template", "processor"}))
def test_a_prompt_is_the_beginning_of_what_training_saw(template):
    talk = [human("<image>\nWhat?"), gpt("A cat."), human("And?"), gpt("No more.")]
    for turns in (1, 3) if template != "plain" else (1,):
        prompt = render_prompt(talk[:turns], template)
        whole = joined(talk[: turns + 1], template)
        assert whole.startswith(prompt)
        assert whole[len(prompt) :].lstrip().startswith(talk[turns].text)


@pytest.mark.parametrize(
    ("messages", "template", "expected"),
    [
        ([], "v1", "the conversation has no question"),
        ([gpt("Hello.")], "v1", "the conversation has no question"),
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
        ([human(""), gpt("b")], "llama_2", "the first question has no text"),
        ([Message("system", "a"), human("<image>"), gpt("b")], "plain", "the plain template has no system message"),
        ([Message("system", "<image>"), human("a"), gpt("b")], "v1", "the system message has an <image> mark"),
        ([human("a"), Message("system", "b")], "chatml", "turn 1 is from 'system', expected 'human' or 'gpt'"),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages, template, expected):
    with pytest.raises(DataError) as caught:
        render(messages, template)
    assert expected in str(caught.value)


@pytest.mark.parametrize("name", ["v0", "v0.5"])
def test_v0_is_vicunas_text_as_in_llavas_train(name):
    """LLaVA's train() sets the conversation for other names only, and leaves it at its default for these."""
    assert resolve_template(name) == "v1"


@pytest.mark.parametrize("name", ["default", "llava_v0"])
def test_the_text_of_v0_goes_by_its_other_names(name):
    assert joined(TALK, resolve_template(name)).startswith(TEMPLATES["llava_v0"].system + "\n\n### Human: ")


@pytest.mark.parametrize("template", ["v0_mmtag", "v1_mmtag"])
def test_an_image_stands_between_tags_in_the_mmtag_templates(template):
    """LLaVA's preprocess_multimodal puts the tags around the image first, then <im_start> and <im_end> inside them."""
    [placed], system = prepare([human("What?<image>")], template, mm_use_im_start_end=True)
    assert placed.text == "<Image><im_start><image><im_end></Image>\nWhat?"
    assert system.endswith("natural language.The visual content will be provided with the following format: "
                           "<Image>visual content</Image>.")  # fmt: skip
    answers = {
        "v0_mmtag": ["### Assistant: A cat.\n", "### Assistant: Yes.\n"],
        "v1_mmtag": [" A cat.</s>", " Yes.</s>"],
    }
    assert set(answers[template]) <= set(supervised(TALK, template))
