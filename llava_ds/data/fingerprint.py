"""Hashes of what an encoded data set depends on: they change when it changes, and only then."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

# A file of pictures may be as large as a disk: it counts by name, size and time. Any other file counts by its content.
PICTURE_ARCHIVES = (".tar",)


def digest_of(parts: Iterable[str]) -> str:
    """One name, fit for a folder, for all parts in their order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:20]


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """All that a tokenizer's ids depend on."""
    return [
        tokenizer.backend_tokenizer.to_str(),
        json.dumps(sorted(tokenizer.get_added_vocab().items())),
        json.dumps([tokenizer.bos_token, tokenizer.eos_token, str(tokenizer.chat_template)]),
    ]


def file_digest(path: str, cache_dir: Path) -> str:
    """A hash of a file's content, remembered in cache_dir for as long as its size and time stay."""
    file = Path(path)
    stat = file.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    if file.suffix in PICTURE_ARCHIVES:
        return f"{file.name} {stamp}"
    note = cache_dir / "hashes" / f"{digest_of([str(file.resolve())])}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not hashed before, or a kill cut the note short: it is written anew
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    sha256 = digest.hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"stamp": stamp, "sha256": sha256}), encoding="utf-8")
    return sha256
