"""The Jinja templates of exported models against the text of training, and a tokenizer's own template."""

import copy

import numpy as np
import pytest
from tokenizers import AddedToken

from llava_ds.constants import DataError
from llava_ds.data.chat_template import render_own, render_own_prompt
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.end_markers import check_tokenizer, end_markers
from llava_ds.data.jinja_templates import CHAT_TEMPLATES, chat_template
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.templates import TEMPLATES, render, render_prompt

TALK = [
    Message("human", "<image>\nWhat's in this \\ picture?"),
    Message("gpt", "A red cat.\n\nAnd 'two' dogs."),
    Message("human", "Sure?"),
    Message("gpt", "Yes."),
    Message("human", "Why?"),
]
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


def as_parts(message: Message) -> dict:
    """A message as processors take it: a picture is a part of its own."""
    marks = message.text.count("<image>\n")
    parts = [{"type": "image"}] * marks + [{"type": "text", "text": message.text.replace("<image>\n", "")}]
    return {"role": ROLES[message.role], "content": parts if marks else message.text}


def written(tokenizer, template: str, talk: list[Message], im: bool = False, **options) -> str:
    source = chat_template(template, tokenizer, im)
    return tokenizer.apply_chat_template(list(map(as_parts, talk)), chat_template=source, tokenize=False, **options)


def test_every_template_has_one():
    assert set(CHAT_TEMPLATES) | {"chat_template", "processor"} == set(TEMPLATES)


@pytest.mark.parametrize("template", sorted({*CHAT_TEMPLATES} - {"plain"}))
@pytest.mark.parametrize("im", [False, True])
def test_jinja_writes_what_training_wrote(tokenizer, template, im):
    two = [Message("human", "<image>\n<image>\nWhich?"), *TALK[1:]]
    quiet = [TALK[0], Message("gpt", ""), *TALK[2:]]
    system = Message("system", "Speak like a 'cat'.")
    bos = "" if TEMPLATES[template].whole else tokenizer.bos_token
    for talk in (TALK, two, quiet, [Message("human", "Hello"), *TALK[1:]], [system, *TALK]):
        text = "".join(segment.text for segment in render(talk[:-1], template, im))
        assert written(tokenizer, template, talk[:-1], im) == bos + text
        prompt = render_prompt(talk, template, im)
        assert written(tokenizer, template, talk, im, add_generation_prompt=True) == bos + prompt


def test_jinja_writes_captions(tokenizer):
    assert (
        written(tokenizer, "plain", [Message("human", "<image>\n"), Message("gpt", "A cat.")]) == "<s><image>A cat.\n"
    )
    assert written(tokenizer, "plain", [Message("human", "<image>\n")], add_generation_prompt=True) == "<s><image>"


