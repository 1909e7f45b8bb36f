"""The variables of srun and of Open MPI's mpirun under torch's names."""

import re
import subprocess
from collections.abc import Mapping

from llava_ds.config.bounds import number_in
from llava_ds.constants import ConfigError, in_short

DEFAULT_PORT = 29500  # deepspeed's and torchrun's
SCONTROL_S = 30.0


def from_srun(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for one task of a job step. names: torch's names to srun's.

    Source: srun(1), "Output environment variables".
    """
    found = _renamed(environ, names, "srun")
    # Task 0 runs on the step's first node, unless the user gave srun another distribution.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes is None and "MASTER_ADDR" not in environ:
        raise ConfigError("SLURM_STEP_NODELIST and MASTER_ADDR are not set: export MASTER_ADDR=<the first node's name>")
    here = tasks_on(number_in(environ, "SLURM_NODEID", least=0), environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # Jobs that share a node get different ports, below those that Linux gives to outgoing connections.
    number = 31 * number_in(environ, "SLURM_JOB_ID", least=0) + number_in(environ, "SLURM_STEP_ID", least=0)
    return {
        **found,
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": str(12000 + number % 20000),
    }


def from_open_mpi(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for a rank of Open MPI's mpirun. names: torch's names to Open MPI's."""
    found = _renamed(environ, names, "mpirun")
    if "MASTER_ADDR" not in environ and found["LOCAL_WORLD_SIZE"] != found["WORLD_SIZE"]:
        raise ConfigError(
            "mpirun started ranks on several machines, but MASTER_ADDR is not set, and Open MPI has no variable for "
            "rank 0's machine: give mpirun -x MASTER_ADDR=<name or address of the first machine>"
        )
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(DEFAULT_PORT)}


def _renamed(environ: Mapping[str, str], names: Mapping[str, str], launcher: str) -> dict[str, str]:
    """Return a launcher's variables under torch's names. Raises ConfigError if one is missing."""
    missing = [theirs for theirs in names.values() if theirs not in environ]
    if missing:
        raise ConfigError(
            f"{names['WORLD_SIZE']} is set, but {' and '.join(missing)} not: start the script with {launcher}"
        )
    return {name: environ[theirs] for name, theirs in names.items()}


def first_node(text: str) -> str:
    """Return the first node in a Slurm node list, expanded by scontrol: gpu03 for gpu[03-04,07],login1.

    Raises ConfigError if scontrol fails, or is missing, as in some containers.
    """
    if re.fullmatch(r"[\w.-]+", text):
        return text
    try:
        command = ["scontrol", "show", "hostnames", text]
        names = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        names = []
    if not names:
        raise ConfigError(
            f"the node list {in_short(text)!r} can't be read (scontrol show hostnames): export MASTER_ADDR, the first "
            "node's name"
        )
    return names[0]


def tasks_on(node: int, text: str) -> int:
    """Return the number of tasks on a node. node: its index; text: tasks per node; 4(x2),3 means 4, 4, 3."""
    parts = [re.fullmatch(r"([1-9]\d{0,8})(?:\(x([1-9]\d{0,8})\))?", part, re.ASCII) for part in text.split(",")]
    if None in parts:
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {in_short(text)!r}: expected numbers like 4(x2),3")
    for part in parts:
        node -= int(part[2] or 1)
        if node < 0:
            break
    return int(part[1])
