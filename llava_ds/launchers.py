"""Who started this process: other launchers' variables, told as deepspeed's launcher and torchrun tell them."""

import contextlib
import random
import re
import socket
from collections.abc import Mapping

from llava_ds.constants import ConfigError

TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The numbers among them and beside them, and the least that each can be.
RANK_NUMBERS = {
    "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": 1,
}  # fmt: skip
LARGEST = {"MASTER_PORT": 65535}
DEFAULT_PORT = 29500  # deepspeed's and torchrun's
_NODES = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"  # one entry of Slurm's lists: gpu[01-03,07]


def rank_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """The variables that say who this process is, as far as its launcher left them unset, and a line to print or None.

    Knows deepspeed and torchrun (which set all), srun and Open MPI's mpirun; a process that nothing announces is a
    group of one. MASTER_ADDR and MASTER_PORT keep what the user gave them.
    Raises ConfigError for launchers that say too little.
    """
    if "RANK" in environ:
        missing = [name for name in TORCH_VARIABLES if name not in environ]
        if missing:
            raise ConfigError(
                f"RANK is set, but {', '.join(missing)} not: start with deepspeed, torchrun or srun, which set all of "
                f"{', '.join(TORCH_VARIABLES)}, or set these too"
            )
        return {}, None
    if _number(environ, "SLURM_STEP_NUM_TASKS") > 1:
        found = _from_srun(environ)
    elif _number(environ, "OMPI_COMM_WORLD_SIZE") > 1:
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
    """Raise ConfigError, with a line for each, where variables that say who a rank is can't be true.

    All that are set have to be well-formed, for libraries read them too; RANK is what makes a process a rank.
    """
    problems, numbers = [], {}
    for name, least in RANK_NUMBERS.items():
        if name not in environ:
            continue
        text = environ[name].strip()
        if text.isdecimal() and text.isascii() and least <= int(text) <= LARGEST.get(name, 2**31 - 1):
            numbers[name] = int(text)
        else:
            limit = f" to {LARGEST[name]}" if name in LARGEST else ""
            problems.append(f"{name} is {environ[name]!r}: expected a whole number from {least}{limit}")
    of = {"RANK": ("WORLD_SIZE",), "LOCAL_RANK": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")}
    for name, sizes in of.items() if "RANK" in environ else ():
        size = next((size for size in sizes if size in numbers), None)
        if name in numbers and size is not None and numbers[name] >= numbers[size]:
            problems.append(
                f"{name} is {numbers[name]}, but {size} is {numbers[size]}: ranks count from 0 to {numbers[size] - 1}, "
                "and would wait for ever for one that is not among them"
            )
    if "RANK" in environ and not environ.get("MASTER_ADDR", "unset").strip():
        problems.append("MASTER_ADDR is empty: expected the name or address of rank 0's machine")
    if problems:
        raise ConfigError("\n".join([*problems, "unset what no launcher has set, or start with deepspeed or torchrun"]))


def _from_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of one task of a job step. Source: srun(1), "Output environment variables"."""
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID") if name not in environ]
    if missing:
        raise ConfigError(f"SLURM_STEP_NUM_TASKS is set, but {' and '.join(missing)} not: start the script with srun")
    # Task 0 runs on the first node of the step, unless srun was given a distribution of the user's own.
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes is None and "MASTER_ADDR" not in environ:
        raise ConfigError(
            "neither SLURM_STEP_NODELIST nor MASTER_ADDR is set: export MASTER_ADDR, the first node's name"
        )
    per_node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = _number(environ, "SLURM_NODEID", least=0)
    # Jobs that share a node get ports of their own, below those that Linux gives to outgoing connections.
    number = 31 * _number(environ, "SLURM_JOB_ID", least=0) + _number(environ, "SLURM_STEP_ID", least=0)
    return {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(per_node[min(node, len(per_node) - 1)]),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or expand_nodelist(nodes)[0],
        "MASTER_PORT": str(12000 + number % 20000),
    }


def _from_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that mpirun started."""
    names = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    found = {name: environ[theirs] for name, theirs in names.items()}
    if "MASTER_ADDR" not in environ and found["LOCAL_WORLD_SIZE"] != found["WORLD_SIZE"]:
        raise ConfigError(
            "mpirun started ranks on several machines, but MASTER_ADDR is not set, and Open MPI does not say where "
            "rank 0 is: give mpirun -x MASTER_ADDR=<name or address of the first machine>"
        )
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(DEFAULT_PORT)}


def _note_of_one(environ: Mapping[str, str]) -> str | None:
    """A line for who reserved more in Slurm than this one process will use."""
    reserved = {name: _number(environ, name) for name in ("SLURM_NTASKS", "SLURM_NNODES")}
    name = max(reserved, key=reserved.get)
    if reserved[name] == 1:
        return None
    return (
        f"{name} is {reserved[name]}, but srun did not start this process: it trains alone. Put srun before the command"
    )


def expand_nodelist(text: str) -> list[str]:
    """The names in a list as Slurm writes it: gpu[01-03,07],login1 is gpu01, gpu02, gpu03, gpu07, login1."""
    if not re.fullmatch(f"{_NODES}(?:,{_NODES})*", text):
        raise ConfigError(f"the node list {text!r} can't be read: export MASTER_ADDR, the first node's name")
    names = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", entry):
            endings = [literal] if literal else [n for part in ranges.split(",") for n in _numbers_in(part)]
            expanded = [start + ending for start in expanded for ending in endings]
        names += expanded
    return names


def _numbers_in(part: str) -> list[str]:
    """The numbers of 08-11, as wide as the first is written."""
    first, _, last = part.partition("-")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]


def expand_counts(text: str) -> list[int]:
    """Tasks per node, as Slurm writes them: 4(x2),3 is 4, 4, 3."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}: expected numbers like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now, below those that the kernel hands out by itself:
    one of these may be taken, by anybody's outgoing connection, before it is used."""
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise ConfigError("no free port was found on 127.0.0.1: set MASTER_PORT to one")


def is_loopback_name(host: str) -> bool:
    """Whether a machine's own name leads to no address that another machine could reach."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True
    return all(address[0].startswith("127.") or address[0] == "::1" for *_, address in found)


def _number(environ: Mapping[str, str], name: str, least: int = 1) -> int:
    """A variable's whole number, or the least that it can be where it is not set."""
    text = environ.get(name, str(least))
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}: expected a whole number")
    return int(text)
