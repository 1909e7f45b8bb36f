"""Jinja chat templates: those for exported processors, and rendering with a tokenizer's own template."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IMAGE_TOKEN, ConfigError, DataError
from llava_ds.data import template_process
from llava_ds.data.sample import Message, Transcript
from llava_ds.data.special_tokens import split_parts
from llava_ds.data.templates import TEMPLATES, Segment, prepare, render_prompt
from llava_ds.files.model_files import MAX_TEMPLATE_BYTES, shown
from llava_ds.tokenizer import begins_with_bos, first_space_pattern, special_tokens

ROLES = {"human": "user", "gpt": "assistant"}


def chat_template(template: str, tokenizer: PreTrainedTokenizerBase, mm_use_im_start_end: bool = False) -> str:
    """The Jinja template that writes the same text as training; for "chat_template", the tokenizer's own.

    It begins with bos where training does: many programs add no token to a template's text.
    """
    if template == "chat_template":
        return own_template(tokenizer)
    source = CHAT_TEMPLATES[template].replace(IMAGE_TOKEN, TEMPLATES[template].image_text(mm_use_im_start_end))
    return source if TEMPLATES[template].whole or not begins_with_bos(tokenizer) else _bos(template, tokenizer) + source


def llama_cpp_template(template: str, mm_use_im_start_end: bool = False) -> str:
    """The Jinja template for llama.cpp, which writes bos itself, and a mark of its own for an image into the text.

    Images come first in their message, as in the template for transformers.
    """
    image = _quoted(TEMPLATES[template].image_text(mm_use_im_start_end) + "\n")
    return CHAT_TEMPLATES[template].replace(_WORDS, _LLAMA_CPP_WORDS.replace("IMAGE", image))


def _bos(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning of a Jinja template with bos.

    Tokenizers that put a space before a whole text put none behind a token, so the template writes it.
    """
    text = render_prompt([Message("human", IMAGE_TOKEN)], template)
    begins_with_token = text.startswith((IMAGE_TOKEN, *tokenizer.all_special_tokens))
    scheme = getattr(tokenizer.backend_tokenizer.pre_tokenizer, "prepend_scheme", None)
    adds_space = scheme == "first" or first_space_pattern(tokenizer) is not None
    return "{{ bos_token + ' ' }}" if adds_space and not begins_with_token else "{{ bos_token }}"


def own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template. Raises ConfigError if there is none, or if it is no text."""
    try:
        source = tokenizer.get_chat_template()
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{tokenizer.name_or_path}: the tokenizer's chat template can't be used: {error}") from error
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer's chat template is {shown(source)}, expected a text of up to "
            f"{MAX_TEMPLATE_BYTES:,} characters"
        )
    return source


@dataclass(frozen=True)
class _Chat:
    """All that a Jinja template is handed of a conversation: turns as dicts, tools, and values of its variables."""

    turns: list[dict[str, object]]
    tools: list[object] | None = None
    variables: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, turns: list[dict[str, object]], conversation: Transcript) -> "_Chat":
        """Turns, with the tools and variables of a transcript."""
        tools = json.loads(conversation.tools) if conversation.tools else None
        variables = json.loads(conversation.template_kwargs) if conversation.template_kwargs else {}
        return cls(turns, tools, variables)


def render_own(
    conversation: Transcript | Sequence[Message], tokenizer: PreTrainedTokenizerBase, mm_use_im_start_end: bool = False
) -> list[Segment]:
    """Render a conversation in the tokenizer's own template; an answer is supervised with its end marker.

    If the template marks answers by {% generation %}, those spans are supervised. Otherwise a second rendering, with
    other texts in place of the answers, has to agree with the first in everything around them. Raises DataError if the
    template refuses the messages or changes more of an answer than its outer spaces.
    """
    return _segments(_as_chat(Transcript.of(conversation), mm_use_im_start_end), tokenizer)


def _segments(
    chat: _Chat, tokenizer: PreTrainedTokenizerBase, prompt: str = "", source: str | None = None
) -> list[Segment]:
    """Segments of a chat as render_own gives them. prompt: what the template writes before an answer that is to come;
    spaces between it and an answer that is there are supervised with the answer; source: another template than the
    tokenizer's."""
    source = own_template(tokenizer) if source is None else source
    if re.search(r"\{%-?\s*generation\b", source):
        text, spans = _rendered(chat, tokenizer, source, marks=True)
        return _cut(text, spans)
    text, _ = _rendered(chat, tokenizer, source)
    answers = [_writings(turn) for turn in chat.turns if turn["role"] == "assistant"]
    markers = [f"\ue000{i}\ue001" for i in range(len(answers))]
    names = iter(markers)
    marked = [_with_text(turn, next(names)) if turn["role"] == "assistant" else turn for turn in chat.turns]
    around = re.split("|".join(markers), _rendered(replace(chat, turns=marked), tokenizer, source)[0])
    around = around if markers else [text]
    if len(around) != len(answers) + 1:
        raise DataError("the tokenizer's chat template leaves answers out: give --version one of LLaVA's templates")
    special = re.compile(r"\s*(?:" + "|".join(map(re.escape, special_tokens(tokenizer))) + ")")
    spans, end = [], len(around[0])
    if not text.startswith(around[0]):
        raise DataError(_UNSTABLE)
    for answer, after in zip(answers, around[1:]):
        start = end
        written = next((a for a in answer if text.startswith(a + after, start)), None)
        if written is None:
            raise DataError(_UNSTABLE)
        end = start + len(written)
        marker = special.match(after)
        spans.append((_behind_prompt(text, start, prompt), end + (marker.end() if marker else 0)))
        end += len(after)
    if end != len(text):
        raise DataError(_UNSTABLE)
    return _cut(text, spans)


