"""Messages about wrong keys and values of a DeepSpeed JSON, with a hint at the right ones."""

import enum
import typing
from collections.abc import Mapping

from pydantic import BaseModel

from llava_ds.config.arguments import every_flag
from llava_ds.constants import did_you_mean, in_short
from llava_ds.engine.ds_config.draft import AUTO, as_json
from llava_ds.engine.ds_config.schema import fields_of, options, section_of, sections
from llava_ds.extensions.active import own_keys

KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
}


def message(key: str, value: object, problem: dict, refused: Mapping[str, str]) -> str:
    """Translate one of pydantic's errors to a message of this project.

    refused: keys that are refused at any level, with the remedy.
    """
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        *parent, name = problem["loc"]
        return _unknown(".".join(parent), name, value, refused)
    if kind == "missing":
        return f"{key} is missing in the DeepSpeed JSON: write it, or remove its section"
    wanted = KINDS.get(kind)
    if kind == "model_type":
        wanted = f"an object with {', '.join(list(fields_of(sections()[key]))[:3])}, ..."
    if kind == "literal_error":
        wanted = context["expected"].replace("'", '"')
    for limit, words in (("gt", "above"), ("ge", "from"), ("lt", "below"), ("le", "up to")):
        if limit in context:
            wanted = f"a number {words} {context[limit]:g}"
    if wanted is not None:
        return f"{key} is {as_json(value)} in the DeepSpeed JSON: write {wanted}"
    message = problem["msg"].partition(", ")[2] or problem["msg"]  # raised by DeepSpeed's own validator
    return f"{key or 'a key'} in the DeepSpeed JSON: {message}"


def _unknown(parent: str, name: str, value: object, refused: Mapping[str, str]) -> str:
    """Return the message about a key that a section doesn't have."""
    homes = [place for place, model in sections().items() if name in fields_of(model)]
    nested = _nested(parent, name.split(".")) if "." in name else None
    fields = fields_of(sections()[parent])
    known = [key for key in fields if _is_of_use(f"{parent}.{key}".removeprefix("."), refused)]
    if nested is not None:
        hint = f"nest it, as {nested}"
    elif len(homes) == 1:
        hint = _at_home(homes[0], name, refused)
    elif not parent and name in every_flag() and not isinstance(value, (dict, list)):
        hint = f"it is a flag, give --{name} {in_short(value)}"
    else:
        otherwise = f"{parent} has {', '.join(known)}" if parent else "DeepSpeed would ignore it, remove it"
        fitting = [key for key in known if _is_of_kind(value, fields[key])]
        hint = did_you_mean(name, [*fitting, *([] if parent else own_keys())], otherwise)
    shown = name if name.isascii() and name.replace("_", "a").isalnum() else as_json(name)
    return f"{parent + '.' if parent else ''}{shown} in the DeepSpeed JSON is not a DeepSpeed key: {hint}"


def _is_of_use(key: str, refused: Mapping[str, str]) -> bool:
    """True for a key that may be suggested: not removed, not renamed, and not missing its prefix."""
    parent, _, name = key.rpartition(".")
    info = sections()[parent].model_fields.get(name)
    without_prefix = info is not None and info.alias is not None
    return not (without_prefix or key in refused)


def _at_home(home: str, name: str, refused: Mapping[str, str]) -> str:
    """Return a hint that names the right section for a misplaced key, or the reason if that section refuses it too."""
    key = f"{home}.{name}".removeprefix(".")
    if key in refused:
        return refused[key]
    if home.startswith("zero_optimization.zenflow"):
        return "it belongs to ZenFlow, not supported yet: remove it"
    return f"it belongs in {home}" if home else "it belongs at the top level, outside sections"


def _is_of_kind(value: object, annotation: object) -> bool:
    """True if a key of this annotation could hold the value (a section can't hold a number)."""
    if value == AUTO:
        return section_of(annotation) is None
    kind = "section" if isinstance(value, dict) else "list" if isinstance(value, list) else None
    kind = kind or ("truth" if isinstance(value, bool) else "text" if isinstance(value, str) else "number")
    return kind in _kinds_of(annotation)


def _kinds_of(annotation: object) -> set[str]:
    """Return the kinds of values that an annotation accepts."""
    kinds: set[str] = set()
    for option in options(annotation):
        origin = typing.get_origin(option)
        if option is object:
            return {"section", "list", "truth", "text", "number"}
        if origin is typing.Literal:
            kinds |= {"text" if isinstance(each, str) else "number" for each in typing.get_args(option)}
        elif option is dict or origin is dict or (isinstance(option, type) and issubclass(option, BaseModel)):
            kinds.add("section")
        elif option is list or origin is list:
            kinds.add("list")
        elif option is bool:
            kinds.add("truth")
        elif option in (int, float):
            kinds.add("number")
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            kinds |= {"number" if isinstance(each.value, int) else "text" for each in option}
        elif option is not type(None):
            kinds.add("text")
    return kinds


def _nested(parent: str, path: list[str]) -> str | None:
    """Return a dotted key written as nested JSON objects, or None if the key is unknown."""
    model = sections()[parent]
    for index, name in enumerate(path):
        annotation = fields_of(model).get(name)
        if annotation is None:
            return None
        model = section_of(annotation)
        if model is None:
            if index < len(path) - 1 and dict not in options(annotation):
                return None
            break
    return "{" + ": {".join(f'"{name}"' for name in path) + ": ..." + "}" * len(path)
