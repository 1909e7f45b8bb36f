"""Settings and chat template of a folder's processor, from the files that transformers reads.

Several files may contain the same setting. transformers' own functions choose among them here, so that a model is
trained and prompted with the same settings that its users' programs read.
"""

import contextlib
import json
from pathlib import Path

from transformers import AutoImageProcessor, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.video_processing_utils import BaseVideoProcessor

from llava_ds.constants import ConfigError
from llava_ds.files.model_files import (
    TEMPLATES_FOLDER,
    check_folder,
    is_there,
    library_errors,
    own_file,
    read_json,
    read_json_if_there,
    shown,
)

SETTINGS_FILES = (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)
TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja")
# Settings that change no pixel.
_NAMES_OF_KINDS = (
    "processor_class",
    "image_processor_type",
    "video_processor_type",
    "feature_extractor_type",
    "auto_map",
)
_COLOURS = ("image_mean", "image_std")
_HERE = {"local_files_only": True}


def image_settings(folder: str | Path, where: str) -> tuple[dict, str]:
    """Read the settings of a folder's image processor, and the name of their file. Raises ConfigError if there are
    none.

    Missing mean and deviation are filled in from transformers' class.
    """
    folder = Path(folder)
    found = _seen(folder, where)
    nested = found.get(PROCESSOR_NAME, {}).get("image_processor")
    if nested is None and IMAGE_PROCESSOR_NAME not in found:
        raise ConfigError(f"{where}: no {IMAGE_PROCESSOR_NAME} found: copy the folder again")
    with library_errors(where):
        settings, _ = ImageProcessingMixin.get_image_processor_dict(folder, **_HERE)
    file = PROCESSOR_NAME if settings == nested else IMAGE_PROCESSOR_NAME
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}: {file} can't be used: image_processor is not an object: copy it again")
    if missing := [name for name in _COLOURS if name not in settings]:
        with library_errors(where, f"{file} says no {' and no '.join(missing)}, and its class can't be opened"):
            kind = _image_processor(folder)
            settings = {**settings, **{name: list(getattr(kind, name)) for name in missing}}
    return settings, file


def video_settings(folder: str | Path, where: str) -> tuple[dict, str]:
    """Read the settings of a folder's video processor, and the name of their file; ({}, "") if no file has any."""
    folder = Path(folder)
    found = _seen(folder, where)
    nested = found.pop(PROCESSOR_NAME, {}).get("video_processor")
    if nested is None and not found:
        return {}, ""
    with library_errors(where):
        settings, _ = BaseVideoProcessor.get_video_processor_dict(folder, **_HERE)
    file = PROCESSOR_NAME if settings == nested else next(name for name, own in found.items() if own == settings)
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}: {file} can't be used: video_processor is not an object: copy it again")
    return settings, file


def whole_settings(folder: str | Path, where: str) -> dict:
    """Read processor_config.json, with the chat template that transformers' processor uses, if any.

    Raises ConfigError for a folder that transformers' processors refuse.
    """
    folder = Path(folder)
    check_folder(folder, where)  # transformers opens templates itself
    found = _seen(folder, where)
    if is_there(folder / "audio_tokenizer_config.json") or "audio_tokenizer" in found.get(PROCESSOR_NAME, {}):
        raise ConfigError(
            f"{where}: its processor brings a model for sounds (audio_tokenizer), not supported here: take it out"
        )
    _old_template(folder, where)
    with library_errors(where, "its processor's files can't be read"):
        settings, _ = ProcessorMixin.get_processor_dict(folder, **_HERE)
    return settings


def processor_template(folder: str | Path, where: str) -> str | None:
    """Find the chat template that transformers' processor uses from a folder; None if only the tokenizer may have
    one."""
    return _default_of(whole_settings(folder, where).get("chat_template"), PROCESSOR_NAME, where)


