"""What surrounds every command, seen from outside: exit codes, Ctrl-C, and readers that leave."""

import json
import os
import pwd
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from launching import ROOT

from llava_ds.config.bounds import Count, number
from llava_ds.constants import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_READER_GONE, ConfigError
from llava_ds.runtime.command import Parser, given_path, new_folder

BEGIN = """
    import os, sys, time
    from llava_ds.runtime.command import begin, exit_with
    from llava_ds.constants import ConfigError
    begin("run/x.py", ends_without_reader={ends})
"""


def script(body: str, ends: bool = False) -> list[str]:
    """The command of a program like those in run/."""
    return [sys.executable, "-c", textwrap.dedent(BEGIN.format(ends=ends)) + textwrap.dedent(body)]


def start(command: list[str], **options: object) -> subprocess.Popen:
    default = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not as in a shell's background
        **{**default, **options},
    )


def interrupted(command: list[str]) -> tuple[int, str, str]:
    """Exit code and output of a command that says "ready", whose whole group Ctrl-C then reaches."""
    with start(command) as process:
        assert process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return process.returncode, out, err


def test_ctrl_c_ends_a_command_and_its_workers_without_a_word():
    body = """
        import multiprocessing
        def main():
            with multiprocessing.get_context("fork").Pool(2) as pool:
                work = pool.map_async(time.sleep, [60, 60])
                time.sleep(0.2)
                print("ready", flush=True)
                work.get()
        exit_with(main, "run/x.py")
    """
    assert interrupted(script(body)) == (EXIT_INTERRUPTED, "", "")


def test_an_empty_home_is_none():
    """~ would be the root of all files."""
    body = """
        def main():
            print(os.path.expanduser("~"))
        exit_with(main, "run/x.py")
    """
    home = pwd.getpwuid(os.getuid()).pw_dir
    with start(script(body), env={**os.environ, "HOME": ""}) as process:
        assert process.communicate(timeout=60) == (f"{home}\n", "")


def test_ctrl_c_while_libraries_are_imported():
    assert interrupted(script('print("ready", flush=True); time.sleep(60)')) == (EXIT_INTERRUPTED, "", "")


def test_ctrl_c_is_not_lost_in_an_import_that_makes_another_error_of_it():
    """As transformers' lazily loaded modules do."""
    body = """
        try:
            print("ready", flush=True)
            time.sleep(60)
        except BaseException as error:
            raise ModuleNotFoundError("could not import") from error
    """
    assert interrupted(script(body)) == (EXIT_INTERRUPTED, "", "")


def test_no_command_imports_a_large_library_before_it_hears_ctrl_c():
    code = """
        import runpy, sys
        from pathlib import Path
        import llava_ds.runtime.command
        class Begun(Exception): pass
        def begin(*_, **__): raise Begun
        llava_ds.runtime.command.begin = begin
        for script in sorted(Path("run").glob("*.py")):
            if "exit_with(" in script.read_text():
                try: runpy.run_path(str(script), run_name="__main__")
                except Begun: print(script)
        print(sorted({"numpy", "torch", "transformers", "yaml", "PIL", "deepspeed"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    *begun, loaded = done.stdout.splitlines()
    assert loaded == "[]" and "run/train.py" in begun and len(begun) > 5, done.stderr


def test_ctrl_c_leaves_no_half_written_file(tmp_path):
    body = f"""
        from pathlib import Path
        from llava_ds.files.writing import write_output
        def slowly(path):
            path.write_text("half")
            print("ready", flush=True)
            time.sleep(60)
        exit_with(lambda: write_output(Path({str(tmp_path)!r}) / "x.html", slowly, "--html"), "run/x.py")
    """
    assert interrupted(script(body))[0] == EXIT_INTERRUPTED
    assert list(tmp_path.iterdir()) == []


MANY_LINES = """
    def main():
        for number in range(100_000):
            print(number, file=sys.stderr if number % 2 else sys.stdout)
        open({path!r}, "w").write("done")
    exit_with(main, "run/x.py")
