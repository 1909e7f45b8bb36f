"""Render conversations with a tokenizer's own Jinja chat template."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data import template_process
from llava_ds.data.answer_spans import UNSTABLE, AnswerParts, find_answers
from llava_ds.data.jinja_templates import own_template
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.special_tokens import split_parts
from llava_ds.data.templates import Segment, Span, prepare
from llava_ds.data.turn_form import (
    TurnForm,
    find_form,
    holds_thought,
    needs_form,
    refuse_unwritten,
    with_thought_apart,
)
from llava_ds.template_variables import variables_problem
from llava_ds.tokenizer import special_tokens

ROLES = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"}


class _Chat(NamedTuple):
    """Inputs of a Jinja template for one conversation: turns as dicts, tools, and template variables.

    answers: each answer's message, by turn index; form: how the template writes turns; is_plain: True for a
    conversation without thoughts, calls or tools (its form is then not probed).
    """

    turns: list[dict[str, object]]
    answers: dict[int, Message]
    form: TurnForm
    is_plain: bool
    tools: list[object] | None
    variables: dict[str, object]

    def marked(self, parts: Sequence[AnswerParts], num_turns: int | None = None) -> "_Chat":
        """Return the chat, or its first turns, with the answers' parts replaced by markers."""
        turns = self.turns[:num_turns]
        for each in parts:
            if each.turn < len(turns):
                turns[each.turn] = {**turns[each.turn], **self._marked_answer(each)}
        return self._replace(turns=turns)

    def _marked_answer(self, parts: AnswerParts) -> dict[str, object]:
        message = self.answers[parts.turn]
        thought = parts.marker("t") if "t" in parts.values else message.thought
        calls = json.loads(message.tool_calls) if message.tool_calls else []
        for i, call in enumerate(calls):
            call["function"]["name"] = parts.marker(f"n{i}")
        text = parts.marker("c") if "c" in parts.values else message.text
        return self.form.answer(self.form.content(text), thought, calls)


def _answer_parts(turn: int, message: Message) -> AnswerParts:
    """Return the parts of an answer that markers can replace. An empty thought, or an empty text next to calls, gets no
    marker: templates write other words around it."""
    values = {"t": message.thought} if message.thought else {}
    if message.text or not message.tool_calls:
        values["c"] = message.text
    if message.tool_calls:
        values |= {f"n{i}": call["function"]["name"] for i, call in enumerate(json.loads(message.tool_calls))}
    return AnswerParts(turn, values)


@functools.lru_cache(maxsize=64)
def _turn_form(source: str, variables: str, special: str, as_parts: bool) -> TurnForm:
    """Find how a template writes turns. variables, special: template variables and special tokens, as JSON objects."""
    given = {**json.loads(special), **json.loads(variables or "{}")}

    def render(turns: list[dict[str, object]], prompt: bool, tools: list | None) -> str:
        settings = {"add_generation_prompt": prompt, "tools": tools, "chat_template": source}
        return template_process.render(conversations=[turns], **settings, **given)[0]

    return find_form(render, as_parts)


def _with_form(
    conversation: Transcript, tokenizer: PreTrainedTokenizerBase, source: str, as_parts: bool
) -> tuple[Transcript, TurnForm, bool]:
    """Return the conversation with thoughts separated from texts, the template's turn form, and True if it is plain.
    Raises DataError for content that the template does not write, and for variables that it does not read."""
    variables = json.loads(conversation.template_kwargs) if conversation.template_kwargs else {}
    if variables and (problem := variables_problem(variables, source, tokenizer)) is not None:
        raise DataError(f"its chat_template_kwargs {problem}")
    if not needs_form(conversation.messages, conversation.tools):
        return conversation, TurnForm(as_parts), True
    special = json.dumps(tokenizer.special_tokens_map)
    form = _turn_form(source, conversation.template_kwargs, special, as_parts)
    messages = tuple(with_thought_apart(message, form) for message in conversation.messages)
    refuse_unwritten(messages, conversation.tools, form)
    return replace(conversation, messages=messages), form, False


def _chat(conversation: Transcript, contents: list[object], form: TurnForm, is_plain: bool) -> _Chat:
    """Build the chat of a conversation from the content of each message."""
    turns, answers = [], {}
    for i, (message, content) in enumerate(zip(conversation.messages, contents, strict=True)):
        if message.role == "gpt":
            answers[i] = message
            calls = json.loads(message.tool_calls) if message.tool_calls else ()
            turn = form.answer(content, message.thought, calls)
        elif message.role == "tool" and form.result_as_text and IMAGE_TOKEN not in message.text:
            turn = {"role": "tool", "content": message.text}
        else:
            turn = {"role": ROLES[message.role], "content": content}
        if message.name:
            turn["name"] = message.name
        if message.call_id:
            turn["tool_call_id"] = message.call_id
        turns.append(turn)
    tools = json.loads(conversation.tools) if conversation.tools else None
    variables = json.loads(conversation.template_kwargs) if conversation.template_kwargs else {}
    return _Chat(turns, answers, form, is_plain, tools, variables)