def settings_passed_over(folder: str | Path, where: str) -> list[str]:
    """Describe settings files that transformers ignores and that differ from those it uses."""
    folder, clauses = Path(folder), []
    found = _seen(folder, where)
    kinds = (("images", image_settings, IMAGE_PROCESSOR_NAME), ("videos", video_settings, VIDEO_PROCESSOR_NAME))
    for what, read, name in kinds:
        if name not in found:
            continue
        taken, file = read(folder, where)
        if file != name and (others := _others(folder, taken, found[name], what)):
            said = ", ".join(f"{key} {shown(new)} (taken: {shown(old)})" for key, (old, new) in others.items())
            which = f"settings for {what} are those of {file}: {name} is passed over"
            clauses.append(f"{which}, and its {said} has no effect on {what}")
    return clauses


def _seen(folder: Path, where: str) -> dict[str, dict]:
    """Read the settings files that exist, by name, before transformers opens them."""
    return {name: read_json(folder / name, where) for name in SETTINGS_FILES if is_there(folder / name)}


def _old_template(folder: Path, where: str) -> str | None:
    file = TEMPLATE_FILES[0]
    return _default_of(read_json_if_there(folder / file, where).get("chat_template"), file, where)


def _default_of(template: object, file: str, where: str) -> str | None:
    """Return the chat template that transformers' processor uses by default. Raises ConfigError if it would use none of
    the named ones."""
    if isinstance(template, dict) and template and "default" not in template:
        names = ", ".join(map(shown, template))
        raise ConfigError(
            f"{where}: {file} has the chat templates {names}, and none named 'default': give one that name"
        )
    found = template.get("default") if isinstance(template, dict) else template
    if not isinstance(found, (str, type(None))):
        expected = "expected a text, or texts by name"
        raise ConfigError(f"{where}: {file} says chat_template {shown(template)}, {expected}")
    return found


def _others(folder: Path, taken: dict, other: dict, what: str) -> dict[str, tuple[object, object]]:
    """Compare the settings of two files: (value used, value ignored) by name, where they differ.

    Settings are compared as transformers' class interprets them, with its defaults and former names. They are compared
    verbatim if no class runs without torchvision, or if the class refuses them.
    """
    if taken == other:
        return {}
    names = set(other)
    if what == "images":
        with contextlib.suppress(ConfigError), library_errors(str(folder)):
            kind = type(_image_processor(folder))
            taken, other = (json.loads(json.dumps(kind.from_dict(each).to_dict())) for each in (taken, other))
            names = set(kind.valid_kwargs.__annotations__)
    names -= set(_NAMES_OF_KINDS)
    return {name: (taken.get(name), other.get(name)) for name in sorted(names) if taken.get(name) != other.get(name)}


def _image_processor(folder: Path):
    """Open a folder's image processor with transformers, without torchvision."""
    return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False, **_HERE)


def templates_passed_over(folder: str | Path, where: str, template: str) -> list[str]:
    """Describe files with another chat template than the one used; [] if none differs."""
    folder = Path(folder)
    texts: dict[str, object] = {TEMPLATE_FILES[0]: _old_template(folder, where)}
    for name in (TEMPLATE_FILES[1], f"{TEMPLATES_FOLDER}/default.jinja"):
        if is_there(folder / name):
            with library_errors(where):
                texts[name] = own_file(folder / name).read_text(encoding="utf-8")
    for name in (PROCESSOR_NAME, "tokenizer_config.json"):
        texts[name] = _default(read_json_if_there(folder / name, where).get("chat_template"))
    same = {name: _as_rendered(text) == _as_rendered(template) for name, text in texts.items() if isinstance(text, str)}
    others = [name for name, is_same in same.items() if not is_same]
    if not others:
        return []
    taken = next((name for name, is_same in same.items() if is_same), "another file")
    which, be = " and ".join(others), "is" if len(others) == 1 else "are"
    return [f"the chat template is that of {taken}: {which}, with another one, {be} passed over"]


def _default(templates: object) -> object:
    """Find the default among a tokenizer's named templates."""
    if isinstance(templates, list):
        return next((t.get("template") for t in templates if isinstance(t, dict) and t.get("name") == "default"), None)
    return templates


def _as_rendered(template: str) -> str:
    return template.removesuffix("\n")  # as jinja does
