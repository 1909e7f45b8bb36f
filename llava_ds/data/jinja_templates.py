"""Jinja chat templates for exports: LLaVA's conversation formats, and a tokenizer's own template."""

from transformers import PreTrainedTokenizerBase

from llava_ds.constants import IMAGE_TOKEN, ConfigError
from llava_ds.data.sample import Message
from llava_ds.data.templates import TEMPLATES, render_prompt
from llava_ds.files.model_files import MAX_TEMPLATE_BYTES, shown
from llava_ds.tokenizer import begins_with_bos, first_space_pattern


def chat_template(template: str, tokenizer: PreTrainedTokenizerBase, mm_use_im_start_end: bool = False) -> str:
    """Build the Jinja template that writes the same text as training; for "chat_template", the tokenizer's own.

    It writes bos if training does, because many programs add no special token to a template's text.
    """
    if template == "chat_template":
        return own_template(tokenizer)
    source = CHAT_TEMPLATES[template].replace(IMAGE_TOKEN, TEMPLATES[template].image_text(mm_use_im_start_end))
    return source if TEMPLATES[template].whole or not begins_with_bos(tokenizer) else _bos(template, tokenizer) + source


def llama_cpp_template(template: str, mm_use_im_start_end: bool = False) -> str:
    """Build the Jinja template for llama.cpp: llama.cpp writes bos itself, and puts its own image marks into the text.

    Images come first in their message, as in the template for transformers.
    """
    image = _quoted(TEMPLATES[template].image_text(mm_use_im_start_end) + "\n")
    return CHAT_TEMPLATES[template].replace(_WORDS, _LLAMA_CPP_WORDS.replace("IMAGE", image))


def _bos(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the start of a Jinja template that writes bos.

    Some tokenizers add a space at the beginning of a text, but not after bos. Then the template writes this space.
    """
    text = render_prompt([Message("human", IMAGE_TOKEN)], template)
    begins_with_token = text.startswith((IMAGE_TOKEN, *tokenizer.all_special_tokens))
    scheme = getattr(tokenizer.backend_tokenizer.pre_tokenizer, "prepend_scheme", None)
    adds_space = scheme == "first" or first_space_pattern(tokenizer) is not None
    return "{{ bos_token + ' ' }}" if adds_space and not begins_with_token else "{{ bos_token }}"


def own_template(tokenizer: PreTrainedTokenizerBase, offers_tools: bool = False) -> str:
    """Return the tokenizer's chat template. offers_tools: choose the one for tools, if there are several. Raises
    ConfigError if it is missing or not a text."""
    try:
        source = tokenizer.get_chat_template(tools=[] if offers_tools else None)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{tokenizer.name_or_path}: the tokenizer's chat template can't be used: {error}") from error
    if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the tokenizer's chat template is {shown(source)}, expected text of up to "
            f"{MAX_TEMPLATE_BYTES:,} characters"
        )
    return source


def _quoted(text: str) -> str:
    """Quote a text as a Jinja string literal."""
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

# The macro for llama.cpp. Its image marks look like <__media__>, in a text or in parts of type "text".
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
    """Build a template from expressions that may use system (a text), text (of a message) and loop."""
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
