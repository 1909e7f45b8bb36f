"""All that an evaluation's answers depend on, so that those of another are never taken for its own."""

import dataclasses
import hashlib
import importlib.metadata
import os
from pathlib import Path

from llava_ds import __version__
from llava_ds.checkpoint import commit
from llava_ds.constants import ConfigError
from llava_ds.extensions.infer.infer_flags import EngineOptions
from llava_ds.files.model_files import (
    JSON_FILES,
    OTHER_FILES,
    TEMPLATES_FOLDER,
    check_folder,
    library_errors,
    own_file,
)
from llava_ds.files.reading import MAX_JSON_BYTES, blocks_digest, read_bytes, read_json, stamp_of

# What decides about answers beside the weights.
SETTINGS = tuple(sorted((*JSON_FILES, *OTHER_FILES)))
# Flag, file and key of other folders that a model's settings name.
NAMED_FOLDERS = (
    ("model_base", "adapter_config.json", "base_model_name_or_path"),
    ("vision_tower", "config.json", "mm_vision_tower"),
)
LIBRARIES = ("torch", "transformers", "tokenizers", "jinja2", "pillow")
WEIGHTS = ("*.safetensors", "*.bin")


def identity_of(model_path: str, options: EngineOptions, **asked: object) -> dict[str, object]:
    """All that has to be the same for answers to count. asked: what is asked, and how.

    Checkpoints count by what they are, other models also by where their files lie. Raises ConfigError where one is
    not there.
    """
    engine = dataclasses.asdict(options)
    moved = engine.pop("moved")
    named = {name: path for name, path in _folders_in(model_path).items() if name not in moved}
    return {
        "model": model_digest(model_path),
        **{name: model_digest(path, f"--{name}") for name, path in {**named, **moved}.items()},
        "engine": engine,
        **asked,
        "packages": {"llava_ds": __version__, **{name: importlib.metadata.version(name) for name in LIBRARIES}},
    }


def _folders_in(model_path: str) -> dict[str, str]:
    """The folders on this machine that a model's settings name, by the flag that moves them: what is under an adapter,
    and a tower that the model does not bring."""
    found = {}
    for name, file, key in NAMED_FOLDERS:
        path = Path(model_path).expanduser() / file
        if path.is_file():
            with library_errors(f"--model_path {model_path}", f"{file} can't be read"):
                value = read_json(own_file(path), dict).get(key)
            if isinstance(value, str) and os.path.isdir(value):
                found[name] = value
    return found


def model_digest(path: str, flag: str = "--model_path") -> str:
    """A hash that changes with the model in a folder, or with a file of weights.

    Of a checkpoint's manifest, which has the hashes of its files; or of a folder's settings, and its weight files'
    names, sizes, times of change and some of their blocks (hashing 14 GB would take as long as many questions). Raises
    ConfigError where there are neither, or one is no regular file of its folder.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ConfigError(f"{flag} {path}: there is no such folder")
    manifest = folder / commit.MANIFEST
    if manifest.is_file():
        with library_errors(f"{flag} {path}", "its manifest can't be read"):
            return hashlib.sha256(read_bytes(own_file(manifest), MAX_JSON_BYTES)).hexdigest()
    files = [folder] if folder.is_file() else [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"{flag} {path} holds no model: give an exported folder, or a checkpoint-<step>")
    if folder.is_dir():
        check_folder(folder, f"{flag} {path}")
    with library_errors(f"{flag} {path}", "its files can't be read"):
        weights = sorted((file.name, *_seen(file, named=file == folder)) for file in files)
        named = [folder / name for name in SETTINGS if (folder / name).is_file()]
        named += sorted(folder.glob(f"{TEMPLATES_FOLDER}/*.jinja"))
        settings = [(file.name, file.read_bytes()) for file in named]
    return hashlib.sha256(repr((settings, weights)).encode()).hexdigest()


def _seen(file: Path, named: bool) -> tuple[int, int, str]:
    """Size, time of change and a hash of some blocks, all of which a copy keeps. named: by the flag itself, which may
    be a link to anywhere."""
    if not named:
        own_file(file)
    stamp = stamp_of(file)
    return stamp.num_bytes, stamp.mtime_ns, blocks_digest(file)