@dataclass(frozen=True)
class AnswerPrompt:
    """Text that a template writes before an answer is generated ("" if none). gaps: texts that the template inserts
    between this prompt and an existing answer, such as a space or an empty thought. They are learned with the answer.
    end_marker: from _end_marker, cached because collecting the special tokens is slow; None if not computed."""

    text: str = ""
    gaps: tuple[str, ...] = ()
    end_marker: re.Pattern[str] | None = None

    def end_before(self, text: str, start: int, of_spaces: bool = False) -> int | None:
        """Return the end of the prompt before an answer; None if it can't be determined.

        start: start of the answer. of_spaces: accept only gaps that consist of spaces, as in templates without a
        prompt (Llama 2, Mistral).
        """
        has_prompt = bool(self.text.strip())
        of_spaces = of_spaces or not has_prompt
        for gap in self.gaps if has_prompt else filter(None, self.gaps):
            if text.endswith(self.text + gap, 0, start) and not (of_spaces and gap.strip()):
                return start - len(gap)
        return None


NO_PROMPT = AnswerPrompt()


def render_own(
    conversation: Transcript | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    mm_use_im_start_end: bool = False,
    prompt: AnswerPrompt = NO_PROMPT,
) -> list[Segment]:
    """Render a conversation in the tokenizer's own template. Each answer is supervised together with its end marker.

    If the template marks answers by {% generation %}, the marked spans are supervised. Otherwise the conversation
    is rendered again with markers as answers, and the text around the answers must stay the same. Raises DataError if
    the template refuses the messages, or changes more of an answer than its outer spaces.
    """
    conversation = Transcript.of(conversation)
    source = own_template(tokenizer, bool(conversation.tools))
    return _segments(_as_chat(conversation, tokenizer, source, mm_use_im_start_end), tokenizer, prompt, source)


@functools.lru_cache(maxsize=64)
def _marks_answers(source: str) -> bool:
    """True if a template marks answers by {% generation %}."""
    return re.search(r"\{%-?\s*generation\b", source) is not None


def _segments(chat: _Chat, tokenizer: PreTrainedTokenizerBase, prompt: AnswerPrompt, source: str) -> list[Segment]:
    """Split a rendered chat into segments, as in render_own. Supervision of an answer starts where its prompt ends.
    source: the template."""
    if _marks_answers(source):
        text, given = _rendered(chat, tokenizer, source, marks=True)
        given = [(prompt.end_before(text, start, of_spaces=True) or start, end) for start, end in given]
        if chat.is_plain and all(message.weight == 1 for message in chat.answers.values()):
            return _cut(text, [Span(*each) for each in given])
        answers = _answers(chat, text, tokenizer, source, prompt)
        messages = [*chat.answers.values()]
        spans = []
        for start, end in given:
            own = next((i for i, each in enumerate(answers) if start < each.end and each.start < end), None)
            weight = 1.0 if own is None else messages[own].weight
            spans.append(Span(start, end, 0, weight, own is not None and answers[own].thought_left_out))
        return _cut(text, spans)
    text, _ = _rendered(chat, tokenizer, source)
    spans, floor = [], 0
    for (turn, message), found in zip(chat.answers.items(), _answers(chat, text, tokenizer, source, prompt)):
        start = prompt.end_before(text, found.start)
        if start is None and (message.thought is not None or message.tool_calls):
            start = _start_after_header(text, (floor, found.start), chat, turn, (tokenizer, source))
        start = found.start if start is None else start
        spans.append(Span(start, found.end, 0, message.weight, found.thought_left_out))
        floor = found.end
    return _cut(text, spans)


