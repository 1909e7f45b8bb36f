"""The flags of object stores."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llava_ds.config.bounds import Positive
from llava_ds.config.flags import flags_of
from llava_ds.extensions.base import ExtensionFlags

if TYPE_CHECKING:
    from llava_ds.config.arguments import Arguments

_, _store = flags_of("object_store")

# Settings are environment variables, so every process of a run inherits them, whichever library starts it.
FOLDER, MAX_BYTES, ALLOW_HTTP = (f"LLAVA_DS_OBJECT_{name}" for name in ("CACHE", "CACHE_BYTES", "HTTP"))


def configure(folder: str | os.PathLike, max_bytes: int, allow_http: bool) -> None:
    """Set the cache's folder and size, and the permission to read web servers, for this process and its children."""
    os.environ[FOLDER] = str(Path(folder).expanduser().absolute())
    os.environ[MAX_BYTES] = str(max_bytes)
    os.environ[ALLOW_HTTP] = "1" if allow_http else "0"


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """The flags of object stores."""

    allow_http: bool = _store(
        False, "Let --data_path, --image_folder and --video_folder be on web servers (http://, https://)."
    )
    object_cache_dir: str | None = _store(
        None,
        "Folder of the object-store cache objects/, for example on a local disk of every machine. Absent: --cache_dir.",
        path="output",
    )
    object_cache_gb: Positive = _store(
        100.0,
        "Size limit of objects/ in GB: beyond it, the least recently used objects are removed.",
        per_machine=True,
    )

    def prepare(self, args: "Arguments") -> None:
        """Configure how URLs are read in all flags and files, including a data mixture's file."""
        folder = self.object_cache_dir or args.data.cache_dir
        configure(f"{folder}/objects", int(self.object_cache_gb * 10**9), self.allow_http)

    def problems(self, args: "Arguments") -> Iterator[str]:
        """Yield a line for flags given without data."""
        for name in ("allow_http", "object_cache_dir"):
            if name in args.given and args.data.data_path is None:
                yield (
                    f"--{name} {getattr(self, name)} goes with --data_path: the generated scenes need none, give that, "
                    "or leave it out"
                )
