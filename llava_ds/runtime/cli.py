"""The llava-ds command: runs the scripts of run/ by name, from any folder."""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from llava_ds import __version__
from llava_ds.config.recipes import RUN
from llava_ds.constants import ConfigError, FlagProblems, did_you_mean
from llava_ds.runtime.command import begin, exit_with
from llava_ds.runtime.launchers import free_port
from llava_ds.runtime.processes import RUNNER_MODULE

# Command name: (file in run/, text for --help).
COMMANDS = {
    "train": ("train.py", "train on all GPUs of this machine (without one: one process on the CPU)"),
    "evaluate": ("evaluate.py", "score a model on questions that it was not trained on"),
    "chat": ("chat.py", "chat with a model about images"),
    "export": ("export.py", "turn a checkpoint or a model folder into a model folder"),
    "encode": ("encode.py", "check and encode data ahead of training, on any number of machines"),
    "inspect": ("inspect_data.py", "show what would be trained on"),
    "estimate": ("estimate.py", "estimate the memory that training needs"),
    "doctor": ("doctor.py", "check whether training can start on this machine"),
    "report": ("report.py", "write the report of a run"),
    "compare": ("compare.py", "compare runs"),
    "verify": ("verify.py", "check which checkpoints are complete"),
}
# Leave out the scripts of extensions that were deleted.
COMMANDS = {name: command for name, command in COMMANDS.items() if (RUN / command[0]).exists()}
LAUNCHED = ("train", "evaluate")  # commands that may run one process per GPU
RANK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # number of ranks, set by srun and mpirun
HELP = ("-h", "--help")
# Flags of deepspeed's launcher that choose among this machine's GPUs, unless a hostfile names other machines.
OF_ONE_MACHINE = {"--num_gpus", "--num_accelerators", "--include", "-i", "--exclude", "-e"}
HOSTFILE = Path("/job/hostfile")  # where deepspeed looks for a hostfile


def main() -> NoReturn:
    """Run the command given on the command line, as its script in run/."""
    begin("llava-ds", ends_without_reader=True)
    exit_with(run_command, "llava-ds")


def run_command() -> None:
    """Run the command's script and end the process; for training, become deepspeed's launcher first."""
    launcher_flags, name, argv = split(sys.argv[1:])
    if name in (*HELP, "--version"):
        print(__version__ if name == "--version" else usage())
        return
    script = RUN / COMMANDS[name][0]
    sys.argv = [str(script), *argv]
    if name in LAUNCHED and not set(HELP) & set(argv) and is_to_be_launched(name, launcher_flags, os.environ):
        if name == "train":
            # Exit now if the flags are invalid: the launcher takes seconds to start and prints before the message.
            begin("run/train.py", reads=_read_early)
        launch(script, launcher_flags, argv)
    runpy.run_path(str(script), run_name="__main__")


def split(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Split the words into the launcher's flags (before the command), the command's name, and the command's flags.

    Raises ConfigError if the command is unknown, or if launcher flags precede a command that needs no launcher.
    """
    at = next((i for i, word in enumerate(words) if word in COMMANDS), None)
    if at is None:
        if not words or words[0] in (*HELP, "--version"):
            return [], words[0] if words else HELP[1], []
        hint = did_you_mean(words[0], COMMANDS, f"give one of {', '.join(COMMANDS)}")
        raise ConfigError(f"unknown command {words[0]!r}: {hint}")
    before, name = words[:at], words[at]
    if before and (name not in LAUNCHED or not before[0].startswith("-")):
        raise ConfigError(f"{' '.join(before)} before {name}: only flags of deepspeed's launcher are allowed there")
    return before, name, words[at + 1 :]


def is_to_be_launched(name: str, launcher_flags: list[str], environ: Mapping[str, str]) -> bool:
    """Return True if deepspeed has to start the ranks: always for training, on several GPUs for evaluation."""
    if "RANK" in environ or any(environ.get(variable, "1") != "1" for variable in RANK_COUNTS):
        return False  # this process is already a rank
    if name == "train" or launcher_flags:
        return True
    import torch

    return torch.cuda.device_count() > 1


def _read_early(argv: list[str]) -> None:
    """Check the flags before the launcher starts.

    With --model_name_or_path, run/train.py checks them: the model's folder may give a better reason to refuse them.
    """
    from llava_ds.config.parsing import read_training_flags

    try:
        read_training_flags(argv)
    except FlagProblems as error:
        if error.arguments.model.model_name_or_path is None:
            raise


def launch(script: Path, launcher_flags: list[str], argv: list[str]) -> NoReturn:
    """Replace this process by deepspeed's launcher. Log level error hides its warning about a missing hostfile."""
    import torch

    environ = {**os.environ}
    if not torch.accelerator.is_available():
        environ.setdefault("DS_ACCELERATOR", "cpu")  # without it, deepspeed warns that it found no GPU
    # Run the module, because pip install --user puts the script `deepspeed` in a folder that may not be on PATH.
    words = [sys.executable, "-m", RUNNER_MODULE, "--log_level", "error", *port_flags(launcher_flags)]
    words += [*launcher_flags, str(script), *argv]
    os.execve(sys.executable, words, environ)


def port_flags(launcher_flags: list[str]) -> list[str]:
    """Return --master_port with a free port, for runs that share a machine; empty if there may be several machines."""
    flags = {word.split("=", 1)[0] for word in launcher_flags if word.startswith("-")}
    return ["--master_port", str(free_port())] if flags <= OF_ONE_MACHINE and not HOSTFILE.exists() else []


def usage() -> str:
    """Return the text of --help."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: llava-ds COMMAND [flags]        llava-ds COMMAND --help lists the flags",
            "       llava-ds [flags of deepspeed's launcher, like --hostfile hosts or --num_gpus 4] train [flags]",
            "",
            *(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()),
            "",
            f"The scripts are in {RUN}: deepspeed, torchrun and srun can start them directly.",
        ]
    )
