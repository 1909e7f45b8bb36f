"""A store for tests: a local folder under the protocol toystore, which fails when told to and counts what it is asked.

Beside the memory file system of fsspec, because several processes can see it. Import it in each.
"""

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from llava_ds.extensions.object_store import flags
from llava_ds.extensions.object_store import store as object_store

PROTOCOL = "toystore"


class ToyStore(LocalFileSystem):
    """toystore://path is /path of the disk.

    In the folder that TOYSTORE_STATE names, "failures" has the number of fetches that are still to fail, and "fetched"
    the paths of all fetches.
    """

    protocol = PROTOCOL
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(f"/{path.removeprefix(f'{PROTOCOL}://').lstrip('/')}")

    def info(self, path, **more):
        found = super().info(path, **more)
        found["ETag"] = f"{found['ino']}-{found['mtime']}-{found['size']}"
        return found

    def cat_file(self, path, start=None, end=None, **more):
        note("fetched", path)
        failures = state("failures")
        left = int(failures.read_text() or 0) if failures.exists() else 0
        if left:
            failures.write_text(str(left - 1))
            raise TimeoutError("503 Slow Down")
        return super().cat_file(path, start, end, **more)


def prepare(folder: Path, monkeypatch) -> Path:
    """Make a store in a folder, with a cache of 1 GB beside it; its path."""
    for name in ("store", "state"):
        (folder / name).mkdir()
    monkeypatch.setenv("TOYSTORE_STATE", str(folder / "state"))
    for name in ("CACHE", "CACHE_BYTES", "HTTP"):  # restored at the end
        monkeypatch.setenv(f"LLAVA_DS_OBJECT_{name}", "0")
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.0)
    flags.configure(folder / "cache" / "objects", 10**9, allow_http=False)
    return folder / "store"


def state(name: str) -> Path:
    return Path(os.environ["TOYSTORE_STATE"]) / name


def note(name: str, path: str) -> None:
    with open(state(name), "a") as file:
        file.write(f"{path}\n")


def fetched() -> list[str]:
    """What was fetched from the store so far."""
    return state("fetched").read_text().splitlines() if state("fetched").exists() else []


def url_of(path: Path | str) -> str:
    return f"{PROTOCOL}:/{path}"


fsspec.register_implementation(PROTOCOL, ToyStore, clobber=True)
