"""Translate the variables of srun and mpirun to the names that deepspeed's launcher and torchrun use."""

import contextlib
import random
import re
import socket
import subprocess
from collections.abc import Mapping

from llava_ds.constants import ConfigError, in_short

TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The launchers' numeric variables, with their smallest values.
RANK_NUMBERS = {
    "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": 1,
}  # fmt: skip
LARGEST = {"MASTER_PORT": 65535}
DEFAULT_PORT = 29500  # deepspeed's and torchrun's
# The same variables under srun and under Open MPI's mpirun.
SRUN = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
SCONTROL_S = 30.0


def rank_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Return the variables of this rank that its launcher left unset, and a line to print or None.

    Supports deepspeed and torchrun (they set all), srun and Open MPI's mpirun; without a launcher, the process is the
    only rank. The user's MASTER_ADDR and MASTER_PORT are kept.
    Raises ConfigError if the launcher sets too few variables.
    """
    if "RANK" in environ:
        missing = [name for name in TORCH_VARIABLES if name not in environ]
        if missing:
            raise ConfigError(
                f"RANK is set, but {', '.join(missing)} not: start with deepspeed, torchrun or srun, or set all of "
                f"{', '.join(TORCH_VARIABLES)}"
            )
        return {}, None
    if (names := _names(environ)) is SRUN:
        found = _from_srun(environ)
    elif names is OPEN_MPI:
        found = _from_open_mpi(environ)
    elif _number(environ, "PMI_SIZE") > 1:
        raise ConfigError(
            f"PMI_SIZE is {environ['PMI_SIZE']}, but RANK is not set: each process would train by itself. Start with "
            f"deepspeed, torchrun, srun or Open MPI's mpirun, or set {', '.join(TORCH_VARIABLES)}"
        )
    else:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, _note_of_one(environ)
    return {name: value for name, value in found.items() if name not in environ}, None


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError, one line each, for rank variables that are malformed or contradict each other.

    Every variable that is set has to be well-formed, because libraries read them as well. A process is a rank if RANK
    is set, under torch's name or another launcher's.
    """
    problems, numbers, names = [], {}, _names(environ)
    own_name = {name: name if name in environ else names.get(name, name) for name in RANK_NUMBERS}
    for name, least in RANK_NUMBERS.items():
        text = environ.get(own_name[name])
        if text is None:
            continue
        number = _parsed(text.strip())
        if number is not None and least <= number <= LARGEST.get(name, 2**31 - 1):
            numbers[name] = number
        else:
            limit = f" to {LARGEST[name]}" if name in LARGEST else ""
            problems.append(f"{own_name[name]} is {in_short(text)!r}: expected a whole number from {least}{limit}")
    of = {"RANK": ("WORLD_SIZE",), "LOCAL_RANK": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")}
    for name, sizes in of.items() if "RANK" in environ or names else ():
        size = next((size for size in sizes if size in numbers), None)
        if name in numbers and size is not None and numbers[name] >= numbers[size]:
            problems.append(
                f"{own_name[name]} is {numbers[name]}, but {own_name[size]} is {numbers[size]}: expected 0 to "
                f"{numbers[size] - 1}; the other ranks would wait forever for the missing one"
            )
    if "RANK" in environ and not environ.get("MASTER_ADDR", "unset").strip():
        problems.append("MASTER_ADDR is empty: expected the name or address of rank 0's machine")
    if problems:
        raise ConfigError(
            "\n".join([*problems, "unset these variables if no launcher set them, or start with deepspeed or torchrun"])
        )


def _names(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the launcher's names of the variables if it does not set RANK itself; empty without a launcher."""
    if "RANK" not in environ:
        for names in (SRUN, OPEN_MPI):
            if _number(environ, names["WORLD_SIZE"]) > 1:
                return names
    return {}


def _from_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one task of a job step. Source: srun(1), "Output environment variables"."""
    found = _renamed(environ, SRUN, "srun")
    # Task 0 runs on the step's first node, unless the user gave srun another distribution.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes is None and "MASTER_ADDR" not in environ:
        raise ConfigError("SLURM_STEP_NODELIST and MASTER_ADDR are not set: export MASTER_ADDR=<the first node's name>")
    here = tasks_on(_number(environ, "SLURM_NODEID", least=0), environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # Jobs that share a node get different ports, below those that Linux gives to outgoing connections.
    number = 31 * _number(environ, "SLURM_JOB_ID", least=0) + _number(environ, "SLURM_STEP_ID", least=0)
    return {
        **found,
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_node(nodes),
        "MASTER_PORT": str(12000 + number % 20000),
    }


def _from_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    found = _renamed(environ, OPEN_MPI, "mpirun")
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


def _note_of_one(environ: Mapping[str, str]) -> str | None:
    """Return a line for a user who reserved more in Slurm than this one process uses; None otherwise."""
    reserved = {name: _number(environ, name) for name in ("SLURM_NTASKS", "SLURM_NNODES")}
    name = max(reserved, key=reserved.get)
    if reserved[name] == 1:
        return None
    return (
        f"{name} is {reserved[name]}, but srun did not start this process: it trains alone. Put srun before the command"
    )


def first_node(text: str) -> str:
    """Return the first name of one of Slurm's node lists, as scontrol expands it: gpu03 for gpu[03-04,07],login1.

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
    """Return the number of tasks on a node of the step, from Slurm's list: 4(x2),3 means 4, 4, 3."""
    parts = [re.fullmatch(r"([1-9]\d{0,8})(?:\(x([1-9]\d{0,8})\))?", part, re.ASCII) for part in text.split(",")]
    if None in parts:
        raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {in_short(text)!r}: expected numbers like 4(x2),3")
    for part in parts:
        node -= int(part[2] or 1)
        if node < 0:
            break
    return int(part[1])


def free_port() -> int:
    """Return a free port of the loopback interface, below those that the kernel gives to outgoing connections.

    An outgoing connection might take a higher port before it is used.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise ConfigError("found no free port on 127.0.0.1: set MASTER_PORT to a free one")


def is_loopback_name(host: str) -> bool:
    """Return True if a machine's own name resolves to no address that another machine could reach."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True
    return all(address[0].startswith("127.") or address[0] == "::1" for *_, address in found)


def _number(environ: Mapping[str, str], name: str, least: int = 1) -> int:
    """Return a variable's whole number, or `least` if it is not set."""
    text = environ.get(name, str(least))
    if (number := _parsed(text)) is None:
        raise ConfigError(f"{name} is {in_short(text)!r}: expected a whole number")
    return number


def _parsed(text: str) -> int | None:
    """Parse a whole number of at most 20 digits; None for other text."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
