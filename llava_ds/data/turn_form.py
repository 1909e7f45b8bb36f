"""Find how a Jinja chat template reads thoughts, tool calls and results, by rendering small examples."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llava_ds.constants import DataError
from llava_ds.data.sample import Message

# Tags of a thought inside an answer's text; a template's own tags are found by rendering.
THINK = ("<think>", "</think>")
# End tags of thoughts in published templates (Qwen, DeepSeek and GLM; Gemma 4; Magistral; Kimi): texts with one of them
# are searched for thoughts.
_ENDS = (THINK[1], "<channel|>", "[/THINK]", "◁/think▷")

Turns = list[dict[str, object]]
Render = Callable[[Turns, bool, list | None], str]  # arguments of the renderer: turns, whether to add a prompt, tools


@dataclass(frozen=True)
class TurnForm:
    """The form in which a template reads turns.

    as_parts: contents are lists of parts; thought: how thoughts are read, "" if they are not written; beside_calls:
    thoughts are written only in answers that call a tool; tags: start and end tags of thoughts inside texts; calls: how
    a call's arguments are read, "" if calls are not written; flat_calls: calls have no "function" level;
    bare_calls: omit the empty text part of calls, because the template writes it differently; results, tools: True if a
    tool's result, and the offered tools, are written; result_as_text: a result is a text even if contents are lists;
    prompt: the text before an answer to be generated; header: the beginning of the prompt, if it precedes every answer.
    """

    as_parts: bool
    thought: Literal["field", "part", ""] = ""
    beside_calls: bool = False
    tags: tuple[tuple[str, str], ...] = (THINK,)
    calls: Literal["mapping", "text", ""] = ""
    flat_calls: bool = False
    bare_calls: bool = False
    results: bool = False
    result_as_text: bool = False
    tools: bool = False
    prompt: str = ""
    header: str = ""

    def content(self, text: str) -> str | list[dict[str, str]]:
        """Build the content of a text-only turn."""
        return [{"type": "text", "text": text}] if self.as_parts else text

    def answer(self, content: str | list, thought: str | None, calls: Sequence[dict]) -> dict[str, object]:
        """Build the turn of an answer."""
        if calls and self.bare_calls and content == self.content(""):
            content = []
        turn: dict[str, object] = {"role": "assistant", "content": content}
        if thought is not None and self.thought == "field":
            # Set all names of the field, because templates read different ones.
            turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
        elif thought is not None and self.thought == "part":
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            turn["content"] = [{"type": "thinking", "thinking": thought}, *parts]
        if calls:
            turn["tool_calls"] = [self._call(call) for call in calls]
        return turn

    def _call(self, call: dict) -> dict[str, object]:
        function = dict(call["function"])
        if self.calls == "text":
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, **function} if self.flat_calls else {**call, "function": function}


def needs_form(messages: Sequence[Message], tools: str) -> bool:
    """True for a conversation with thoughts, calls or tools: each template reads these in its own form."""
    return bool(tools) or any(
        [m.role == "tool" or m.thought is not None or m.tool_calls != "" or holds_thought(m) for m in messages]
    )


def holds_thought(message: Message) -> bool:
    """True for an answer whose text may contain a thought."""
    return message.role == "gpt" and any([end in message.text for end in _ENDS])


_THOUGHT, _TEXT, _NAME, _RESULT = "Qthoughtq", "Qanswerq", "Qnameq", "Qresultq"
_QUESTION = "Qquestionq"
_ID = "abcdefghi"  # Mistral's templates require ids of nine letters and digits
_SCHEMA = {"type": "object", "properties": {"Qkeyq": {"type": "string", "description": "x"}}, "required": ["Qkeyq"]}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "x", "parameters": _SCHEMA}}
# Matches if a template prints the list of parts itself, instead of the texts in it.
_DUMPED = re.compile(r"""['"]type['"]: *['"](?:text|thinking)['"]""")
_ARGUMENTS = {"Qkeyq": "Qvalueq", "Qlistq": [5]}
_CALL = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": _ARGUMENTS}}


def find_form(render: Render, as_parts: bool) -> TurnForm:
    """Find a template's form by rendering examples in each form. as_parts: as in TurnForm."""
    form = TurnForm(as_parts)
    question = {"role": "user", "content": form.content(_QUESTION)}
    plain = form.answer(form.content(_TEXT), None, ())
    before = _rendered(render, [question])
    asked = _rendered(render, [question], prompt=True)
    earlier = _rendered(render, [question, plain, question, plain]) or _rendered(render, [question, plain])
    prompt = asked[len(before) :] if asked.startswith(before) else ""
    header = common_beginning(prompt, earlier[len(before) :]) if earlier.startswith(before) else ""
    form = replace(form, prompt=prompt, header=header)
    form = _find_thought(form, render, question, before)
    form = _find_calls(form, render, question)
    if form.calls and not form.thought:
        form = _find_thought_with_calls(form, render, question, before)
    found = _rendered(render, [question, plain], tools=[_TOOL])
    return replace(form, tools=_NAME in found and "Qkeyq" in found)


def _find_thought(form: TurnForm, render: Render, question: dict, before: str) -> TurnForm:
    for way in ("field", "part"):
        tried = replace(form, thought=way)
        text = _rendered(render, [question, tried.answer(form.content(_TEXT), _THOUGHT, ())])
        start, end = text.find(_THOUGHT), text.find(_TEXT)
        if 0 <= start < end and not _DUMPED.search(text) and text.count(_THOUGHT) == 1:
            return replace(tried, tags=_tags(form, text, before, (start, end)))
    return form


def _tags(form: TurnForm, text: str, before: str, around: tuple[int, int]) -> tuple[tuple[str, str], ...]:
    """Find the start and end tags of thoughts. around: start of the thought in the text, and start of the text after
    its end tag."""
    start, end = around
    opened = text[len(before) : start].removeprefix(form.header) if text.startswith(before) else ""
    own = (opened.strip(), text[start + len(_THOUGHT) : end].strip())
    return (THINK, own) if all(own) and own != THINK else (THINK,)


def _find_thought_with_calls(form: TurnForm, render: Render, question: dict, before: str) -> TurnForm:
    """Find a thought that is written only with calls, as in Gemma 4's templates."""
    for way in ("field", "part"):
        tried = replace(form, thought=way, beside_calls=True)
        without = _rendered(render, [question, tried.answer(form.content(""), None, [_CALL])])
        text = _rendered(render, [question, tried.answer(form.content(""), _THOUGHT, [_CALL])])
        start = text.find(_THOUGHT)
        if start >= 0 and _NAME in text and not _DUMPED.search(text) and text.count(_THOUGHT) == 1:
            rest = without[len(before) :].removeprefix(form.header)
            end = len(text) - len(rest) if text.endswith(rest) else start
            return replace(tried, tags=_tags(form, text, before, (start, end)))
    return form


def _find_calls(form: TurnForm, render: Render, question: dict) -> TurnForm:
    ways = itertools.product((True, False) if form.as_parts else (False,), (False, True), ("mapping", "text"))
    for bare, flat, way in ways:
        tried = replace(form, calls=way, flat_calls=flat, bare_calls=bare)
        turns = [question, tried.answer(form.content(""), None, [_CALL])]
        text = _rendered(render, turns)
        # Python's repr of a mapping, or a text with escaped quotes, is the wrong form.
        wrong = "{'Qkeyq'" in text or '\\"Qkeyq' in text
        if not wrong and all(part in text for part in (_NAME, "Qkeyq", "Qvalueq")):
            return _find_results(tried, render, turns)
    return _find_results(form, render, [question, form.answer(form.content(_TEXT), None, ())])


def _find_results(form: TurnForm, render: Render, turns: Turns) -> TurnForm:
    for content in (form.content(_RESULT), _RESULT):
        result = {"role": "tool", "content": content, "name": _NAME, "tool_call_id": _ID}
        text = _rendered(render, [*turns, result, form.answer(form.content(_TEXT), None, ())])
        if _RESULT in text and not _DUMPED.search(text):
            return replace(form, results=True, result_as_text=isinstance(content, str))
    return form


def _rendered(render: Render, turns: Turns, prompt: bool = False, tools: list | None = None) -> str:
    """Render turns to text; "" if the template refuses them."""
    try:
        return render(turns, prompt, tools)
    except DataError:
        return ""


def common_beginning(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]


def with_thought_apart(message: Message, form: TurnForm) -> Message:
    """Move a thought at the start of an answer's text to Message.thought. A thought opened by the prompt has no start
    tag. Raises DataError for several thoughts, or one after a text."""
    if message.role != "gpt" or not form.thought:
        return message
    for begin, end in form.tags:
        if end not in message.text:
            continue
        head, _, text = message.text.partition(end)
        if begin in head:
            first, _, head = head.partition(begin)
            if first.strip():
                raise DataError(f"an answer has a text before its thought, {begin}: the chat template would drop it")
        if any(tag in head or tag in text for tag in (begin, end)):
            raise DataError(f"an answer has several thoughts between {begin} and {end}, expected one, at its beginning")
        if message.thought is not None:
            raise DataError(f"an answer has a thought, and another one in its text, between {begin} and {end}")
        return replace(message, thought=head.strip("\n"), text=text.lstrip("\n"))
    return message


_BRING = "use a chat template that does (chat_template.jinja), or take them out"


def refuse_unwritten(messages: Sequence[Message], tools: str, form: TurnForm) -> None:
    """Raise DataError for content that the template does not write."""
    for i, message in enumerate(messages):
        if message.thought is not None and not form.thought:
            raise DataError(f"message {i} has a thought, but the chat template does not write it: {_BRING}")
        if message.thought and form.beside_calls and not message.tool_calls:
            raise DataError(
                f"message {i} has a thought, but the chat template writes it only in answers that call a tool: {_BRING}"
            )
        if message.tool_calls and not form.calls:
            raise DataError(f"message {i} has tool calls, but the chat template does not write them: {_BRING}")
        if message.role == "tool" and not form.results:
            raise DataError(f"message {i} is the result of a tool, but the chat template does not write it: {_BRING}")
    if tools and not form.tools:
        raise DataError(f"offers tools, but the chat template does not write them: {_BRING}")
