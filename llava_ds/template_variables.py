"""Variables of Jinja chat templates (--chat_template_kwargs), stored as defaults at the beginning of the template.

Every program that renders the template (training, evaluation, transformers, servers) then uses these values, without
having to be given them.
"""

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

import jinja2
from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE

from llava_ds.constants import ConfigError
from llava_ds.files.model_files import MAX_NESTING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN = 200  # maximum characters of a flag's value in a message
FLAG = "chat_template_kwargs"  # the name in Hugging Face's, TRL's and servers' renderers

# Names that variables must not have: arguments of transformers' renderers and their callers, and names that the
# renderers define for every template.
RESERVED = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize", "processor"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs", "processor_kwargs"),
        *("load_audio_from_video", "sanitize_control_tokens", "template_kwargs", "chat_template_kwargs"),
        *("raise_exception", "strftime_now", "tojson", "generation", "loop", "self", "caller", "varargs", "kwargs"),
        *DEFAULT_NAMESPACE,
    }
)

# Jinja code that sets one variable's default. transformers removes the line break, so the output does not change.
_DEFAULT = "{{%- if {name} is not defined %}}{{%- set {name} = {value} %}}{{%- endif %}}\n"
_KEPT = re.compile(r"\{%- if (\w+) is not defined %\}\{%- set \1 = (.*) %\}\{%- endif %\}\n")
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


def parse_variables(text: str | None) -> dict[str, object]:
    """Parse --chat_template_kwargs to variables by name, {} for None. Raises ConfigError if it is not a JSON
    object."""
    if text is None:
        return {}
    shown = text[:_SHOWN].encode("utf-8", "backslashreplace").decode() + "..." * (len(text) > _SHOWN)
    given = f"--{FLAG} {shown}"
    example = """write it like '{"enable_thinking": false}'"""
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
        text.encode("utf-8")
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8")
        if not isinstance(found, dict):
            raise ValueError(f"it is {_kind(found)}")
        if _depth(found) > MAX_NESTING:
            raise RecursionError
    except RecursionError:
        raise ConfigError(f"{given} is nested deeper than {MAX_NESTING} levels: {example}") from None
    except ValueError as error:
        why = "it holds half a character" if isinstance(error, UnicodeEncodeError) else str(error)
        raise ConfigError(f"{given} can't be read as a JSON object ({why}): {example}") from None
    return found


