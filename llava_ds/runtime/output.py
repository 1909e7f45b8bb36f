"""A program's output: once for all ranks, without secrets, and also when nobody reads it any more."""

import contextlib
import errno
import io
import os
import sys
import time
import traceback

from llava_ds.constants import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_READER_GONE, ConfigError
from llava_ds.runtime.redact import redact

READER_GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader; a terminal that was closed


class _LastingFile(io.FileIO):
    """A standard stream that no failing write reaches anybody from.

    When its reader is gone, what follows goes nowhere, from libraries and child processes too, and the program goes on;
    or it ends where it next writes, as other programs do. What a full disk does not take is lost; `failure` says so.
    """

    def __init__(self, descriptor: int, ends: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.ends = ends
        self.failure: OSError | None = None  # the first, of a file that has a reader

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
    """Give this process stdout and stderr that last (see _LastingFile), in the place of those that Python opened.

    A standard descriptor that is closed becomes /dev/null first: the next file opened would get its number, and what
    is printed. ends_without_reader: whether the program is of no use when nobody reads stdout any more.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            redirect_to_nowhere(descriptor)
    sys.stdout = _lasting(sys.stdout, 1, ends_without_reader)
    sys.stderr = _lasting(sys.stderr, 2, False)


def check_output() -> None:
    """Flush stdout. Raises ConfigError where a program that is of use only for what it prints could not write all of it
    (see keep_streams)."""
    sys.stdout.flush()
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(file, _LastingFile) and file.ends and file.failure is not None:
        said = f"{file.failure.strerror} ({errno.errorcode[file.failure.errno]})"
        raise ConfigError(f"stdout could not be written, the output is cut off: {said}: make room, or write elsewhere")


def redirect_to_nowhere(descriptor: int) -> None:
    """Make a descriptor one of /dev/null."""
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
        errors="backslashreplace",  # file names may hold what no encoding has
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


def printable(text: str, keep: str = "") -> str:
    """The text with every character that a terminal may take as a command, beside those to keep, spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def rank_said() -> int:
    """The rank that the environment names; 0 where that is no number, which command.begin refuses."""
    said = os.environ.get("RANK", "0").strip()
    return int(said) if said.isdecimal() else 0


def print_first(*lines: str) -> None:
    """Print from rank 0 only; works before the process group exists. No line can steer the terminal,
    or holds a secret."""
    if lines and rank_said() == 0:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stdout):  # on a line of its own, where a bar is shown
            print(*(printable(redact(line), keep="\n\t") for line in lines), sep="\n", flush=True)


def exit_for_failure() -> None:
    """Say what was raised and leave with exit code 1, at once: the interpreter's own way out waits for threads and
    connections of the collectives that the other ranks are in."""
    sys.stdout.flush()
    print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    os._exit(EXIT_FAILURE)


def exit_for_bad_input(error: Exception, program: str) -> None:
    """Say once what is wrong with the user's input and leave with exit code 2.

    The other ranks usually found the same: they wait to be ended by the launcher, and speak up only if they are not.
    """
    rank = rank_said()
    if rank != 0:
        # The first on another machine, whose launcher does not hear of rank 0, speaks for those beside it.
        time.sleep(5.0 if os.environ.get("LOCAL_RANK") == "0" else 8.0)
    where = "" if rank == 0 else f" (rank {rank})"
    message = printable(redact(str(error)), keep="\n\t")
    print(f"{program}: error{where}: {message}", file=sys.stderr, flush=True)
    # Not sys.exit: other ranks may be inside a collective, and the interpreter's clean-up would wait for them.
    sys.stdout.flush()
    os._exit(EXIT_BAD_INPUT)
