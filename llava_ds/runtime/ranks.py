"""The ranks of a run, and collectives that share values, errors and access to files."""

import contextlib
import io
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from llava_ds.constants import ConfigError, DataError
from llava_ds.runtime.output import (
    DETAILS,
    exit_for_bad_input,
    exit_for_failure,
    print_details,
    print_first,
    printable,
)

__all__ = [
    "exit_for_bad_input",
    "exit_for_failure",
    "print_details",
    "print_first",
    "printable",
]  # from llava_ds/runtime/output.py

T = TypeVar("T")

SHARED_WAIT_S = 90.0  # network file systems take up to a minute to show a new file to other machines


@dataclass(frozen=True)
class Ranks:
    """This process's rank in the run, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    patient_group: torch.distributed.ProcessGroup | None = None  # for waits on rank 0's files; None for a single rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def local_ranks() -> int:
    """Return the number of ranks on this machine, from the launcher's variables."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def address_towards(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and address of this machine on the route to a host. Raises OSError without a route."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only looks up the route
        return family, probe.getsockname()[0]


def check_same(values: dict[str, object], ranks: Ranks, remedy: str) -> None:
    """Raise ConfigError on every rank if a named value differs between ranks. Collective."""
    everyone = gather(values, ranks)
    problems = []
    for name in dict.fromkeys(name for each in everyone for name in each):
        held: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            held.setdefault(json.dumps(each.get(name), default=str, sort_keys=True), []).append(rank)
        if len(held) > 1:
            found = "; ".join(f"{value} on {format_ranks(holders)}" for value, holders in held.items())
            problems.append(f"{name} differs between ranks: {found}")
    if problems:
        raise ConfigError("\n".join([*problems, remedy]))


def format_ranks(ranks: list[int]) -> str:
    """Format ranks as text: "ranks 0-7, 12"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def check_shared_folder(folder: Path, flag: str, ranks: Ranks, wait_s: float = SHARED_WAIT_S) -> None:
    """Create the folder and a file in it on rank 0, and check that every rank sees the file. Collective.

    Raises ConfigError on every rank if one does not see it within `wait_s` seconds.
    """
    if ranks.world_size == 1:
        return
    token = secrets.token_hex(8) if ranks.is_first else ""

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".shared-{token}").touch()
        return f".shared-{token}"

    name = broadcast_from_first(ranks, write)
    deadline = time.monotonic() + wait_s
    while not (seen := folder.is_dir() and name in os.listdir(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(gather(seen, ranks)) if not sees]
    if ranks.is_first:
        (folder / name).unlink()
    if blind:
        raise ConfigError(
            f"{flag} {folder}: {format_ranks(blind)} of {ranks.world_size} do not see a file that rank 0 wrote there, "
            "but a checkpoint needs the files of all ranks: name a folder on a file system that all machines share, "
            "or give --save_strategy no"
        )


def barrier(ranks: Ranks) -> None:
    """Wait until every rank calls this, with the long timeout of waits for files."""
    if ranks.world_size > 1:
        torch.distributed.barrier(ranks.patient_group)


@contextlib.contextmanager
def first_rank_first(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 through first, then the first rank of every other machine, then all others.

    Ranks that come later can use cached files that earlier ranks wrote, on shared and on local disks. A ConfigError or
    DataError on one rank is raised on every rank, so no rank waits in a collective.
    """
    turn = 0 if ranks.is_first else 1 if ranks.local_rank == 0 else 2
    for _ in range(turn):
        _share_error(None, ranks)
    try:
        yield
    except (ConfigError, DataError) as error:
        _share_error(error, ranks)
        raise
    for _ in range(turn, 3):
        _share_error(None, ranks)


def broadcast_from_first(ranks: Ranks, compute: Callable[[], T]) -> T:
    """Call the function on rank 0, and return its value on every rank. Raises its ConfigError or DataError on all."""
    if ranks.world_size == 1:
        return compute()
    answer: list[object] = [None]
    with first_rank_first(ranks):
        if ranks.is_first:
            answer[0] = compute()
    torch.distributed.broadcast_object_list(answer, src=0, group=ranks.patient_group)
    return answer[0]


def on_every_rank(ranks: Ranks, compute: Callable[[], T]) -> T:
    """Call the function on every rank, and return this rank's value. Collective.

    A ConfigError or DataError on one rank is raised on all ranks, with the name of its machine.
    """
    answer, problem = None, None
    try:
        answer = compute()
    except (ConfigError, DataError) as error:
        problem = error
    found = gather((socket.gethostname(), problem), ranks)
    first = next((rank for rank, (_, error) in enumerate(found) if error is not None), None)
    if first is None:
        return answer
    host, error = found[first]
    everywhere = all(str(other) == str(error) for _, other in found)
    raise error if everywhere else type(error)(f"rank {first} on {host}: {error}")


def gather(value: T, ranks: Ranks) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank. Collective."""
    if ranks.world_size == 1:
        return [value]
    values: list[T] = [value] * ranks.world_size
    torch.distributed.all_gather_object(values, value, group=ranks.patient_group)
    return values


def _share_error(error: Exception | None, ranks: Ranks) -> None:
    """Exchange errors at the end of a turn: ranks without an error raise the first rank's error. Collective."""
    everyone = gather((error, socket.gethostname()), ranks)
    if error is not None:
        return  # the caller raises this rank's error
    for rank, (met, host) in enumerate(everyone):
        if met is not None:
            raise met if rank == 0 else type(met)(f"on rank {rank} ({host}): {met}")


def quiet_libraries(verbose: bool = False) -> None:
    """Silence print_details and the start-up messages of DeepSpeed and transformers, but not warnings and errors.

    Python's warnings are printed by rank 0 only, because all ranks have the same. verbose: silence nothing.
    """
    import logging
    import warnings

    import transformers

    # One process per core tokenizes, so additional threads would only compete for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    DETAILS.setLevel(logging.INFO if verbose else logging.WARNING)
    if verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.INFO)
        transformers.logging.set_verbosity_info()
        return
    if int(os.environ.get("RANK", "0")) != 0:
        warnings.simplefilter("ignore")
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # bitsandbytes 0.50, imported by peft, warns about a CPU kernel package that --bits does not need.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


class _LogFile(io.TextIOBase):
    """Stream for tqdm if stderr is not a terminal: prints each state of the bar as a line, and clears none."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)


def progress_bar(**options) -> tqdm:
    """Return a tqdm bar, shown on rank 0 only; without a terminal, it prints a line every ten seconds."""
    silent = int(os.environ.get("RANK", "0")) != 0
    where = {"mininterval": 0.2} if sys.stderr.isatty() else {"mininterval": 10.0, "file": _LogFile()}
    return tqdm(**{"disable": silent, "dynamic_ncols": True, **where, **options})
