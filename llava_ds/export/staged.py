"""An exported folder that is there whole or not at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llava_ds.constants import ConfigError


@contextlib.contextmanager
def staged(output_dir: Path) -> Iterator[Path]:
    """Give a folder of output_dir's name to write to; its files replace those of output_dir when nothing was raised.

    Whatever is raised in between, Ctrl-C too, leaves output_dir as it was. config.json, without which nobody opens the
    folder, is put in place last. Raises ConfigError where the folder can't be written to.
    """
    was_there = output_dir.is_dir()
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        # Within it, so that it is on the same disk.
        scratch = tempfile.TemporaryDirectory(dir=output_dir, prefix=".export-")
    except OSError as error:
        raise ConfigError(f"--output_dir {output_dir} can't be made ({error.strerror}): name another folder") from error
    try:
        with scratch:
            stage = Path(scratch.name) / output_dir.resolve().name
            stage.mkdir()
            yield stage
            files = [path for path in stage.rglob("*") if path.is_file()]
            for file in sorted(files, key=lambda path: (path.name == "config.json", path)):
                target = output_dir / file.relative_to(stage)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except BaseException:
        if not was_there:
            with contextlib.suppress(OSError):  # files are in place already: they are whole
                output_dir.rmdir()
        raise
