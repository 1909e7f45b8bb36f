"""Check that training can start on this machine: python run/doctor.py [--deepspeed_config ds_configs/zero3.json]

Checks versions, devices, compiler, DeepSpeed's operators, network, disks and limits, and lets two ranks communicate.
Nothing is compiled or downloaded. With a DeepSpeed JSON, also checks that run/train.py accepts it on this machine, and
that the machine has everything it needs (operators, NVMe).
A problem keeps training from starting; after a warning it starts, but may be slow or fail later. Each has its remedy.
Exit code: 0 training can start, 1 it can't, 2 the flags are invalid.
"""

import argparse
import sys

from llava_ds.runtime.command import Parser, begin, exit_with, given_path


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--deepspeed_config", "--deepspeed", type=given_path, help="DeepSpeed JSON to check as well")
    add("--output_dir", type=given_path, default="output", help="as for run/train.py (default: %(default)s)")
    add("--cache_dir", type=given_path, default="~/.cache/llava_ds", help="as for run/train.py (default: %(default)s)")
    add("--no_collective", action="store_true", help="start no ranks, as on a login node")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin("run/doctor.py", reads=parse, ends_without_reader=True)


import faulthandler
import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

from llava_ds.config.recipes import DS_CONFIGS, found
from llava_ds.constants import ConfigError
from llava_ds.extensions.doctor.checks import CHECKS, as_lines, examine
from llava_ds.extensions.doctor.requirements import PROBLEM, WARNING, Requirements

LIMIT_S = 600  # maximum time of all checks, because a driver or a network disk may hang


def main(argv: list[str]) -> int:
    args = parse(argv)
    config = None
    if args.deepspeed_config is not None:
        config = Path(found(args.deepspeed_config, DS_CONFIGS, ".json"))
    if config is not None and not config.is_file():
        raise ConfigError(f"--deepspeed_config {config}: the file does not exist")
    output_dir, cache_dir = (Path(os.path.expanduser(path)) for path in (args.output_dir, args.cache_dir))
    required = Requirements(output_dir, cache_dir, config)

    # If a check hangs, print where, and exit with code 1.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    findings = []
    checks = tuple(check for check in CHECKS if not (args.no_collective and check.name == "collective"))
    for name, finding in examine(required, checks):
        findings.append({"check": name, **asdict(finding)})
        if not args.json:
            print(*as_lines(name, finding), sep="\n", flush=True)
    faulthandler.cancel_dump_traceback_later()
    levels = [finding["level"] for finding in findings]
    can_start = PROBLEM not in levels
    if args.json:
        print(json.dumps({"can_start": can_start, "findings": findings}, indent=1))
    else:
        counts = f"problems: {levels.count(PROBLEM)}, warnings: {levels.count(WARNING)}"
        print(f"\ntraining {'can' if can_start else 'can not'} start ({counts})")
    return 0 if can_start else 1


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/doctor.py")
