"""Read the settings and the chat template of a folder's processor.

Several files may contain the same setting. transformers' own functions choose among them, so that training uses the
same settings as programs that open the model with transformers.
"""

from pathlib import Path

from transformers import AutoImageProcessor, ProcessorMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
from transformers.video_processing_utils import BaseVideoProcessor

from llava_ds.constants import ConfigError
from llava_ds.files.model_files import (
    check_folder,
    is_there,
    library_errors,
    read_json,
    read_json_if_there,
    shown,
)

SETTINGS_FILES = (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)
TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja")
# Settings that only name classes, and don't affect pixels.
NAMES_OF_KINDS = (
    "processor_class",
    "image_processor_type",
    "video_processor_type",
    "feature_extractor_type",
    "auto_map",
)
_COLOURS = ("image_mean", "image_std")
_HERE = {"local_files_only": True}


def image_settings(folder: str | Path, where: str) -> tuple[dict, str]:
    """Return the settings of a folder's image processor, and the name of the file that has them.

    Missing means and deviations are filled in from transformers' class. Raises ConfigError if no file has settings.
    """
    folder = Path(folder)
    found = settings_files(folder, where)
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
            kind = image_processor(folder)
            settings = {**settings, **{name: list(getattr(kind, name)) for name in missing}}
    return settings, file


def video_settings(folder: str | Path, where: str) -> tuple[dict, str]:
    """Return the settings of a folder's video processor and the name of the file that has them; ({}, "") if none."""
    folder = Path(folder)
    found = settings_files(folder, where)
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
    """Return processor_config.json's settings, with the chat template that transformers' processor would use.

    Raises ConfigError if transformers' processors could not open the folder.
    """
    folder = Path(folder)
    check_folder(folder, where)  # transformers opens the template files itself
    found = settings_files(folder, where)
    if is_there(folder / "audio_tokenizer_config.json") or "audio_tokenizer" in found.get(PROCESSOR_NAME, {}):
        raise ConfigError(
            f"{where}: its processor has a model for sounds (audio_tokenizer), not supported here: take it out"
        )
    old_template(folder, where)
    with library_errors(where, "its processor's files can't be read"):
        settings, _ = ProcessorMixin.get_processor_dict(folder, **_HERE)
    return settings


def processor_template(folder: str | Path, where: str) -> str | None:
    """Return the chat template in a folder's processor files, as transformers' processor chooses it; None if they
    have none."""
    return _default_of(whole_settings(folder, where).get("chat_template"), PROCESSOR_NAME, where)


def settings_files(folder: Path, where: str) -> dict[str, dict]:
    """Read and check the settings files that exist. Returns their content by name."""
    return {name: read_json(folder / name, where) for name in SETTINGS_FILES if is_there(folder / name)}


def old_template(folder: Path, where: str) -> str | None:
    file = TEMPLATE_FILES[0]
    return _default_of(read_json_if_there(folder / file, where).get("chat_template"), file, where)


def _default_of(template: object, file: str, where: str) -> str | None:
    """Return the default chat template among a file's templates. Raises ConfigError if there are named templates, but
    none is named "default"."""
    if isinstance(template, dict) and template and "default" not in template:
        names = ", ".join(map(shown, template))
        raise ConfigError(f"{where}: {file} has the chat templates {names}, but none is named 'default': rename one")
    found = template.get("default") if isinstance(template, dict) else template
    if not isinstance(found, (str, type(None))):
        expected = "expected text, or texts by name"
        raise ConfigError(f"{where}: {file} says chat_template {shown(template)}, {expected}")
    return found


def image_processor(folder: Path):
    """Open a folder's image processor with transformers, without torchvision."""
    return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False, **_HERE)
