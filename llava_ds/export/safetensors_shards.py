"""Write safetensors files tensor by tensor, so that no shard is in memory. Only complete files replace older ones."""

import json
import os
import struct
from pathlib import Path

import torch

from llava_ds.export.bit_check import Written, sums_of
from llava_ds.export.tensors import Entry

# Names of dtypes in safetensors files.
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def num_bytes(entries: list[Entry], dtype: torch.dtype) -> int:
    """Return the size of all entries in a dtype, in bytes."""
    return sum(entry.numel for entry in entries) * dtype.itemsize


def write_shards(
    entries: list[Entry], output_dir: Path, dtype: torch.dtype, max_bytes: int, *, holes: bool = False
) -> Written:
    """Write model.safetensors, or its shards with an index, and return checksums of the tensors' bits.

    Only one tensor is in memory at a time. max_bytes: maximum size of a shard. holes: True to write names and shapes
    only, with a hole in the file (it takes no disk space) instead of the values.
    """
    shards = _split(entries, dtype, max_bytes)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    sums: dict[str, int] = {}
    for name, shard in zip(names, shards):
        sums |= _write(shard, output_dir / f"{name}.tmp", dtype, holes)
    for old in output_dir.glob("model*.safetensors*"):
        if old.suffix != ".tmp":
            old.unlink()
    for name in names:
        (output_dir / f"{name}.tmp").rename(output_dir / name)
    if len(shards) > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards) for entry in shard}
        index = {"metadata": {"total_size": num_bytes(entries, dtype)}, "weight_map": weight_map}
        (output_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return {output_dir: sums}


def _split(entries: list[Entry], dtype: torch.dtype, max_bytes: int) -> list[list[Entry]]:
    """Split entries into shards of consecutive entries of at most max_bytes. A larger entry gets its own shard."""
    shards: list[list[Entry]] = [[]]
    room = max_bytes
    for entry in entries:
        size = entry.numel * dtype.itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= size
    return shards


def _write(entries: list[Entry], path: Path, dtype: torch.dtype, holes: bool) -> dict[str, int]:
    """Write one file, and return checksums of its tensors' bits.

    Source: the format's description (length of the header, JSON header, bytes of the tensors).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.numel * dtype.itemsize
        header[entry.name] = {"dtype": DTYPES[dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if holes:
            file.truncate(8 + len(text) + end)
            return {}
        sums = {}
        for entry in entries:
            tensor = entry.read()
            assert tuple(tensor.shape) == entry.shape, f"{entry.name} is {tuple(tensor.shape)}, not {entry.shape}"
            flat = tensor.to(dtype).contiguous().reshape(-1)
            sums |= sums_of([(entry.name, flat)])
            file.write(memoryview(flat.view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
    return sums