def _end_marker(tokenizer: PreTrainedTokenizerBase, behind: str = "") -> re.Pattern[str]:
    """Compile the pattern of spaces and the special token that may end an answer. An added token also counts as special
    if the text after the last answer (`behind`) begins with it."""
    added = [token for token in _added_tokens(tokenizer) if behind.lstrip().startswith(token)]
    tokens = sorted({*special_tokens(tokenizer), *added}, key=len, reverse=True)
    return re.compile(r"\s*(?:" + "|".join(map(re.escape, tokens)) + ")")


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Map the text of each added token to its id, except tokens of spaces. Tokenizers never split these texts."""
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    return {token: i for token, i in added.items() if token.strip()}


def _answers(
    chat: _Chat, text: str, tokenizer: PreTrainedTokenizerBase, source: str, prompt: AnswerPrompt
) -> list[Span]:
    """Find the spans of the answers in the rendered text."""
    parts = [_answer_parts(turn, message) for turn, message in chat.answers.items()]
    if not parts:
        return []
    marked = _rendered(chat.marked(parts), tokenizer, source)[0]

    def marked_up_to(turn: int) -> str:
        return _rendered(chat.marked(parts, turn + 1), tokenizer, source)[0]

    try:
        return find_answers(text, marked, parts, marked_up_to, prompt.end_marker or _end_marker(tokenizer))
    except DataError as error:
        if chat.is_plain or chat.form.thought or not any(holds_thought(each) for each in chat.answers.values()):
            raise
        raise DataError(f"the chat template drops or changes a thought in an answer's text: {error}") from None


def _start_after_header(
    text: str, between: tuple[int, int], chat: _Chat, turn: int, template: tuple[PreTrainedTokenizerBase, str]
) -> int:
    """Return the start of an answer with a thought or calls: the end of its prompt, or of its header if the answer does
    not follow the whole prompt.

    between: end of the previous answer and start of this answer's first part. Raises DataError if the position can't be
    determined.
    """
    floor, first = between
    header = chat.form.header
    at = text.rfind(header, floor, first) if header.strip() else -1
    if at >= 0:
        asked = chat.form.prompt if text.startswith(chat.form.prompt, at, first) else header
        return at + len(asked)
    # The answer continues an open turn, as Gemma 4's does after a tool's result.
    asked = _rendered(chat._replace(turns=chat.turns[:turn]), *template, prompt=True)[0]
    if not text.startswith(asked) or not floor <= len(asked) <= first:
        raise DataError(UNSTABLE)
    return len(asked)


def render_parts(
    conversation: Transcript | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    prompt: AnswerPrompt = NO_PROMPT,
    kinds: Sequence[str] = (),
    source: str | None = None,
) -> list[Segment]:
    """Render a conversation as a model's own processor does, with images at their marks.

    prompt: from answer_prompt; kinds: "image" or "video" for each mark; source: a template to use instead of the
    tokenizer's. Raises DataError as render_own does.
    """
    conversation = Transcript.of(conversation)
    source = own_template(tokenizer, bool(conversation.tools)) if source is None else source
    return _segments(_as_parts(conversation, tokenizer, source, kinds), tokenizer, prompt, source)


def render_parts_prompt(
    conversation: Transcript | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    kinds: Sequence[str] = (),
    source: str | None = None,
) -> str:
    """Render the text up to the start of the next answer, as a model's own processor does. kinds, source: as in
    render_parts."""
    conversation = Transcript.of(conversation)
    source = own_template(tokenizer, bool(conversation.tools)) if source is None else source
    return _rendered(_as_parts(conversation, tokenizer, source, kinds), tokenizer, source, prompt=True)[0]


def answer_prompt(
    tokenizer: PreTrainedTokenizerBase, variables: str = "", source: str | None = None, as_parts: bool = True
) -> AnswerPrompt:
    """Find the prompt before an answer.

    variables: template variables as a JSON object, "" for none; source: a template to use instead of the tokenizer's;
    as_parts: messages as in render_parts (True) or render_own.
    """
    source = own_template(tokenizer) if source is None else source
    template = tokenizer, source
    question, mark = Message("human", "x"), _ANSWER

    def written(*answer: Message, prompt: bool = False) -> str:
        conversation = Transcript((question, *answer), template_kwargs=variables)
        chat = _as_parts(conversation, *template) if as_parts else _as_chat(conversation, *template, False)
        return _rendered(chat, tokenizer, source, prompt=prompt)[0]

    try:
        before, asked = written(), written(prompt=True)
    except DataError:  # the template can't write any conversation: every record reports this error
        return NO_PROMPT
    gaps, behind = {}, ""
    for answer in (Message("gpt", mark), Message("gpt", "y", thought=mark)):
        with contextlib.suppress(DataError):  # the template doesn't support thoughts
            text = written(answer)
            behind = behind if answer.thought else text.partition(mark)[2]
            if text.startswith(asked) and mark in text:
                gaps[text[len(asked) : text.index(mark)]] = None
    prompt = asked[len(before) :] if asked.startswith(before) else ""
    return AnswerPrompt(prompt, tuple(sorted(gaps, key=len, reverse=True)), _end_marker(tokenizer, behind))


_ANSWER = "\ue000\ue001"  # placeholder of an answer or a thought


class AnswerEnd(NamedTuple):
    """End of an answer in a tokenizer's template. token: the last learned token, and its id; None if the text does not
    end with a special token. learned, behind: text learned for an answer "y", and the text that follows."""

    token: str | None
    id: int | None
    learned: str
    behind: str


def answer_end(tokenizer: PreTrainedTokenizerBase, as_parts: bool = True, variables: str = "") -> AnswerEnd:
    """Find the end of an answer. as_parts: messages as in render_parts (True) or render_own; variables: template
    variables as a JSON object. Raises DataError if the template does not write a question and its answer."""
    answer = Transcript((Message("human", "x"), Message("gpt", "y")), template_kwargs=variables)
    prompt = answer_prompt(tokenizer, as_parts=as_parts)
    segments = render_parts(answer, tokenizer, prompt) if as_parts else render_own(answer, tokenizer, prompt=prompt)
    last = max((i for i, segment in enumerate(segments) if segment.supervised), default=-1)
    learned = "".join(segment.text for segment in segments[: last + 1] if segment.supervised)
    behind = "".join(segment.text for segment in segments[last + 1 :])
    ids = tokenizer(learned.rstrip(), add_special_tokens=False)["input_ids"] if learned.strip() else []
    known = _added_tokens(tokenizer)
    token = next((token for token, i in known.items() if ids[-1:] == [i]), None)
    return AnswerEnd(token, known.get(token), learned, behind)


def _as_parts(
    conversation: Transcript, tokenizer: PreTrainedTokenizerBase, source: str, kinds: Sequence[str] = ()
) -> _Chat:
    """Build turns whose content is a list of parts: images at their marks, and the stripped texts between them, as in
    the vendors' trainers."""
    if not any(message.role == "human" for message in conversation.messages):
        raise DataError("the conversation has no question")
    conversation, form, is_plain = _with_form(conversation, tokenizer, source, as_parts=True)
    contents, left = [], iter(kinds)
    for i, message in enumerate(conversation.messages):
        if message.role not in ROLES or (message.role == "system" and i > 0):
            raise DataError(f"turn {i} is from {message.role!r}, expected 'human' or 'gpt'")
        if IMAGE_TOKEN in message.text and message.role not in ("human", "tool"):
            raise DataError(f"turn {i}, from {message.role!r}, holds an {IMAGE_TOKEN} mark: images belong to questions")
        contents.append(parts_of(message.text, left, message.keeps_spaces))
    return _chat(conversation, contents, form, is_plain)