def read_variables(source: str, tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Find the names of the variables that a template reads. Raises ConfigError for an invalid template."""
    try:
        names = _undeclared(source)
    except (jinja2.TemplateError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{tokenizer.name_or_path}: the tokenizer's chat template can't be read: {why}") from error
    return {name for name in names if not is_reserved(name, tokenizer)}


@lru_cache(maxsize=8)
def _undeclared(source: str) -> frozenset[str]:
    """Find all names that a template reads before it sets them. Raises jinja2's errors.

    The template is only parsed. jinja2.meta would compile it and compute its constants: that may exhaust memory if the
    template is untrusted.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = environment.parse(_GENERATION.sub(_as_condition, source))
    stored: set[str] = set()
    loaded: set[str] = set()
    macros = [*tree.find_all(nodes.Macro)]
    stored |= {macro.name for macro in macros}
    _read(tree, stored, loaded)
    for macro in macros:  # macros are called after the template's names are set
        own = stored | {argument.name for argument in macro.args}
        for node in (*macro.defaults, *macro.body):
            _read(node, own, loaded)
    return frozenset(loaded)


def _read(node: nodes.Node, stored: set[str], loaded: set[str]) -> None:
    """Collect the names that a part of a template sets, and those that it reads first, in text order."""
    if isinstance(node, nodes.Macro):
        return
    if isinstance(node, nodes.Name):
        if node.ctx == "store":
            stored.add(node.name)
        elif node.name not in stored:
            loaded.add(node.name)
        return
    inner = [*node.iter_child_nodes()]
    if isinstance(node, (nodes.Assign, nodes.For)):  # the value is read before the target is set
        inner = [node.node if isinstance(node, nodes.Assign) else node.iter, *inner]
    for each in inner:
        _read(each, stored, loaded)


def is_reserved(name: str, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return True for names that the renderer sets itself: RESERVED, and the special tokens."""
    return name in RESERVED or name in tokenizer.special_tokens_map


def variables_problem(variables: dict[str, object], source: str, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return why a template can't use these variables, as text that follows the flag in a message; None if it can."""
    if taken := [name for name in variables if is_reserved(name, tokenizer)]:
        return f"sets {taken[0]!r}, but that is set for every conversation: leave it out"
    known = read_variables(source, tokenizer)
    if unknown := [name for name in variables if name not in known]:
        reads = f"the variables that it reads are {', '.join(sorted(known))}" if known else "it reads no variables"
        return f"sets {', '.join(map(repr, unknown))}, but the chat template does not read it: {reads}"
    return None


def with_defaults(source: str, variables: dict[str, object]) -> str:
    """Prefix a template with default values for variables, replacing existing defaults."""
    kept, rest = split_defaults(source)
    values = {**kept, **{name: _literal(value) for name, value in variables.items()}}
    return "".join(_DEFAULT.format(name=name, value=value) for name, value in values.items()) + rest


def split_defaults(source: str) -> tuple[dict[str, str], str]:
    """Split a template into the defaults at its beginning (as Jinja literals, by name) and the rest."""
    kept: dict[str, str] = {}
    while (match := _KEPT.match(source)) is not None and _is_literal(match[2]):
        kept.setdefault(match[1], match[2])
        source = source[match.end() :]
    return kept, source


def default_values(source: str) -> dict[str, object]:
    """Return a template's defaults as Python values, by name."""
    return {name: _evaluated(value) for name, value in split_defaults(source)[0].items()}


def set_variables(tokenizer: "PreTrainedTokenizerBase", text: str | None, version: str) -> list[str]:
    """Prefix a tokenizer's chat template with the variables of --chat_template_kwargs. Returns lines that describe
    them.

    version: the conversation template. Raises ConfigError if the variables can't be used.
    """
    variables = parse_variables(text)
    is_jinja = version in ("chat_template", "processor")
    if variables and not is_jinja:
        raise ConfigError(
            f"--{FLAG} {text}: --version {version} is one of LLaVA's own templates and has no variables: leave it "
            "out, or give --version chat_template for the tokenizer's own template"
        )
    source = tokenizer.chat_template
    if variables and isinstance(source, dict):
        raise ConfigError(
            f"--{FLAG} {text}: the tokenizer of {tokenizer.name_or_path} has several chat templates "
            f"({', '.join(map(str, source))}): leave one of them in its folder, as chat_template.jinja"
        )
    if not is_jinja or not isinstance(source, str):
        return []
    kept, _ = split_defaults(source)
    if variables and (problem := variables_problem(variables, source, tokenizer)) is not None:
        raise ConfigError(f"--{FLAG} {text} {problem}")
    if variables:
        tokenizer.chat_template = with_defaults(source, variables)
    lines = []
    for name, value in split_defaults(tokenizer.chat_template)[0].items():
        was = kept.get(name, value)
        instead = f" (--{FLAG}), instead of {was} in the model's own chat template" if was != value else ""
        lines.append(f"chat template: {name} = {value}{instead}")
    return lines


def _literal(value: object) -> str:
    """Format a JSON value as a Jinja literal, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str):  # no \u escapes of surrogate pairs, because Jinja does not join them
        text = json.dumps(value, ensure_ascii=False)
        return "".join(f"\\u{ord(char):04x}" if char in "\x7f\x85\u2028\u2029" else char for char in text)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _evaluated(literal: str) -> object:
    """Convert a Jinja literal to a Python value. Computes nothing, because the template may be untrusted; raises
    ValueError for anything but a literal."""
    try:
        [output] = jinja2.Environment().parse("{{ " + literal + " }}").body
        [expression] = output.nodes
    except (jinja2.TemplateError, RecursionError, AttributeError) as error:
        raise ValueError(f"{literal} is not a literal") from error
    return _constant(expression)


def _constant(node: nodes.Node) -> object:
    if isinstance(node, nodes.Const):
        return node.value
    if isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const):
        return -node.node.value
    if isinstance(node, nodes.List):
        return list(map(_constant, node.items))
    if isinstance(node, nodes.Dict):
        return {_constant(pair.key): _constant(pair.value) for pair in node.items}
    raise ValueError(f"a {type(node).__name__} is not a literal")


def _is_literal(text: str) -> bool:
    try:
        _evaluated(text)
    except ValueError:
        return False
    return True


def _as_condition(match: re.Match) -> str:
    """Replace {% generation %} and {% endgeneration %} by an `if`, because only transformers can parse these tags."""
    return f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it says {name}, not a JSON number")


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it names {doubles[0]!r} twice")
    return dict(pairs)


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
