"""All that an evaluation's answers depend on, so that those of another are never taken for its own."""

import dataclasses
import hashlib
from pathlib import Path

import torch
import transformers

from llava_ds import __version__
from llava_ds.checkpoint import commit
from llava_ds.constants import ConfigError
from llava_ds.files.model_files import check_folder, library_errors, own_file
from llava_ds.files.reading import MAX_JSON_BYTES, blocks_digest, read_bytes, stamp_of
from llava_ds.infer.engines import EngineOptions

# What decides about answers beside the weights.
SETTINGS = (
    "adapter_config.json", "added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "*.bin")


def identity_of(model_path: str, options: EngineOptions, **asked: object) -> dict[str, object]:
    """All that has to be the same for answers to count. asked: what is asked, and how.

    Checkpoints count by what they are, other models also by where their files lie. Raises ConfigError where one is
    not there.
    """
    engine = dataclasses.asdict(options)
    return {
        "model": model_digest(model_path),
        **{name: model_digest(path, f"--{name}") for name, path in engine.pop("moved").items()},
        "engine": engine,
        **asked,
        "packages": {"llava_ds": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


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
        settings = [(name, (folder / name).read_bytes()) for name in SETTINGS if (folder / name).is_file()]
    return hashlib.sha256(repr((settings, weights)).encode()).hexdigest()


def _seen(file: Path, named: bool) -> tuple[int, int, str]:
    """Size, time of change and a hash of some blocks, all of which a copy keeps. named: by the flag itself, which may
    be a link to anywhere."""
    if not named:
        own_file(file)
    stamp = stamp_of(file)
    return stamp.num_bytes, stamp.mtime_ns, blocks_digest(file)