@pytest.fixture
def own(tokenizer):
    """A tokenizer with a template of its own, which a test sets."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


TURN = "'<|im_start|>' + m['role'] + '\\n' + {} + '<|im_end|>\\n'"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}{{ " + TURN.format("m['content']") + " }}{% endfor %}" + PROMPT
TRIMMED = "{% for m in messages %}{{ " + TURN.format("(m['content'] | trim)") + " }}{% endfor %}" + PROMPT
# What Qwen3 does: the last answer is written with an empty thought before it, earlier ones without.
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + m['content'] + '<|im_end|>\\n' }}{% else %}{{ "
    + TURN.format("m['content']")
    + " }}{% endif %}{% endfor %}"
    + PROMPT
)
MARKED = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "behind"),
    [(CHATML, "<|im_end|>"), (TRIMMED, "<|im_end|>"), (THINKING, "<|im_end|>"), (MARKED, "</s>")],
    ids=["chatml", "trimmed", "thinking", "generation"],
)
def test_a_tokenizers_own_template_teaches_answers_and_their_end_markers(own, source, behind):
    own.chat_template = source
    talk = [*TALK[:2], Message("human", "A red cat.\n\nAnd 'two' dogs."), Message("gpt", "Yes.")]
    segments = render_own(talk, own)
    assert [s.text for s in segments if s.supervised] == [talk[1].text + behind, talk[3].text + behind]
    chat = [{"role": ROLES[m.role], "content": m.text} for m in talk]
    assert "".join(s.text for s in segments) == own.apply_chat_template(chat, tokenize=False)
    [coded] = Encoder(own, EncodingOptions("chat_template", 500)).encode_batch([(talk, [4])])
    assert (coded.input_ids == -200).sum() == 4
    ends = coded.labels[coded.labels == own.convert_tokens_to_ids(behind)]
    assert len(ends) == 2


OUTSIDE = MARKED.replace("m['content'] + '</s>' }}{% endgeneration %}", "m['content'] }}{% endgeneration %}</s>")
NO_END = "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "learned", "behind"),
    [
        (CHATML, "y", "<|im_end|>\\n"),
        (OUTSIDE, "y", "</s>"),
        (NO_END, "y", ""),
        (MARKED.replace("</s>", "."), "y.", ""),
    ],
    ids=["no token", "outside", "none", "a text"],
)
def test_answers_without_an_end_that_is_learned_are_refused(tokenizer, source, learned, behind):
    own = copy.deepcopy(tokenizer)
    own.chat_template = source
    [problem] = check_tokenizer("chat_template", own)
    assert f"learn {learned!r} (then follows '{behind}'" in problem
    assert "never learn to stop" in problem and "give --version one of LLaVA's templates" in problem
    assert end_markers("chat_template", own) == [own.eos_token_id]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("source", [CHATML, TRIMMED, THINKING])
def test_a_model_stops_at_the_end_marker_that_it_learned(tokenizer, special, source):
    """Folders of finetuned models have their markers as added tokens that are not special."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    own.chat_template = source
    marker = own.convert_tokens_to_ids("<|im_end|>")
    assert check_tokenizer("chat_template", own) == []
    assert end_markers("chat_template", own) == sorted([own.eos_token_id, marker])
    [coded] = Encoder(own, EncodingOptions("chat_template", 500)).encode_batch([(TALK[:4], [4])])
    assert np.count_nonzero(coded.labels == marker) == 2 and coded.labels[coded.labels >= 0][-1] == marker


def test_a_system_message_goes_to_the_tokenizers_own_template(own):
    talk = [Message("system", "Be brief."), Message("human", "Hello")]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert render_own_prompt(talk, own) == text + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "changes|something else"),
        ("{{ messages[0]['content'] }}", "leaves answers out"),
        ("{{ raise_exception('no such role') }}", "refuses the conversation: no such role"),
    ],
)
def test_a_template_that_hides_what_is_learned_is_refused(own, source, expected):
    own.chat_template = source
    with pytest.raises(DataError, match=expected):
        render_own(TALK[:2], own)


VARIABLES = "{% if brief %}[brief]{% endif %}" + CHATML


def test_variables_of_a_record_are_handed_to_the_template(own):
    own.chat_template = VARIABLES
    told = Transcript(tuple(TALK[:2]), template_kwargs='{"brief": true}')
    written = ["".join(s.text for s in render_own(each, own)) for each in (told, TALK[:2])]
    assert written[0] == "[brief]" + written[1]
    assert render_own_prompt(told, own).startswith("[brief]")


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ('{"enable_thinking": false}', "'enable_thinking', but the chat template does not read"),
        ('{"messages": []}', "'messages', but that is set for every conversation"),
        ('{"eos_token": "x"}', "'eos_token', but that is set for every conversation"),
    ],
)
def test_variables_that_a_template_does_not_read_are_refused(own, variables, why):
    own.chat_template = VARIABLES
    with pytest.raises(DataError, match=why):
        render_own(Transcript(tuple(TALK[:2]), template_kwargs=variables), own)


def test_templates_of_llava_have_no_tools_and_no_variables(tokenizer):
    encoder = Encoder(tokenizer, EncodingOptions("v1", 500))
    given = [{"template_kwargs": '{"brief": true}'}, {"tools": '[{"name": "zoom"}]'}]
    found = encoder.encode_batch([(Transcript(tuple(TALK[:2]), **each), [4]) for each in given])
    assert "under 'chat_template_kwargs', and --version v1 has none" in str(found[0])
    assert "offers tools, but --version v1 does not support them" in str(found[1])
