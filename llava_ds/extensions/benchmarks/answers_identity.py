"""Compute the identity of an evaluation: all inputs and settings that its answers depend on."""

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

# Files, in addition to the weights, that answers depend on.
SETTINGS = tuple(sorted((*JSON_FILES, *OTHER_FILES)))
# Settings that name another folder: the flag for a new path, the file, and the key in it.
NAMED_FOLDERS = (
    ("model_base", "adapter_config.json", "base_model_name_or_path"),
    ("vision_tower", "config.json", "mm_vision_tower"),
)
LIBRARIES = ("torch", "transformers", "tokenizers", "jinja2", "pillow")
WEIGHTS = ("*.safetensors", "*.bin")


def identity_of(model_path: str, options: EngineOptions, **asked: object) -> dict[str, object]:
    """Return all values that must be equal for stored answers to be reused. asked: questions and prompt settings.

    Models are compared by model_digest(). Raises ConfigError if a model doesn't exist.
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
    """Return the local folders that a model's settings name, by the flag that would replace the path: an adapter's base
    model, and a tower that the model's folder doesn't include."""
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
    """Return a hash that changes with the model in a folder, or with a weight file.

    For a checkpoint, hashes the manifest, which contains the hashes of its files. For other folders, hashes settings,
    and the weight files' names, sizes, modification times and some blocks (hashing 14 GB would take as long as many
    questions). Raises ConfigError if the path has neither, or if a file is not a regular file of its folder.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise ConfigError(f"{flag} {path}: this folder does not exist")
    manifest = folder / commit.MANIFEST
    if manifest.is_file():
        with library_errors(f"{flag} {path}", "its manifest can't be read"):
            return hashlib.sha256(read_bytes(own_file(manifest), MAX_JSON_BYTES)).hexdigest()
    files = [folder] if folder.is_file() else [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"{flag} {path} contains no model: give an exported folder, or a checkpoint-<step>")
    if folder.is_dir():
        check_folder(folder, f"{flag} {path}")
    with library_errors(f"{flag} {path}", "its files can't be read"):
        weights = sorted((file.name, *_seen(file, named=file == folder)) for file in files)
        named = [folder / name for name in SETTINGS if (folder / name).is_file()]
        named += sorted(folder.glob(f"{TEMPLATES_FOLDER}/*.jinja"))
        settings = [(file.name, file.read_bytes()) for file in named]
    return hashlib.sha256(repr((settings, weights)).encode()).hexdigest()


def _seen(file: Path, named: bool) -> tuple[int, int, str]:
    """Return a file's size, modification time and a hash of some blocks. named: True if the flag's value is this file
    and not its folder; the file may then be a link to anywhere.
    """
    if not named:
        own_file(file)
    stamp = stamp_of(file)
    return stamp.num_bytes, stamp.mtime_ns, blocks_digest(file)
