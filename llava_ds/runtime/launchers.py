"""Translate the variables of srun and mpirun to the names that deepspeed's launcher and torchrun use."""

import contextlib
import random
import socket
from collections.abc import Mapping

from llava_ds.config.bounds import number_in, whole_number
from llava_ds.constants import ConfigError, in_short

TORCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The launchers' numeric variables, with their smallest values.
RANK_NUMBERS = {
    "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1, "MASTER_PORT": 1,
}  # fmt: skip
LARGEST = {"MASTER_PORT": 65535}
# Names of these variables under srun and under Open MPI's mpirun.
SRUN = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def rank_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Return the variables of this rank that its launcher left unset, and a line to print or None.

    Supports srun, Open MPI's mpirun, and deepspeed and torchrun (they set all variables). Without a launcher, the
    process is the only rank. Under srun and mpirun, MASTER_ADDR and MASTER_PORT are used if set.
    Raises ConfigError if the launcher did not set enough variables.
    """
    if "RANK" in environ:
        missing = [name for name in TORCH_VARIABLES if name not in environ]
        if missing:
            raise ConfigError(
                f"RANK is set, but not {', '.join(missing)}: start with deepspeed, torchrun or srun, or set "
                f"all of {', '.join(TORCH_VARIABLES)}"
            )
        return {}, None
    if names := _names(environ):
        from llava_ds.runtime.other_launchers import from_open_mpi, from_srun

        translated = (from_srun if names is SRUN else from_open_mpi)(environ, names)
        return {name: value for name, value in translated.items() if name not in environ}, None
    if number_in(environ, "PMI_SIZE") > 1:
        raise ConfigError(
            f"PMI_SIZE is {environ['PMI_SIZE']}, but RANK is not set: each process would train by itself. Start with "
            f"deepspeed, torchrun, srun or Open MPI's mpirun, or set {', '.join(TORCH_VARIABLES)}"
        )
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, _note_of_one(environ)


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError with a line for each rank variable that is malformed or contradicts another.

    Every variable that is set is checked, because libraries read them as well. A process counts as a rank if RANK or
    another launcher's name for it is set.
    """
    problems, numbers, names = [], {}, _names(environ)
    own_name = {name: name if name in environ else names.get(name, name) for name in RANK_NUMBERS}
    for name, least in RANK_NUMBERS.items():
        text = environ.get(own_name[name])
        if text is None:
            continue
        number = whole_number(text.strip())
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
                f"{numbers[size] - 1}; otherwise ranks wait forever for a missing one"
            )
    if "RANK" in environ and not environ.get("MASTER_ADDR", "unset").strip():
        problems.append("MASTER_ADDR is empty: expected the name or address of rank 0's machine")
    if problems:
        raise ConfigError(
            "\n".join([*problems, "unset these variables if no launcher set them, or start with deepspeed or torchrun"])
        )


def _names(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return SRUN or OPEN_MPI if that launcher started this process; empty if RANK is set, or without a launcher."""
    if "RANK" not in environ:
        for names in (SRUN, OPEN_MPI):
            if number_in(environ, names["WORLD_SIZE"]) > 1:
                return names
    return {}


def _note_of_one(environ: Mapping[str, str]) -> str | None:
    """Return a warning if the Slurm job has more tasks or nodes than this one process uses; None otherwise."""
    reserved = {name: number_in(environ, name) for name in ("SLURM_NTASKS", "SLURM_NNODES")}
    name = max(reserved, key=reserved.get)
    if reserved[name] == 1:
        return None
    return (
        f"{name} is {reserved[name]}, but srun did not start this process: it trains alone. Put srun before the command"
    )


def free_port() -> int:
    """Return a free port of the loopback interface.

    It is below the range for outgoing connections that might take the port before the launcher uses it.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
    raise ConfigError("found no free port on 127.0.0.1: set MASTER_PORT to a free one")


def is_loopback_name(host: str) -> bool:
    """Return True if a host name has only loopback addresses, or none, so other machines can't reach it."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True
    return all(address[0].startswith("127.") or address[0] == "::1" for *_, address in found)
