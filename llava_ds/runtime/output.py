"""Program output: printed by one rank, without secrets; writing never fails, even if the reader is gone."""

import contextlib
import errno
import io
import logging
import os
import sys
import time
import traceback

from llava_ds.constants import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_READER_GONE, ConfigError
from llava_ds.runtime.redact import redact

DETAILS = logging.getLogger("llava_ds.details")  # above INFO: print_details prints nothing
READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader; a closed terminal


class _LastingFile(io.FileIO):
    """A standard stream whose writes never raise.

    If its reader is gone, the program ends at the next write if `ends`; otherwise it continues, and later output, also
    of libraries and child processes, is dropped. Any other error, like a full disk, drops the output and is stored in
    `failure`.
    """

    def __init__(self, descriptor: int, ends: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.ends = ends
        self.failure: OSError | None = None  # the first error other than a missing reader

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in READER_GONE:
                redirect_to_nowhere(self.fileno())
                if self.ends:
                    raise SystemExit(EXIT_READER_GONE) from None
            else:
                self.failure = self.failure or error
            return len(data)


def keep_streams(ends_without_reader: bool) -> None:
    """Replace stdout and stderr by streams whose writes never raise (see _LastingFile).

    A closed standard descriptor is first opened on /dev/null. Otherwise the next opened file would get its number, and
    the output. ends_without_reader: True to exit if stdout has no reader.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            redirect_to_nowhere(descriptor)
    sys.stdout = _lasting(sys.stdout, 1, ends_without_reader)
    sys.stderr = _lasting(sys.stderr, 2, False)


def check_output() -> None:
    """Flush stdout. Raises ConfigError if a program that only prints could not write all of it (see keep_streams)."""
    sys.stdout.flush()
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(file, _LastingFile) and file.ends and file.failure is not None:
        problem = f"{file.failure.strerror} ({errno.errorcode[file.failure.errno]})"
        raise ConfigError(
            f"stdout could not be written, and the output is cut off: {problem}: free disk space, or write elsewhere"
        )


def redirect_to_nowhere(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)


def _lasting(stream: io.TextIOWrapper | None, descriptor: int, ends: bool) -> io.TextIOWrapper:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(descriptor, ends)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",  # file names may contain characters that the encoding lacks
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


def printable(text: str, keep: str = "") -> str:
    """Escape every control character of the text, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def env_rank() -> int:
    """Return the rank in the environment; 0 if it is not a number (command.begin refuses that)."""
    text = os.environ.get("RANK", "0").strip()
    return int(text) if text.isdecimal() else 0


def print_first(*lines: str) -> None:
    """Print from rank 0 only, even before the process group exists, without control characters and secrets."""
    if lines and env_rank() == 0:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stdout):  # start a new line if a progress bar is shown
            print(*(printable(redact(line), keep="\n\t") for line in lines), sep="\n", flush=True)


def print_details(*lines: str) -> None:
    """Call print_first for details that training prints only with --verbose."""
    if DETAILS.level <= logging.INFO:
        print_first(*lines)


def _end_bars() -> None:
    """End the lines of progress bars, so that an error begins its own."""
    if "tqdm" in sys.modules:
        for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())):
            bar.close()


def exit_for_failure() -> None:
    """Print the traceback and exit with code 1 at once.

    The interpreter's clean-up would wait for threads and for collectives with other ranks.
    """
    sys.stdout.flush()
    _end_bars()
    print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    os._exit(EXIT_FAILURE)


def exit_for_bad_input(error: Exception, program: str) -> None:
    """Print the problem with the user's input once, and exit with code 2.

    Other ranks usually have the same problem. They wait for the launcher to end them, and print only if it does not.
    """
    rank = env_rank()
    if rank != 0:
        # The launcher of another machine does not notice that rank 0 ended, so the machine's first rank prints there.
        time.sleep(5.0 if os.environ.get("LOCAL_RANK") == "0" else 8.0)
    where = "" if rank == 0 else f" (rank {rank})"
    message = printable(redact(str(error)), keep="\n\t")
    _end_bars()
    print(f"{program}: error{where}: {message}", file=sys.stderr, flush=True)
    # sys.exit would run the interpreter's clean-up and wait for collectives of other ranks.
    sys.stdout.flush()
    os._exit(EXIT_BAD_INPUT)
