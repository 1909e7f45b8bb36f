"""The first thing that a command does, before it imports what takes seconds."""

import os
import sys

from llava_ds.constants import EXIT_BAD_INPUT, ConfigError
from llava_ds.launchers import check_variables
from llava_ds.processes import watch_launcher


def begin(program: str) -> None:
    """Refuse variables of a launcher that can't be used, and leave from here on when the launcher ends.

    program: for the message. Imports nothing heavy: a launcher that ends meanwhile would leave its ranks behind.
    """
    try:
        check_variables(os.environ)
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    watch_launcher()
