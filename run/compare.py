"""Compare runs: python run/compare.py OUTPUT_DIR OUTPUT_DIR ...

Prints their numbers and differing flags in columns, and writes a page with their curves on common axes. Runs may be
finished, killed, or still running.
"""

import argparse
import sys

from llava_ds.constants import ConfigError
from llava_ds.runtime.command import Parser, begin, exit_with, given_path


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=given_path, help="the --output_dir of each run, two or more")
    add("--html", type=given_path, default="compare.html", help="file of the page (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin("run/compare.py", reads=parse)


from functools import partial
from pathlib import Path

from llava_ds.files.writing import write_output
from llava_ds.runtime.redact import redact
from llava_ds.tracking.compare_runs import comparison_page, in_terminal
from llava_ds.tracking.run_files import is_run, read_run


def main(argv: list[str]) -> None:
    args = parse(argv)
    folders = [Path(run) for run in args.runs]
    if missing := [str(folder) for folder in folders if not is_run(folder)]:
        raise ConfigError(
            f"{', '.join(missing)}: not a run's folder, run.json and metrics.jsonl are missing: name --output_dirs"
        )
    if len(folders) < 2:
        raise ConfigError("only one run is given: name two or more, or use run/report.py")
    runs = [read_run(folder) for folder in folders]
    print(*map(redact, in_terminal(runs)), sep="\n")
    write_output(Path(args.html), comparison_page(runs), "--html")
    print(f"\npage: {args.html}")


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/compare.py")
