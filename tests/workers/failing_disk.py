"""Runs of run/train.py in the processes of one launch, each on a disk that fails one rank in one way.

Last argument: a JSON file with a list of {"argv", "rank", "errno", "call", "name", "saves"}: on that rank, in those
saves (1 is the first), the call (open, write, fsync; mkdir, rename) on files or folders whose name ends so fails. Rank
0 writes beside it, as outcomes.json, what each run ended with: null, or the text of its error.
"""

import errno
import json
import os
import sys
from pathlib import Path

import torch
from run_many import load_train

from llava_ds.checkpoint import commit
from llava_ds.constants import DataError
from llava_ds.files import writing as files


class Disk:
    """Fails as the case says; without a case it works."""

    def __init__(self) -> None:
        self.case, self.save = None, 0
        begin, genuine_open, close = commit.begin, Path.open, files.HashedFile.close
        mkdir, rename, flush = Path.mkdir, Path.rename, files.flush

        def counted(*arguments):
            self.save += 1
            return begin(*arguments)

        def opened(path, mode="r", *more, **options):
            if "w" in mode:
                self.check("open", path)
            return genuine_open(path, mode, *more, **options)

        def write(file, data):
            if file.error is None:
                try:
                    self.check("write", Path(file._file.name))
                except OSError as error:
                    file.error = error
            return genuine_write(file, data)

        def closed(file):
            if file.error is None:
                try:
                    self.check("fsync", Path(file._file.name))
                except OSError as error:
                    file.error = error
            return close(file)

        def made(path, *more, **options):
            self.check("mkdir", path)
            return mkdir(path, *more, **options)

        def renamed(path, target):
            self.check("rename", path)
            return rename(path, target)

        def flushed(path):
            self.check("fsync", path)
            return flush(path)

        genuine_write = files.HashedFile.write
        commit.begin, Path.open, Path.mkdir, Path.rename = counted, opened, made, renamed
        files.HashedFile.write, files.HashedFile.close = write, closed
        commit.flush = flushed

    def check(self, call: str, path: Path) -> None:
        case = self.case
        if case is None or call != case["call"] or self.save not in case["saves"] or case["rank"] != rank():
            return
        if path.name.endswith(case["name"]) and "checkpoint-" in str(path):
            code = getattr(errno, case["errno"])
            raise OSError(code, os.strerror(code), str(path))


def rank() -> int:
    return int(os.environ["RANK"])


def main() -> None:
    listed = Path(sys.argv[-1])
    train, disk, outcomes = load_train(), Disk(), []
    for case in json.loads(listed.read_text()):
        disk.case, disk.save = case, 0
        try:
            train.main(case["argv"])
            outcomes.append(None)
        except DataError as error:
            outcomes.append(str(error))
        disk.case = None
        torch.distributed.barrier()
    if rank() == 0:
        (listed.parent / "outcomes.json").write_text(json.dumps(outcomes))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
