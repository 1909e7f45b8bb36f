"""Code around every command's main(): handles invalid flags, Ctrl-C, a closed pipe, and exit codes.

A script in run/ calls begin() before the slow imports, and exit_with() at its end.
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

ENDING_S = 3.0  # time for child processes to end after SIGTERM


class Parser(argparse.ArgumentParser):
    """An argument parser that rejects abbreviated flags and names the nearest flag in its one-line errors."""

    def __init__(self, **options: object) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**defaults, **options})

    def parse_known_args(self, *given: object, **more: object) -> tuple[argparse.Namespace, list[str]]:
        """Raise ConfigError with one line per invalid value."""
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
        """Raise ConfigError with the message; argparse would print all flags before it."""
        if found := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            flag, _, value = found[1].partition(" ")
            known = [option for action in self._actions for option in action.option_strings if takes(action, value)]
            raise ConfigError(_unknown(flag, known))
        raise ConfigError(in_a_line(message))


def _unknown(token: str, known: list[str]) -> str:
    flag = token.split("=", 1)[0]
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}: every value needs a --flag before it"
    from llava_ds.config.other_names import related

    return f"unknown flag {flag}: {did_you_mean(flag, known, related(flag, known, '--help lists all flags'))}"


def given_path(text: str) -> str:
    """Check a path and expand ~, for argparse's `type=`."""
    if problem := path_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return os.path.expanduser(text)


def new_folder(text: str) -> str:
    """Check a path of an output folder, for argparse's `type=`. The folder does not have to exist."""
    if problem := utf8_problem(text):
        raise argparse.ArgumentTypeError(problem)
    if not can_be_made(given_path(text)):
        raise argparse.ArgumentTypeError(f"{in_short(text)} can't be written to: name another folder")
    return given_path(text)


def add_plugin_flag(add: Callable[..., object]) -> None:
    """Add --plugin to a parser. load_plugins loads the files."""
    text = "plugin file that the model was trained with (docs/plugins.md); repeatable; its code is run"
    add("--plugin", action="append", type=given_path, metavar="FILE", help=text)


def load_plugins(args: argparse.Namespace) -> None:
    """Load the files of --plugin. Raises ConfigError."""
    if args.plugin:
        from llava_ds.config.plugins import load

        load(args.plugin)


def begin(program: str, reads: Callable[[list[str]], object] | None = None, ends_without_reader: bool = False) -> None:
    """Prepare this process for a command. Call it before importing libraries that take seconds and print.

    program: name in messages, like "run/chat.py". reads: function that parses the flags; --help and invalid flags end
    the process here. ends_without_reader: see keep_streams.
    """
    keep_streams(ends_without_reader)
    if os.environ.get("HOME") == "":
        del os.environ["HOME"]  # ~ then expands to the home in the system's user database, not to /
    # Exit, don't raise: no file is half-written, and transformers' lazy modules may turn an exception into ImportError.
    _handle_interrupts(exit_for_interrupt)
    try:
        check_variables(os.environ)
    except ConfigError as error:  # on every rank, because RANK itself may be malformed
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    watch_launcher()  # exit with the launcher from here on, even during imports
    # DeepSpeed warns that it found no GPU; our own output reports it already ("ranks on CPU").
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.filename != "real_accelerator.py")
    if reads is not None:
        try:
            _read(reads)
        except Exception as error:
            problem = str(error) if isinstance(error, (ConfigError, DataError)) else _of_plugin(error)
            if problem is None:
                raise
            exit_for_bad_input(ConfigError(problem), program)


def _read(reads: Callable[[list[str]], object]) -> None:
    try:
        reads(sys.argv[1:])
    except SystemExit:  # from --help
        check_output()
        raise


def exit_with(
    main: Callable[[], int | None], program: str, explain: Callable[[str], str] = lambda message: message
) -> NoReturn:
    """Run a command and exit with the code that main returns, 0 for None.

    explain: extends a message about bad input with the source of the values.
    Other exit codes: 2 with one message if the user's input can't be used, if memory ran out, or if a command that only
    prints can't write to stdout; 130 without a message on Ctrl-C; 1 with a traceback for any other error.
    """
    try:
        _handle_interrupts(_raise_interrupt)
        try:
            code = main() or 0
        except SystemExit as leaving:  # raised by --help, a command run by this one, or a plugin
            if problem := _of_plugin(leaving):
                raise ConfigError(problem) from leaving
            if leaving.code not in (None, 0):
                raise
            code = 0
        check_output()
    except (ConfigError, DataError) as error:
        exit_for_bad_input(ConfigError(explain(str(error))), program)
    except KeyboardInterrupt:
        exit_for_interrupt()
    except Exception as error:
        problem = None
        if "torch" in sys.modules:  # without torch these errors can't occur, and importing it takes seconds
            from llava_ds.runtime.determinism import about_nondeterministic
            from llava_ds.runtime.device_memory import is_out_of_memory, without_memory

            problem = without_memory(error) if is_out_of_memory(error) else about_nondeterministic(error)
        if problem := problem or _of_plugin(error):
            exit_for_bad_input(ConfigError(problem), program)
        exit_for_failure()
    sys.exit(code)


def _of_plugin(error: BaseException) -> str | None:
    """Describe an error that a --plugin caused; return None for any other error."""
    return calls.error_of_plugin(error) if (calls := sys.modules.get("llava_ds.config.plugin_calls")) else None


def exit_for_interrupt() -> NoReturn:
    """End the child processes, then this process, without the interpreter's clean-up.

    The clean-up would wait for threads and print their errors.
    """
    import psutil

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = psutil.Process().children(recursive=True)
    for signalled in ("terminate", "kill"):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(child, signalled)()
        _, children = psutil.wait_procs(children, timeout=ENDING_S)
    os._exit(EXIT_INTERRUPTED)  # skips the flush of stdout: it might print a line twice


def _handle_interrupts(interrupt: Callable[[], NoReturn]) -> None:
    """Call `interrupt` on the first Ctrl-C, in this process only; exit at once on the second.

    Forked workers also get the Ctrl-C from the terminal, but ignore it, because this process ends them.
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
        if issubclass(kind, KeyboardInterrupt):  # while exit_with was printing an error
            exit_for_interrupt()
        sys.__excepthook__(kind, error, trace)

    signal.signal(signal.SIGINT, interrupted)
    sys.excepthook = uncaught


def _raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt
