"""When a checkpoint exists: its folder carries a manifest, and every file is as the manifest says.

A checkpoint is written under a temporary name by all ranks, flushed and hashed, and appears in one rename.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from llava_ds.distributed import Ranks, barrier

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def begin(output_dir: Path, step: int, ranks: Ranks) -> Path:
    """An empty temporary folder that all ranks write the checkpoint of a step to."""
    scratch = output_dir / f"checkpoint-{step}.tmp"
    if ranks.is_first:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    barrier(ranks)
    return scratch


def commit(scratch: Path, ranks: Ranks) -> Path:
    """Make the folder a checkpoint, once every rank has written its part. Returns its final path."""
    final = scratch.with_suffix("")
    barrier(ranks)
    if ranks.is_first:
        files = sorted(path for path in scratch.rglob("*") if path.is_file())
        manifest = {"files": {str(path.relative_to(scratch)): _flush_and_hash(path) for path in files}}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _flush(scratch / MANIFEST)
        for folder in {path.parent for path in files} | {scratch}:
            _flush(folder)
        if final.exists():
            shutil.rmtree(final)  # refused on resume, or it would not be written again
        scratch.rename(final)
        _flush(final.parent)
    barrier(ranks)
    return final


def problem_with(checkpoint: Path) -> str | None:
    """Why a folder is not a whole checkpoint; None when it is. Reads and hashes every file."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so its saving was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} can't be read ({error})"
    for name, (size, digest) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if sha256(path) != digest:
            return f"{name} has changed since it was saved"
    return None


def checkpoints(output_dir: Path) -> list[Path]:
    """All folders that are named like checkpoints, newest step first."""
    found = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint folder's name."""
    return int(_NAME.fullmatch(checkpoint.name)[1])


def newest_whole(output_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for every newer one that does not."""
    refused = []
    for path in checkpoints(output_dir):
        problem = problem_with(path)
        if problem is None:
            return path, refused
        refused.append(f"{path.name} is not used: {problem}")
    return None, refused


def keep_newest(output_dir: Path, limit: int | None) -> None:
    """Delete all but the newest checkpoints; None keeps all. Call it when a newer one is committed."""
    for path in checkpoints(output_dir)[limit:] if limit is not None else []:
        shutil.rmtree(path)


def _flush_and_hash(path: Path) -> dict:
    _flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