def _behind_prompt(text: str, start: int, prompt: str) -> int:
    """The place behind the prompt before an answer at start, if only spaces are between them; else start."""
    if not prompt.strip():
        return start
    behind = text.rfind(prompt, 0, start) + len(prompt)
    return behind if behind >= len(prompt) and not text[behind:start].strip() else start


def _writings(turn: dict[str, object]) -> list[str]:
    """The texts that a template may write for an answer: as it is, or without outer spaces, of all or of each part."""
    content = turn["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    whole = "".join(texts)
    return [whole, whole.strip(), "".join(text.strip() for text in texts)]


def _with_text(turn: dict[str, object], text: str) -> dict[str, object]:
    is_text = isinstance(turn["content"], str)
    return {**turn, "content": text if is_text else [{"type": "text", "text": text}]}


def render_ready(
    conversation: Transcript | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    kinds: Sequence[str] = (),
    source: str | None = None,
) -> list[Segment]:
    """Render a conversation as a ready model's processor does, with images where their marks are. prompt: of
    answer_prompt; kinds: "image" or "video" for each mark; source: another template than the tokenizer's. Raises
    DataError as render_own does."""
    return _segments(_as_parts(Transcript.of(conversation), kinds), tokenizer, prompt, source)


def render_ready_prompt(
    conversation: Transcript | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    kinds: Sequence[str] = (),
    source: str | None = None,
) -> str:
    """The text up to the beginning of the next answer, as a ready model's processor writes it. kinds, source: as of
    render_ready."""
    source = own_template(tokenizer) if source is None else source
    return _rendered(_as_parts(Transcript.of(conversation), kinds), tokenizer, source, prompt=True)[0]


def answer_prompt(tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> str:
    """The text that the template writes before an answer that is to come; "" for a template that writes none. source:
    another template than the tokenizer's."""
    source = own_template(tokenizer) if source is None else source
    chat = _as_parts(Transcript((Message("human", "x"),)))
    before, after = (_rendered(chat, tokenizer, source, prompt=prompt)[0] for prompt in (False, True))
    return after[len(before) :] if after.startswith(before) else ""


def answer_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The special token that ends an answer in a ready model's template; None if there is none."""
    answer = [Message("human", "x"), Message("gpt", "y")]
    text = "".join(segment.text for segment in render_ready(answer, tokenizer, "") if segment.supervised)
    return next((token for token in special_tokens(tokenizer) if token and text.endswith(token)), None)


def _as_parts(conversation: Transcript, kinds: Sequence[str] = ()) -> _Chat:
    """Turns whose content is a list of parts: images where their marks are, and the text between without its outer
    spaces, as the vendors' own trainers cut it."""
    roles, messages = {**ROLES, "system": "system"}, conversation.messages
    if not any(message.role == "human" for message in messages):
        raise DataError("there is no question in the conversation")
    turns, left = [], iter(kinds)
    for i, message in enumerate(messages):
        if message.role not in roles or (message.role == "system" and i > 0):
            raise DataError(f"turn {i} is from {message.role!r}, expected 'human' or 'gpt'")
        if IMAGE_TOKEN in message.text and message.role != "human":
            raise DataError(f"turn {i}, from {message.role!r}, holds an {IMAGE_TOKEN} mark: images belong to questions")
        turns.append({"role": roles[message.role], "content": parts_of(message.text, left, message.keeps_spaces)})
    return _Chat.of(turns, conversation)


def parts_of(text: str, kinds: Iterator[str], keeps_spaces: bool = False) -> list[dict[str, str]]:
    """A message's text as parts of type "text", and of the next kinds where its marks are; of "image" behind these.

    keeps_spaces: the parts that a record has; else texts without their outer spaces, and no empty one beside a mark.
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
    """The text up to the beginning of the next answer, in the tokenizer's own template."""
    chat = _as_chat(Transcript.of(conversation), mm_use_im_start_end)
    return _rendered(chat, tokenizer, own_template(tokenizer), prompt=True)[0]


_UNSTABLE = (
    "the tokenizer's chat template writes something else around an answer when its text is another, so what is "
    "learned can't be told: give --version one of LLaVA's templates, or mark answers in it by {% generation %}"
)


def _as_chat(conversation: Transcript, mm_use_im_start_end: bool) -> _Chat:
    placed, system = prepare(conversation.messages, "chat_template", mm_use_im_start_end)
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ROLES[message.role], "content": message.text} for message in placed]
    return _Chat.of(turns, conversation)