"""


@pytest.mark.parametrize(("ends", "code"), [(False, 0), (True, EXIT_READER_GONE)])
def test_a_reader_that_leaves_ends_only_what_is_of_no_use_without_it(tmp_path, ends, code):
    path = tmp_path / "done"
    with start(script(MANY_LINES.format(path=str(path)), ends), stderr=subprocess.STDOUT) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == code
    assert path.exists() is not ends


@pytest.mark.parametrize("redirection", [">/dev/full 2>&1", ">&- 2>&-", "| head -c 1; exit ${PIPESTATUS[0]}"])
def test_output_that_nobody_takes_ends_nothing(tmp_path, redirection):
    path = tmp_path / "done"
    command = ["bash", "-c", f'"$@" {redirection}', "bash", *script(MANY_LINES.format(path=str(path)))]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode == 0
    assert path.read_text() == "done"


@pytest.mark.parametrize(
    "prints", ["print('x')", "print('x', flush=True)", "print('x'); sys.exit(0)", "return print('x') or 1"]
)
def test_a_command_of_which_only_its_output_is_of_use_says_that_it_is_lost(prints):
    body = f"""
        def main():
            {prints}
        exit_with(main, "run/x.py")
    """
    command = ["bash", "-c", '"$@" >/dev/full', "bash", *script(body, ends=True)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stderr == (
        "run/x.py: error: stdout could not be written, and the output is cut off: No space left on device "
        "(ENOSPC): free disk space, or write elsewhere\n"
    )


def test_bad_input_is_one_line_and_a_failure_has_its_traceback():
    def run(body: str) -> tuple[int, str]:
        done = subprocess.run(script(body), cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    assert run("""
        def main(): raise ConfigError("--x is wrong")
        exit_with(main, "run/x.py")
    """) == (EXIT_BAD_INPUT, "run/x.py: error: --x is wrong\n")
    code, said = run("""
        def main(): 1 / 0
        exit_with(main, "run/x.py")
    """)
    assert code == 1 and "ZeroDivisionError" in said


LIGHT = """
    import contextlib, io, json, os, runpy, sys
    from pathlib import Path
    import llava_ds.config.parsing, llava_ds.runtime.command
    leave, found = os._exit, {}

    def run(script, flag, writing):
        said = io.StringIO()

        def tell(code):
            loaded = {"torch", "transformers", "deepspeed", "numpy"} & set(sys.modules)
            os.write(writing, json.dumps([code, sorted(loaded), said.getvalue()]).encode())
            leave(0)

        os._exit, sys.argv = tell, [script, flag]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            llava_ds.runtime.command.keep_streams = lambda ends: None
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as leaving:
                tell(leaving.code)

    for script in sys.argv[1:]:
        for flag in ("--help", "--no_such_flag=1"):
            reading, writing = os.pipe()
            if os.fork() == 0:
                run(script, flag, writing)
                leave(1)
            os.close(writing)
            found[f"{script} {flag}"] = json.loads(os.fdopen(reading).read() or "null")
            os.wait()
    print(json.dumps(found))
"""


def test_help_and_wrong_flags_of_every_script_come_before_large_libraries():
    scripts = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "run").glob("*.py"))
    command = [sys.executable, "-c", textwrap.dedent(LIGHT), *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(scripts) and {"run/train.py", "run/encode.py"} < set(scripts), done.stderr
    for run, (code, loaded, said) in found.items():
        assert loaded == [], run
        expected = (0, "usage: ") if run.endswith("--help") else (EXIT_BAD_INPUT, "error: ")
        assert code in (expected[0], None) and expected[1] in said, (run, code, said)


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="x")
    parser.add_argument("--limit", "--at-most", type=number(Count))
    parser.add_argument("--output", type=given_path)
    parser.add_argument("--folder", type=new_folder)
    parser.add_argument("--kind", choices=["a", "b"])
    for name in ("blank", "missing"):
        parser.add_argument(f"--compare_{name}_image", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--limit", "0"], "--limit is 0: give 1 or more"),
        (["--limit", "9" * 5000], "--limit 999"),
        (["--limit", "1.5"], "--limit 1.5 is not a whole number"),
        (["--limit"], "--limit: expected one argument"),
        (["--lim", "1"], "unknown flag --lim: did you mean --limit?"),
        (["--zzz", "1"], "unknown flag --zzz: --help lists all flags"),
        (["--compare_no_image"], "unknown flag --compare_no_image: the nearest are --compare_blank_image, --compare_m"),
        (["--compare"], "unknown flag --compare: the nearest are --compare_blank_image, --compare_missing_image"),
        (["stray"], "unexpected argument 'stray'"),
        (["--output", ""], "--output is empty: name a path"),
        (["--folder", ""], "--folder is empty: name a path"),
        (["--folder", "/proc/x"], "--folder /proc/x can't be written to: name another folder"),
        (["--kind", "c"], "--kind: invalid choice: 'c'"),
    ],
)
def test_what_a_command_does_not_take_is_said_in_one_line(parser, argv, message):
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(argv)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)
