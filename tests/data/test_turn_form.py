"""Thoughts and tool calls in a tokenizer's own template: what is written is what transformers writes, what is learned
is what the answer's side of the conversation says."""

import copy
import json

import pytest
from thinking_templates import DEEPSEEK, GEMMA4, GEMMA4_CALLS, MAGISTRAL, PLAIN, QWEN3, QWEN35, TOKENS

from llava_ds.constants import DataError
from llava_ds.data.chat_template import answer_end, answer_prompt, render_own, render_own_prompt, render_parts
from llava_ds.data.encode import Encoder, EncodingOptions
from llava_ds.data.sample import Message, Transcript

ASKED, AGAIN = Message("human", "What is it?"), Message("human", "Sure?")
THOUGHT = "It has three sides.\nSo it is one."
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "zoom", "arguments": {"x": 3, "to": "the 'left'"}}}
OTHER = {"type": "function", "id": "bcdefghij", "function": {"name": "count", "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "zoom", "description": "z", "parameters": {"type": "object"}}}]
ROLES = {"human": "user", "gpt": "assistant", "tool": "tool"}


def answer(text: str = "A triangle.", thought: str | None = None, *calls: dict, **more) -> Message:
    return Message("gpt", text, thought, json.dumps(calls) if calls else "", **more)


@pytest.fixture
def own(tokenizer):
    """A function that gives a tokenizer a template."""

    def make(source: str):
        made = copy.deepcopy(tokenizer)
        made.add_special_tokens({"extra_special_tokens": list(TOKENS)})
        made.chat_template = source
        return made

    return make


def segments(tokenizer, conversation, as_parts: bool):
    conversation = Transcript.of(conversation)
    prompt = answer_prompt(tokenizer, conversation.template_kwargs, as_parts=as_parts)
    if as_parts:
        return render_parts(conversation, tokenizer, prompt)
    return render_own(conversation, tokenizer, prompt=prompt)


def learned(tokenizer, conversation, as_parts: bool = False) -> list[str]:
    return [s.text for s in segments(tokenizer, conversation, as_parts) if s.supervised]


def by_transformers(tokenizer, messages, tools=None, in_text: bool = False, as_text: bool = False) -> str:
    """What transformers writes of messages. in_text: thoughts go into texts; as_text: arguments are JSON text."""
    turns = []
    for message in messages:
        turn = {"role": ROLES[message.role], "content": message.text}
        if message.thought is not None:
            turn["reasoning_content"] = turn["reasoning"] = message.thought
        if message.tool_calls:
            turn["tool_calls"] = json.loads(message.tool_calls)
            for call in turn["tool_calls"] if as_text else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if message.thought is not None and in_text:
            turn["content"] = [
                {"type": "thinking", "thinking": message.thought},
                {"type": "text", "text": message.text},
            ]
        turns.append(turn)
    return tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)


END = "<|im_end|>"
QWEN3_CALL = '<tool_call>\n{"name": "zoom", "arguments": {"x": 3, "to": "the \'left\'"}}\n</tool_call>'
QWEN35_CALL = "<tool_call>\n<function=zoom>\n<parameter=x>\n3\n</parameter>\n<parameter=to>\nthe 'left'\n</parameter>\n"
QWEN35_CALL += "</function>\n</tool_call>"
GEMMA4_CALL = "<|tool_call>call:zoom{to:the 'left',x:3}<tool_call|>"
MAGISTRAL_CALL = '[CALLS]zoom[ARGS]{"x": 3, "to": "the \'left\'"}'
EMPTY = {"qwen3.5": "\n</think>\n\n"}  # the rest of an empty thought that the prompt opens
CASES = {
    "qwen3": (QWEN3, f"<think>\n{THOUGHT}\n</think>\n\n", "\n" + QWEN3_CALL, QWEN3_CALL, END, ""),
    "qwen3.5": (QWEN35, f"{THOUGHT}\n</think>\n\n", "\n\n" + QWEN35_CALL, QWEN35_CALL, END, ""),
    "gemma4": (
        GEMMA4, f"<|channel>thought\n{THOUGHT}\n<channel|>", GEMMA4_CALL, GEMMA4_CALL, "<turn|>", "<|tool_response>"
    ),
    "magistral": (MAGISTRAL, f"[THINK]{THOUGHT}[/THINK]", MAGISTRAL_CALL, MAGISTRAL_CALL, "</s>", ""),
}  # fmt: skip


@pytest.mark.parametrize("as_parts", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_thoughts_and_calls_are_learned_as_the_template_writes_them(own, name, as_parts):
    source, thought, behind, alone, end, of_call = CASES[name]
    tokenizer, result = own(source), Message("tool", "It grew.")
    of_magistral = name == "magistral"
    talk = (ASKED, answer("Let me see.", THOUGHT, CALL), result, answer("", None, CALL), result, answer())
    conversation = Transcript(talk, tools=json.dumps(TOOLS))
    written = "".join(s.text for s in segments(tokenizer, conversation, as_parts))
    assert written == by_transformers(tokenizer, talk, TOOLS, in_text=of_magistral, as_text=of_magistral)
    first, second, last = learned(tokenizer, conversation, as_parts)
    assert first == f"{thought}Let me see.{behind}{of_call or end}"
    assert second == f"{EMPTY.get(name, '')}{alone}{of_call or end}" and last.endswith(f"A triangle.{end}")


@pytest.mark.parametrize("name", CASES)
def test_thoughts_in_texts_give_the_same_as_in_fields(own, name):
    tokenizer = own(CASES[name][0])
    own_tags = {"gemma4": ("<|channel>thought\n", "\n<channel|>"), "magistral": ("[THINK]", "[/THINK]")}
    apart = render_own((ASKED, answer("A triangle.", THOUGHT)), tokenizer)
    for begin, end in (("<think>", "</think>"), ("<think>\n", "\n</think>\n\n"), own_tags.get(name, ("", "</think>"))):
        assert render_own((ASKED, answer(f"{begin}{THOUGHT}{end}A triangle.")), tokenizer) == apart
    assert any(THOUGHT in segment.text for segment in apart if segment.supervised)


@pytest.mark.parametrize("source", [QWEN3, QWEN35, GEMMA4])
def test_thoughts_that_the_template_leaves_out_are_counted(own, source):
    tokenizer = own(source)
    talk = (ASKED, answer("A triangle.", "first"), AGAIN, answer("Yes.", "second"), AGAIN, answer("Yes!", THOUGHT))
    found = render_own(talk, tokenizer)
    assert [s.thought_left_out for s in found if s.supervised] == [True, True, False]
    first, second, last = [s.text for s in found if s.supervised]
    assert "first" not in first and "second" not in second and THOUGHT in last
    [coded] = Encoder(tokenizer, EncodingOptions("chat_template", 500)).encode_batch([(talk, [])])
    assert coded.left_out == 2


@pytest.mark.parametrize("as_parts", [False, True])
def test_thoughts_that_are_written_beside_calls_alone_are_learned_there(own, as_parts):
    tokenizer, result = own(GEMMA4_CALLS), Message("tool", "It grew.")
    talk = (ASKED, answer("", THOUGHT, CALL), result, answer())
    first, last = learned(tokenizer, talk, as_parts)
    assert first == f"<|channel>thought\n{THOUGHT}\n<channel|>{GEMMA4_CALL}<|tool_response>"
    assert last == "A triangle.<turn|>"
    in_text = answer(f"<|channel>thought\n{THOUGHT}\n<channel|>", None, CALL)
    assert learned(tokenizer, (ASKED, in_text, result, answer()), as_parts) == [first, last]
    assert learned(tokenizer, (*talk, AGAIN, answer("Yes.")), as_parts)[0] == GEMMA4_CALL + "<|tool_response>"
    earlier = segments(tokenizer, (*talk, AGAIN, answer("Yes.")), as_parts)
    assert [s.thought_left_out for s in earlier if s.supervised] == [True, False, False]


@pytest.mark.parametrize("plain", [answer("Yes.", THOUGHT), answer(f"<|channel>thought\n{THOUGHT}\n<channel|>Yes.")])
def test_a_record_with_a_thought_elsewhere_is_refused_by_name(own, plain):
    talk = (ASKED, answer("", THOUGHT, CALL), Message("tool", "It grew."), plain)
    with pytest.raises(
        DataError, match="message 3 has a thought, but the chat template writes it only in answers that call"
    ):
        render_own(talk, own(GEMMA4_CALLS))


def test_a_variable_of_the_record_may_keep_thoughts(own):
    tokenizer = own(QWEN35)
    talk = (ASKED, answer("A triangle.", "first"), AGAIN, answer("Yes.", "second"))
    kept = Transcript(talk, template_kwargs='{"keep_thoughts": true}')
    assert learned(tokenizer, kept)[0] == "first\n</think>\n\nA triangle.<|im_end|>"
    assert learned(tokenizer, talk)[0] == "A triangle.<|im_end|>"


def test_several_calls_at_once_are_learned(own):
    [text] = learned(own(QWEN3), (ASKED, answer("", None, CALL, OTHER)))
    assert text.count("<tool_call>") == 2 and text.endswith(
        '{"name": "count", "arguments": {}}\n</tool_call><|im_end|>'
    )


@pytest.mark.parametrize("as_parts", [False, True])
def test_calls_before_a_later_question_are_learned_from_their_first_token(own, as_parts):
    talk = (ASKED, answer("", None, CALL), Message("tool", "3"), answer(), AGAIN, answer("Yes.", THOUGHT))
    first, *_ = learned(own(QWEN35), talk, as_parts)
    assert first == QWEN35_CALL + END


def test_a_template_may_mark_the_line_break_behind_an_answer(own):
    source = MARKED.replace(
        "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "{{ '<|im_end|>\\n' }}{% endgeneration %}"
    )
    assert source != MARKED and answer_end(own(source)).token == END
    assert learned(own(source), (ASKED, answer()), as_parts=True)[0].endswith("A triangle.<|im_end|>\n")


def test_calls_alone_are_written_as_without_a_text_also_in_parts(own):
    source = QWEN3.replace("(loop.first and content)", "(loop.first and m['content'])")
    assert learned(own(source), (ASKED, answer("", None, CALL)), as_parts=True)[0].endswith(
        f"</think>\n\n{QWEN3_CALL}{END}"
    )
    indexed = source.replace("words(m['content'])", "m['content'][0]['text']")
    assert learned(own(indexed), (ASKED, answer("", None, CALL)), as_parts=True)[0].endswith(
        f"</think>\n\n\n{QWEN3_CALL}{END}"
    )


def test_a_result_may_repeat_the_name_of_its_call(own):
    called = "messages[loop.index0 - 1]['tool_calls'][0]['function']['name']"
    source = GEMMA4.replace("'<|tool_response>' +", f"'<|tool_response>response:' + {called} +", 1)
    talk = (ASKED, answer("", None, CALL), Message("tool", "3"), answer())
    found = segments(own(source), talk, True)
    assert [s.text for s in found if s.supervised] == [GEMMA4_CALL + "<|tool_response>", "A triangle.<turn|>"]
    assert found[2].text == "response:zoom3<tool_response|>"


DUMPS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{- m['content'] if m['content'] is string else m['content'] | tojson }}{{- '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def test_parts_that_a_template_writes_as_json_are_no_form(own):
    with pytest.raises(DataError, match="message 1 has a thought, but the chat template does not write"):
        render_own((ASKED, answer("A triangle.", THOUGHT)), own(DUMPS))
    results = QWEN3.replace(
        "{%- set content = words(m['content']) -%}",
        "{%- set content = m['content'] -%}"
        + (
            "{%- if m['role'] == 'tool' and content is not string -%}{%- set content = content | tojson -%}"
            "{%- else -%}{%- set content = words(content) -%}{%- endif -%}"
        ),
    )
    found = segments(own(results), (ASKED, answer("", None, CALL), Message("tool", "3"), answer()), True)
    assert "<tool_response>\n3\n</tool_response>" in "".join(s.text for s in found)


def test_an_empty_thought_in_a_text_is_learned(own):
    [text] = learned(own(QWEN3), (ASKED, answer("<think>\n\n</think>\n\nA triangle.")))
    assert text == "<think>\n\n</think>\n\nA triangle.<|im_end|>"


def test_a_template_that_writes_texts_as_they_are_teaches_thoughts_in_them(own):
    text = f"<think>{THOUGHT}</think>A triangle."
    assert learned(own(PLAIN), (ASKED, answer(text))) == [text + END]


@pytest.mark.parametrize(
    ("source", "talk", "why"),
    [
        (PLAIN, (ASKED, answer("A triangle.", THOUGHT)), "message 1 has a thought, but the chat template does not"),
        (PLAIN, (ASKED, answer("", None, CALL)), "message 1 has tool calls, but the chat template does not write"),
        (
            DEEPSEEK,
            (ASKED, answer(f"<think>{THOUGHT}</think>A.")),
            "chat template drops or changes a thought in an answer's text",
        ),
        (QWEN3, (ASKED, answer("See: <think>a</think>b")), "has a text before its thought, <think>"),
        (QWEN3, (ASKED, answer("<think>a</think>b<think>c</think>d")), "has several thoughts between <think>"),
        (QWEN3, (ASKED, answer("<think>a</think>b", "c")), "has a thought, and another one in its text"),
    ],
)
def test_what_a_template_can_not_write_is_refused(own, source, talk, why):
    with pytest.raises(DataError, match=why):
        render_own(talk, own(source))


def test_offered_tools_that_a_template_does_not_write_are_refused(own):
    conversation = Transcript((ASKED, answer()), tools=json.dumps(TOOLS))
    with pytest.raises(DataError, match="offers tools, but the chat template does not write"):
        render_own(conversation, own(PLAIN))
    assert "zoom" in render_own_prompt(Transcript((ASKED,), tools=json.dumps(TOOLS)), own(QWEN3))


def test_results_that_a_template_does_not_write_are_refused(own):
    quiet = PLAIN.replace("{{ '<|im_start|>'", "{%- if m['role'] != 'tool' -%}{{ '<|im_start|>'", 1)
    quiet = quiet.replace("{%- endfor -%}{%- if add", "{%- endif -%}{%- endfor -%}{%- if add", 1)
    talk = (ASKED, answer(), Message("tool", "3"), answer())
    with pytest.raises(DataError, match="message 2 is the result of a tool, but the chat template does not write"):
        render_own(talk, own(quiet))


MARKED = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{%- if loop", "{{ '<|im_start|>assistant\\n' }}{% generation %}{%- if loop"
)
MARKED = MARKED.replace(
    "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- elif m['role'] == 'tool'",
    "{%- endfor -%}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{%- elif m['role'] == 'tool'",
)


def test_templates_that_mark_answers_say_what_is_learned(own):
    talk = (ASKED, answer("A.", "first", weight=0), AGAIN, answer("Yes.", THOUGHT, CALL))
    found = render_own(talk, own(MARKED))
    assert [(s.weight, s.thought_left_out) for s in found if s.supervised] == [(0, True), (1, False)]
    assert [s.text for s in found] == [s.text for s in render_own(talk, own(QWEN3))]


def test_thoughts_are_written_into_the_text_of_llavas_own_templates(tokenizer):
    encoder = Encoder(tokenizer, EncodingOptions("v1", 500))
    spelled = answer(f"<think>\n{THOUGHT}\n</think>\n\nA triangle.")
    one, other = encoder.encode_batch([((ASKED, answer("A triangle.", THOUGHT)), []), ((ASKED, spelled), [])])
    assert one.input_ids.tolist() == other.input_ids.tolist() and one.labels.tolist() == other.labels.tolist()
    [refused] = encoder.encode_batch([((ASKED, answer("", None, CALL)), [])])
    assert "has tool calls or their results, but --version v1 does not support them" in str(refused)
