"""llava-ds: which command and how, and that an installation that is no checkout finds all of it."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys

import pytest
from extension_there import needs_extension
from launching import ROOT, environment

from llava_ds.config.recipes import DS_CONFIGS, RECIPES, RUN, found
from llava_ds.constants import EXIT_BAD_INPUT, EXIT_INTERRUPTED, ConfigError
from llava_ds.runtime import cli, processes
from llava_ds.runtime.cli import COMMANDS, is_to_be_launched, launch, split, usage


def test_what_stands_before_train_goes_to_the_launcher():
    assert split(["train", "--x", "1"]) == ([], "train", ["--x", "1"])
    assert split(["--num_gpus", "4", "train", "--x", "report"]) == (["--num_gpus", "4"], "train", ["--x", "report"])
    assert split([]) == ([], "--help", [])
    assert split(["--version"]) == ([], "--version", [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean train"),
        (["zzz"], "unknown command 'zzz': give one of train, "),
        (["--num_gpus", "4", "export"], "--num_gpus 4 before export"),
        (["zzz", "train"], "zzz before train"),
    ],
)
def test_other_words_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        split(words)


def test_a_rank_is_not_launched_again():
    assert is_to_be_launched("train", [], {})
    assert is_to_be_launched("train", [], {"SLURM_STEP_NUM_TASKS": "1"})
    for environ in ({"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "2"}, {"OMPI_COMM_WORLD_SIZE": "2"}):
        assert not is_to_be_launched("train", [], environ)
    assert is_to_be_launched("evaluate", ["--num_gpus", "2"], {})


def test_every_command_has_its_script_and_a_line_of_help():
    assert all((RUN / script).is_file() for script, _ in COMMANDS.values())
    assert all(f"  {name} " in usage() for name in COMMANDS)


def test_what_is_shipped_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("zero3", "zero3.json", "ds_configs/zero3.json"):
        assert found(name, DS_CONFIGS, ".json") == str(DS_CONFIGS / "zero3.json")
    assert found("run/recipes/tiny-finetune.yaml", RECIPES, ".yaml") == str(RECIPES / "tiny-finetune.yaml")
    for name in ("mine/zero3.json", "zero9.json", "auto", ""):
        assert found(name, DS_CONFIGS, ".json") == name
    (tmp_path / "zero3.json").touch()
    assert found("zero3.json", DS_CONFIGS, ".json") == "zero3.json"  # the user's own comes first


def test_the_launcher_is_found_where_no_script_lies_beside_the_interpreter(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(python))
    became = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    launch(RUN / "train.py", ["--num_gpus", "4"], ["--x", "1"])
    [(program, words, environ)] = became
    assert program == words[0] == str(python) and environ["PATH"] == os.environ["PATH"]
    assert words[-5:] == ["--num_gpus", "4", str(RUN / "train.py"), "--x", "1"]
    assert processes._is_runner(words)  # ranks know it by that
    assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None


def test_a_run_on_one_machine_gets_a_port_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "HOSTFILE", tmp_path / "hostfile")
    ports = [cli.port_flags(flags) for flags in ([], ["--num_gpus", "4"], ["--include=localhost:0"])]
    assert all(flag == "--master_port" and 0 < int(port) < 65536 and port != "29500" for flag, port in ports)
    for flags in (["--master_port", "5000"], ["--master_port=5000"], ["--hostfile", "hosts"], ["-H", "hosts"]):
        assert cli.port_flags(flags) == []
    (tmp_path / "hostfile").touch()
    assert cli.port_flags([]) == []


def llava_ds(*words: str, redirection: str = "", **variables: str) -> subprocess.Popen:
    code = f"import sys; from llava_ds.runtime.cli import main; sys.argv = ['llava-ds', *{list(words)!r}]; main()"
    return subprocess.Popen(
        ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", code],
        env={**environment(), **variables},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["foo"], {"RANK": "x"}, "RANK is 'x': expected a whole number from 0"),
        (["foo"], {"RANK": "3", "WORLD_SIZE": "2"}, "RANK is 3, but WORLD_SIZE is 2"),
        (["foo"], {}, "unknown command 'foo'"),
    ],
)
def test_what_is_wrong_is_one_message(words, variables, message):
    out, err = (process := llava_ds(*words, **variables)).communicate(timeout=60)
    assert (process.returncode, out) == (EXIT_BAD_INPUT, "")
    assert err.startswith(f"llava-ds: error: {message}") and "Traceback" not in err


def test_help_that_cannot_be_written_is_no_success():
    _, err = (process := llava_ds("--help", redirection=">/dev/full")).communicate(timeout=60)
    assert process.returncode == EXIT_BAD_INPUT and "the output is cut off: No space left" in err
    assert "Traceback" not in err


@needs_extension("benchmarks")
def test_ctrl_c_while_it_looks_for_gpus(tmp_path):
    (tmp_path / "torch.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = llava_ds("evaluate", PYTHONPATH=str(tmp_path))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == EXIT_INTERRUPTED


@pytest.mark.full
def test_an_installation_works_from_an_empty_folder(tmp_path):
    """Not an editable one: the sources are built from a copy, and the checkout is not looked at."""
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("llava_ds", "run", "ds_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=300)
    shutil.rmtree(source)

    def run(*words: str) -> subprocess.CompletedProcess:
        env = {**environment(), "PYTHONPATH": str(site)}
        command = [str(site / "bin" / "llava-ds"), *words]
        return subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, timeout=300)

    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"The scripts are in {site / 'llava_ds' / 'run'}" in done.stdout
    flags = ["--recipe", "run/recipes/tiny-finetune.yaml", "--deepspeed_config", "ds_configs/zero3.json"]
    done = run("train", *flags, "--learning_rate", "-1")
    assert (done.returncode, done.stdout) == (EXIT_BAD_INPUT, "")
    assert done.stderr == "run/train.py: error: --learning_rate is -1.0: give 0 or more\n"
    done = run("verify", "nowhere")
    assert done.returncode == EXIT_BAD_INPUT and "nowhere" in done.stderr
    assert os.listdir(empty) == []