def parts_of(text: str, kinds: Iterator[str], keeps_spaces: bool = False) -> list[dict[str, str]]:
    """Split a message's text into "text" parts and media parts. Marks take the next kinds, then "image".

    keeps_spaces: keep the record's parts unchanged; otherwise strip outer spaces and drop empty texts next to marks.
    """
    if not keeps_spaces and IMAGE_TOKEN not in text:
        return [{"type": "text", "text": text}]
    parts = split_parts(text)
    if not keeps_spaces:
        parts = [part for part in (part and part.strip() for part in parts) if part != ""]
    return [{"type": next(kinds, "image")} if part is None else {"type": "text", "text": part} for part in parts]


def render_own_prompt(
    conversation: Transcript | Sequence[Message], tokenizer: PreTrainedTokenizerBase, mm_use_im_start_end: bool = False
) -> str:
    """Render the text up to the start of the next answer, in the tokenizer's own template."""
    conversation = Transcript.of(conversation)
    source = own_template(tokenizer, bool(conversation.tools))
    chat = _as_chat(conversation, tokenizer, source, mm_use_im_start_end)
    return _rendered(chat, tokenizer, source, prompt=True)[0]


def _as_chat(
    conversation: Transcript, tokenizer: PreTrainedTokenizerBase, source: str, mm_use_im_start_end: bool
) -> _Chat:
    conversation, form, is_plain = _with_form(conversation, tokenizer, source, as_parts=False)
    placed, system = prepare(conversation.messages, "chat_template", mm_use_im_start_end)
    messages = (*([Message("system", system)] if system else ()), *placed)
    return _chat(replace(conversation, messages=messages), [message.text for message in messages], form, is_plain)


def _rendered(
    chat: _Chat,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and the spans inside {% generation %} blocks."""
    return template_process.render(
        **chat.variables,
        conversations=[chat.turns],
        tools=chat.tools,
        chat_template=source,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=marks,
        **tokenizer.special_tokens_map,
    )


def _cut(text: str, spans: list[Span]) -> list[Segment]:
    segments, done = [], 0
    for start, end, *rest in spans:
        segments += [Segment(text[done:start]), Segment(text[start:end], True, True, *rest)]
        done = end
    return [*segments, Segment(text[done:])]
