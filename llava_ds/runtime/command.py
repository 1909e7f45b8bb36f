"""The frame around every command's main(): errors in flags, Ctrl-C, a closed pipe, and exit codes.

A script of run/ calls begin() above the imports that take seconds, and exit_with() at its end.
"""

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from llava_ds.config.bounds import in_a_line, takes
from llava_ds.constants import EXIT_BAD_INPUT, EXIT_INTERRUPTED, ConfigError, DataError, did_you_mean, in_short
from llava_ds.files.writing import can_be_made, path_problem, utf8_problem
from llava_ds.runtime.launchers import check_variables
from llava_ds.runtime.output import check_output, exit_for_bad_input, exit_for_failure, keep_streams
from llava_ds.runtime.processes import watch_launcher

ENDING_S = 3.0  # for child processes to end after SIGTERM


class Parser(argparse.ArgumentParser):
    """A parser whose flags can't be abbreviated, and whose errors are one line with the nearest flag."""

    def __init__(self, **options: object) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**defaults, **options})

    def parse_known_args(self, *given: object, **more: object) -> tuple[argparse.Namespace, list[str]]:
        """Raise ConfigError with a line for every value that its flag does not take."""
        self._problems: list[str] = []
        parsed = super().parse_known_args(*given, **more)
        if self._problems:
            raise ConfigError("\n".join(self._problems))
        return parsed

    def _get_value(self, action: argparse.Action, text: str) -> object:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            self._problems.append(in_a_line(str(error)))
            return None

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: argparse would print all flags first."""
        if found := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            flag, _, value = found[1].partition(" ")
            known = [option for action in self._actions for option in action.option_strings if takes(action, value)]
            raise ConfigError(_unknown(flag, known))
        raise ConfigError(in_a_line(message))


def _unknown(token: str, known: list[str]) -> str:
    flag = token.split("=", 1)[0]
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}: every value belongs behind a --flag"
    return f"unknown flag {flag}: {did_you_mean(flag, known, '--help lists all flags')}"


def given_path(text: str) -> str:
    """The `type=` of a flag that names a file or folder; ~ is the home folder."""
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return os.path.expanduser(text)


def new_folder(text: str) -> str:
    """The `type=` of a flag that names a folder to write to, which need not exist yet."""
    if problem := utf8_problem(text):
        raise argparse.ArgumentTypeError(problem)
    if not can_be_made(given_path(text)):
        raise argparse.ArgumentTypeError(f"{in_short(text)} can't be written to: name another folder")
    return given_path(text)


def begin(program: str, reads: Callable[[list[str]], object] | None = None, ends_without_reader: bool = False) -> None:
    """Prepare this process for a command. Call it before importing libraries that take seconds and print.

    program: for messages, like "run/chat.py"; reads: parses the flags, so that --help and wrong flags end the process
    now; ends_without_reader: see keep_streams.
    """
    keep_streams(ends_without_reader)
    if os.environ.get("HOME") == "":
        del os.environ["HOME"]  # ~ is then the home folder of the system's user database, not /
    # Nothing is half-written yet, and an exception might be lost: transformers' lazy modules turn it into ImportError.
    _handle_interrupts(exit_for_interrupt)
    try:
        check_variables(os.environ)
    except ConfigError as error:  # on every rank, because RANK itself may be no number
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    watch_launcher()  # from now on this process exits when its launcher ends, also during imports
    # DeepSpeed warns that no GPU was found, which our own lines report, too ("ranks on CPU").
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.filename != "real_accelerator.py")
    if reads is not None:
        try:
            _read(reads)
        except (ConfigError, DataError) as error:
            exit_for_bad_input(error, program)


def _read(reads: Callable[[list[str]], object]) -> None:
    try:
        reads(sys.argv[1:])
    except SystemExit:  # of --help
        check_output()
        raise


def exit_with(
    main: Callable[[], int | None], program: str, explain: Callable[[str], str] = lambda message: message
) -> NoReturn:
    """Run a command and exit with the code that main returns, 0 for None.

    explain: adds to a message about the input where values that it blames come from.

    2: the user's input can't be used, there is no memory left, or stdout of a command that only prints can't be
    written, in one message; 130: Ctrl-C, without a message; 1: a failure, with a traceback.
    """
    try:
        _handle_interrupts(_raise_interrupt)
        try:
            code = main() or 0
        except SystemExit as leaving:  # of --help, or of a command that this one runs
            if leaving.code not in (None, 0):
                raise
            code = 0
        check_output()
    except (ConfigError, DataError) as error:
        exit_for_bad_input(ConfigError(explain(str(error))), program)
    except KeyboardInterrupt:
        exit_for_interrupt()
    except Exception as error:
        if "torch" in sys.modules:  # else it can't be, and importing it takes seconds
            from llava_ds.runtime.determinism import about_nondeterministic
            from llava_ds.runtime.device_memory import is_out_of_memory, without_memory

            problem = without_memory(error) if is_out_of_memory(error) else about_nondeterministic(error)
            if problem is not None:
                exit_for_bad_input(ConfigError(problem), program)
        exit_for_failure()
    sys.exit(code)


def exit_for_interrupt() -> NoReturn:
    """End the child processes, then this one at once: the interpreter's own exit would wait for threads, and print
    their errors after Ctrl-C."""
    import psutil

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = psutil.Process().children(recursive=True)
    for signalled in ("terminate", "kill"):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(child, signalled)()
        _, children = psutil.wait_procs(children, timeout=ENDING_S)
    os._exit(EXIT_INTERRUPTED)  # without a flush, which might print a line twice


def _handle_interrupts(interrupt: Callable[[], NoReturn]) -> None:
    """Let Ctrl-C call `interrupt` in this process alone, once; a second one ends it at once.

    Forked workers ignore it: the terminal sends it to all, and this process ends them.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background by a script
        return
    own, times = os.getpid(), 0

    def interrupted(_: int, __: FrameType | None) -> None:
        nonlocal times
        if os.getpid() != own:
            return
        times += 1
        if times > 1:
            os._exit(EXIT_INTERRUPTED)
        interrupt()

    def uncaught(kind: type[BaseException], error: BaseException, trace: object) -> None:
        if issubclass(kind, KeyboardInterrupt):  # while exit_with printed an error
            exit_for_interrupt()
        sys.__excepthook__(kind, error, trace)

    signal.signal(signal.SIGINT, interrupted)
    sys.excepthook = uncaught


def _raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt
