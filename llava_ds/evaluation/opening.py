"""The model that is asked: a folder that transformers opens, or what run/export.py makes one of."""

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from llava_ds.checkpoint import commit
from llava_ds.checkpoint.identity import TRAINER
from llava_ds.constants import ConfigError
from llava_ds.distributed import Ranks, barrier, first_rank_first, from_first, print_first
from llava_ds.infer.engines import EngineOptions, load_for_inference
from llava_ds.infer.load import LoadedModel
from llava_ds.model.hf import HF_CLASSES

# What decides about answers beside the weights.
SETTINGS = (
    "adapter_config.json", "added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "*.bin")


def open_model(path: str, moved: dict[str, str], options: EngineOptions, cache_dir: str, ranks: Ranks) -> LoadedModel:
    """The model in a folder or a checkpoint, as the engine wants it. All ranks call it together.

    moved: where a checkpoint's base models, or an adapter's, lie now, by flag. A folder in LLaVA's format, an adapter,
    and a checkpoint whose models have moved are converted into cache_dir, and removed from there when every rank has
    read them.
    """
    source = Path(path).expanduser()
    with _openable(source, moved, cache_dir, ranks) as folder:
        loaded = load_for_inference(folder, options, ranks)
        barrier(ranks)
    print_first(*loaded.notes)
    return loaded


@contextlib.contextmanager
def _openable(source: Path, moved: dict[str, str], cache_dir: str, ranks: Ranks) -> Iterator[Path]:
    if not source.is_dir():
        raise ConfigError(f"--model_path {source}: there is no such folder")
    if is_checkpoint(source) and not moved:
        yield source
        return
    if not is_checkpoint(source) and _is_hf(source):
        if moved:
            raise ConfigError(f"{', '.join(f'--{name}' for name in moved)}: {source} brings all that it needs")
        yield source
        return
    # A name of this evaluation alone: another of the same model may be removing its own.
    token = from_first(ranks, lambda: secrets.token_hex(8))
    folder = Path(cache_dir).expanduser() / "evaluation" / f"model-{token}"
    try:
        with first_rank_first(ranks):
            if not folder.is_dir():
                print_first(f"writing {source} to {folder}, as transformers opens it")
                scratch = folder.with_suffix(".partial")
                scratch.mkdir(parents=True)
                _convert(source, moved, scratch)
                scratch.rename(folder)
        yield folder
    finally:
        if ranks.local_rank == 0:
            for left in (folder, folder.with_suffix(".partial")):
                shutil.rmtree(left, ignore_errors=True)


def _convert(source: Path, moved: dict[str, str], folder: Path) -> None:
    # These bring DeepSpeed, which takes seconds to import, and a model's own folder does without.
    from llava_ds.export.converted import open_folder
    from llava_ds.export.finished import hf_kind
    from llava_ds.export.hf import write_hf
    from llava_ds.export.restored import restore
    from llava_ds.export.shards import DEFAULT_SHARD_SIZE, parse_size

    if is_checkpoint(source):
        restored = restore(source, moved, None)
        finished, entries = restored.finished, restored.entries
    else:
        finished, entries, lines = open_folder(source, moved, None, "hf")
        print_first(*lines)
    kind, why = hf_kind(finished.plan, finished.args, finished.pictures)
    if kind is None:
        raise ConfigError(f"{source} can't be asked here: {why}")
    write_hf(finished, entries, folder, parse_size(DEFAULT_SHARD_SIZE))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of run/train.py."""
    return (folder / TRAINER).is_file() or (folder / commit.MANIFEST).is_file()


def _is_hf(folder: Path) -> bool:
    """Whether transformers opens a folder, or nothing does: load_model says why."""
    config = folder / "config.json"
    if not config.is_file():
        return not (folder / "adapter_config.json").is_file()
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return True
    return said.get("model_type") in HF_CLASSES and "text_config" in said


def model_digest(path: str) -> str:
    """A hash that changes with the model in a folder.

    Of a checkpoint's manifest, which has the hashes of its files; or of a folder's settings, and its weight files'
    names, sizes and times of change (hashing 14 GB would take as long as many questions). Raises ConfigError where
    there are neither.
    """
    folder = Path(path).expanduser()
    manifest = folder / commit.MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(f"--model_path {path} holds no model: give an exported folder, or a checkpoint-<step>")
    weights = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    settings = [(name, (folder / name).read_bytes()) for name in SETTINGS if (folder / name).is_file()]
    return hashlib.sha256(repr((settings, weights)).encode()).hexdigest()
