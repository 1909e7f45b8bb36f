"""Verify checkpoints: python run/verify.py output/mine/checkpoint-500 output/other

In a folder with checkpoint-* every one is verified. Every file is read and compared with the hash computed when it was
written. Exit code 0: all are complete; 1: at least one is not; 2: there is nothing to verify.
"""

import argparse
import sys

from llava_ds.constants import ConfigError
from llava_ds.runtime.command import Parser, begin, exit_with, given_path


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=given_path, metavar="CHECKPOINT", help="checkpoint-<step>, or an --output_dir"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin("run/verify.py", reads=parse, ends_without_reader=True)


from functools import partial
from pathlib import Path

from llava_ds.checkpoint import commit, verification
from llava_ds.checkpoint.commit import TRAINER
from llava_ds.checkpoint.trainer_file import checkpoint_problem, read_trainer
from llava_ds.runtime.ranks import print_first


def main(argv: list[str]) -> int:
    """Verify all given checkpoints. Returns the exit code: 0 if all are complete, else 1."""
    paths = [each for given in parse(argv).paths for each in _checkpoints(Path(given))]
    whole = True
    for path in paths:
        problem = checkpoint_problem(path)
        whole &= problem is None
        print_first(f"{path}: {_described(path)}" if problem is None else f"{path}: NOT whole: {problem}")
    return 0 if whole else 1


def _checkpoints(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ConfigError(f"{path}: the folder does not exist")
    if found := commit.checkpoints(path):
        return found
    if any((path / name).exists() for name in (commit.MANIFEST, TRAINER)) or path.name.startswith("checkpoint-"):
        return [path]
    raise ConfigError(f"{path} has no checkpoint: name a checkpoint-<step> folder, or an --output_dir")


def _described(path: Path) -> str:
    files = verification.read_manifest(path)
    trainer = read_trainer(path)
    identity = trainer["identity"]
    size = sum(entry["bytes"] for entry in files.values())
    form = trainer.get("model_only")
    kind = f"the model alone ({form})" if form else f"{identity['world_size']} ranks, ZeRO-{identity['zero_stage']}"
    return f"whole: step {trainer['step']:,}, {kind}, {len(files)} files, {size / 1e9:,.3f} GB"


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/verify.py")