# Arguments of transformers' render_jinja_template, and names under which it hands the conversation to a template.
_NO_VARIABLES = (
    "conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
    "continue_final_message", "add_generation_prompt",
)  # fmt: skip


def _refuse_variables(chat: _Chat, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise DataError for variables that belong to transformers, or that the template does not read."""
    for name in chat.variables:
        if name in _NO_VARIABLES or name in tokenizer.special_tokens_map:
            raise DataError(f"sets the template variable {name!r}, which is set for every conversation: leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", source):
            raise DataError(f"sets the template variable {name!r}, which the chat template does not read: leave it out")


def _rendered(
    chat: _Chat,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    *,
    prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the spans inside {% generation %} blocks."""
    _refuse_variables(chat, tokenizer, source)
    return template_process.render(
        **chat.variables,
        conversations=[chat.turns],
        tools=chat.tools,
        chat_template=source,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=marks,
        **tokenizer.special_tokens_map,
    )


def _cut(text: str, spans: list[tuple[int, int]]) -> list[Segment]:
    segments, done = [], 0
    for start, end in spans:
        segments += [Segment(text[done:start]), Segment(text[start:end], True, True)]
        done = end
    return [*segments, Segment(text[done:])]


def _quoted(text: str) -> str:
    """The text as a string literal of Jinja."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


# A message's content is a text, or a list of parts of type "image" and "text".
_WORDS = (
    "{% macro words(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% set parts = namespace(images=0, text='') %}{% for part in content %}"
    "{% if part['type'] == 'image' %}{% set parts.images = parts.images + 1 %}"
    "{% elif part['type'] == 'text' %}{% set parts.text = parts.text + part['text'] %}{% endif %}{% endfor %}"
    "{% set whole = '<image>\\n' * parts.images + parts.text %}"
    "{{ whole | trim if parts.images == 1 else whole }}{% endif %}{% endmacro %}"
)

# The same for llama.cpp: its marks are like <__media__>, in a content that is a text, or in parts of type "text".
_LLAMA_CPP_WORDS = (
    "{% macro words(content) %}{% set parts = namespace(images=0, marks='', text='', whole='') %}"
    "{% if content is string %}{% set parts.whole = content %}{% else %}{% for part in content %}"
    "{% if part['type'] == 'text' %}{% set parts.whole = parts.whole + part['text'] %}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for piece in parts.whole.split('<__media') %}{% if loop.first %}{% set parts.text = piece %}{% else %}"
    "{% set cut = piece.split('__>') %}{% set parts.images = parts.images + 1 %}"
    f"{{% set parts.marks = parts.marks + IMAGE.replace('{IMAGE_TOKEN}', '<__media' + cut[0] + '__>') %}}"
    "{% set parts.text = parts.text + (cut[1:] | join('__>')) %}{% endif %}{% endfor %}"
    "{% set whole = parts.marks + parts.text %}{{ whole | trim if parts.images == 1 else whole }}{% endmacro %}"
)


def _jinja(template: str, opening: str, user: str, assistant: str, prompt: str, closing: str = "''") -> str:
    """A template made of expressions that may use system (a text), text (of a message) and loop."""
    return (
        _WORDS
        + "{% if messages and messages[0]['role'] == 'system' %}"
        + "{% set system = words(messages[0]['content']) %}{% set turns = messages[1:] %}"
        + f"{{% else %}}{{% set system = {_quoted(TEMPLATES[template].system)} %}}{{% set turns = messages %}}"
        + "{% endif %}"
        + f"{{{{ {opening} }}}}{{% for turn in turns %}}{{% set text = words(turn['content']) %}}"
        + f"{{% if turn['role'] == 'user' %}}{{{{ {user} }}}}{{% else %}}{{{{ {assistant} }}}}{{% endif %}}"
        + "{% endfor %}"
        + f"{{% if add_generation_prompt %}}{{{{ {_quoted(prompt)} }}}}{{% else %}}{{{{ {closing} }}}}{{% endif %}}"
    )


def _speakers(template: str) -> str:
    user, assistant = ("'### " + name + ": ' + text + '\\n'" for name in ("Human", "Assistant"))
    return _jinja(template, "system + '\\n\\n'", user, assistant, "### Assistant:", "'### '")


def _two_separators(template: str) -> str:
    end = _quoted(TEMPLATES[template].end_markers[0])
    user = "'USER: ' + text + ' ' if text else 'USER:'"
    assistant = f"'ASSISTANT: ' + text + {end} if text else 'ASSISTANT:'"
    return _jinja(template, "system + ' '", user, assistant, "ASSISTANT:")


def _llama_2(template: str, separator: str) -> str:
    system = "('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '')"
    user = f"('' if loop.first else {_quoted(separator)}) + '[INST] ' + {system} + text + ' [/INST]' if text else ''"
    return _jinja(template, "''", user, "' ' + text + ' </s>' if text else ''", "")


def _turns(template: str, user: str, assistant: str, end: str, opening: str = "''") -> str:
    content = f"text + {_quoted(end)} if text else ''"
    return _jinja(template, opening, f"{_quoted(user)} + ({content})", f"{_quoted(assistant)} + ({content})", assistant)


def _mpt(template: str) -> str:
    opening = "'<|im_start|>system\\n' + system + '<|im_end|>' if system else ''"
    return _turns(template, "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", opening)


def _llama_3() -> str:
    def turn(name: str, text: str) -> str:
        return f"'<|start_header_id|>{name}<|end_header_id|>\\n\\n' + {text} | trim + '<|eot_id|>'"

    prompt = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    opening = "'<|begin_of_text|>' + " + turn("system", "system")
    return _jinja("llama_3", opening, turn("user", "text"), turn("assistant", "text"), prompt)


def _gemma() -> str:
    content = "(system + '\\n\\n' if loop.first and system else '') + text"
    user = f"'<start_of_turn>user\\n' + ({content} + '<end_of_turn>\\n' if text or loop.first and system else '')"
    assistant = "'<start_of_turn>model\\n' + (text + '<end_of_turn>\\n' if text else '')"
    return _jinja("gemma", "''", user, assistant, "<start_of_turn>model\n")


CHAT_TEMPLATES: dict[str, str] = {
    "plain": _jinja("plain", "''", "'<image>'", "text + '\\n'", ""),
    "llava_v0": _speakers("llava_v0"),
    "v0_mmtag": _speakers("v0_mmtag"),
    "v1": _two_separators("v1"),
    "llava_v1": _two_separators("llava_v1"),
    "v1_mmtag": _two_separators("v1_mmtag"),
    "llama_2": _llama_2("llama_2", "<s>"),
    "llava_llama_2": _llama_2("llava_llama_2", "<s>"),
    "mistral_instruct": _llama_2("mistral_instruct", ""),
    "mistral_orca": _mpt("mistral_orca"),
    "mistral_zephyr": _turns(
        "mistral_zephyr",
        "<|user|>\n",
        "<|assistant|>\n",
        "</s>",
        "'<|system|>\\n' + system + '</s>' if system else ''",
    ),
    "mpt": _mpt("mpt"),
    "chatml_direct": _mpt("chatml_direct"),
    "chatml": _jinja(
        "chatml",
        "'<|im_start|>system\\n' + system + '<|im_end|>\\n'",
        "'<|im_start|>user\\n' + text + '<|im_end|>\\n'",
        "'<|im_start|>assistant\\n' + text + '<|im_end|>\\n'",
        "<|im_start|>assistant\n",
    ),
    "llama_3": _llama_3(),
    "gemma": _gemma(),
    "phi": _two_separators("phi"),
}
