"""Write report.html of a run: python run/report.py OUTPUT_DIR

It uses the files in the run's folder, even if the run was killed or is still running. A run writes its report at the
end; write it again to include the scores of run/evaluate.py.
"""

import argparse
import sys

from llava_ds.constants import ConfigError
from llava_ds.runtime.command import Parser, begin, exit_with, given_path


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the flags. Raises ConfigError."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("output_dir", type=given_path, help="a run's --output_dir")
    add("--html", type=given_path, help="file of the page (default: report.html in that folder)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    begin("run/report.py", reads=parse)


from functools import partial
from pathlib import Path

from llava_ds.tracking.page import write_report
from llava_ds.tracking.run_files import is_run


def main(argv: list[str]) -> None:
    args = parse(argv)
    folder = Path(args.output_dir)
    if not is_run(folder):
        raise ConfigError(
            f"{folder} is not a run's folder: run.json and metrics.jsonl are missing: name an --output_dir"
        )
    try:
        print(write_report(folder, None if args.html is None else Path(args.html)))
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be written to ({error.strerror}): name a file elsewhere with --html"
        ) from error


if __name__ == "__main__":
    exit_with(partial(main, sys.argv[1:]), "run/report.py")
