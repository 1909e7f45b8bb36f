"""The folder of an initial adapter (--lora_weight_path)."""

import hashlib
from pathlib import Path

from llava_ds.files.model_files import ADAPTER_CONFIG, BESIDE_ADAPTER, adapter_file, own_file
from llava_ds.files.writing import sha256


def non_lora_file(folder: str | Path) -> str | None:
    """Return the adapter's file of weights trained besides LoRA (projector, newline, tower); None if missing."""
    if not (file := Path(folder) / BESIDE_ADAPTER).is_file():
        return None
    own_file(file)
    return str(file)


def adapter_digest(folder: Path) -> str:
    """Hash an adapter folder: its settings, its weights, and its projector."""
    files = [folder / ADAPTER_CONFIG, adapter_file(folder), folder / BESIDE_ADAPTER]
    listed = [(file.name, sha256(file)) for file in files if file is not None and file.is_file()]
    return hashlib.sha256(repr(listed).encode()).hexdigest()
