"""Start-up of the ranks, sums over them, and speaking once."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from tqdm import tqdm

from llava_ds.constants import EXIT_BAD_INPUT, ConfigError, DataError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those that train together, and the device it uses."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    patient_group: torch.distributed.ProcessGroup | None = None  # for waits on rank 0's files; None where alone

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def init_ranks() -> Ranks:
    """Join the process group (NCCL on GPUs, gloo on CPU) and choose this rank's device.

    Reads the variables that deepspeed's launcher and torchrun set; without them, a group of one.
    Raises ConfigError when other variables announce several processes.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:
        _refuse_unannounced_ranks()
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(_free_port())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        _use_gloo_without_compiling(accelerator)
        if "OMP_NUM_THREADS" not in os.environ:
            # Two ranks with every core each would run slower than one: share the cores out.
            local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        device = torch.device("cpu")
    else:
        accelerator.set_device(local_rank)
        device = torch.device(accelerator.device_name(local_rank))
    deepspeed.init_distributed(verbose=False)
    # Waits for rank 0's reading and writing may last longer than a collective of training may (10 minutes).
    patient = torch.distributed.new_group(backend="gloo", timeout=timedelta(hours=12))
    return Ranks(torch.distributed.get_rank(), local_rank, torch.distributed.get_world_size(), device, patient)


def _refuse_unannounced_ranks() -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if int(os.environ.get(name, "1")) > 1:
            raise ConfigError(
                f"{name} is {os.environ[name]}, but RANK is not set: each process would train by itself. Start with "
                "deepspeed or torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )


def _use_gloo_without_compiling(accelerator) -> None:
    """Keep DeepSpeed from building its shared-memory collective, which needs a C++ compiler and gains nothing here.

    DeepSpeed 0.19 has no public switch: init_distributed asks this private table whether the op may be built.
    """
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__[accelerator.create_op_builder("ShareMemCommBuilder").NAME] = False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks, in place."""
    torch.distributed.all_reduce(values)
    return values


def barrier(ranks: Ranks) -> None:
    """Wait until every rank is here, for as long as reading or writing files takes."""
    if ranks.world_size > 1:
        torch.distributed.barrier(ranks.patient_group)


@contextlib.contextmanager
def first_rank_first(ranks: Ranks) -> Iterator[None]:
    """Let rank 0 through first: what it writes to a cache, the others find there.

    An error of the user's that it meets is raised on every rank, so that none is left in a collective.
    """
    if not ranks.is_first:
        _share_error(None, ranks)
        yield
        return
    try:
        yield
    except (ConfigError, DataError) as error:
        _share_error(error, ranks)
        raise
    _share_error(None, ranks)


def from_first(ranks: Ranks, ask: Callable[[], T]) -> T:
    """What rank 0 answers, on every rank; an error that it meets is raised on every rank."""
    if ranks.world_size == 1:
        return ask()
    answer: list[object] = [None]
    with first_rank_first(ranks):
        if ranks.is_first:
            answer[0] = ask()
    torch.distributed.broadcast_object_list(answer, src=0, group=ranks.patient_group)
    return answer[0]


def gather(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in the ranks' order, on all of them. All ranks call it together."""
    if ranks.world_size == 1:
        return [value]
    values: list[T] = [value] * ranks.world_size
    torch.distributed.all_gather_object(values, value, group=ranks.patient_group)
    return values


def _share_error(error: Exception | None, ranks: Ranks) -> None:
    """Tell the other ranks (called on rank 0), or be told and raise (called on the others)."""
    shared = [error]
    torch.distributed.broadcast_object_list(shared, src=0, group=ranks.patient_group)
    if error is None and shared[0] is not None:
        raise shared[0]


def quiet_libraries() -> None:
    """Hold back what DeepSpeed and transformers say at every start; errors, and DeepSpeed's warnings, remain."""
    import logging
    import warnings

    import transformers

    # DeepSpeed 0.19 calls collectives by names that torch 2.13 calls old.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    transformers.logging.set_verbosity_error()
    # One process per core tokenizes; threads below each of them would only get in each other's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.disable_progress_bar()


def progress_bar(**options) -> tqdm:
    """A tqdm bar on rank 0, silent elsewhere; where no person watches, a line every ten seconds."""
    silent = int(os.environ.get("RANK", "0")) != 0
    interval_s = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(**{"disable": silent, "mininterval": interval_s, "dynamic_ncols": True, **options})


def printable(text: str, keep: str = "") -> str:
    """The text with every character that a terminal may take as a command, beside those to keep, spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def print_first(*lines: str) -> None:
    """Print from rank 0 only; works before the process group exists. No line can steer the terminal."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(*(printable(line, keep="\n\t") for line in lines), sep="\n", flush=True)


def exit_for_bad_input(error: Exception, program: str) -> None:
    """Say once what is wrong with the user's input and leave with exit code 2.

    The other ranks usually found the same: they wait to be ended by the launcher, and speak up only if they are not.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(5.0)
    where = "" if rank == 0 else f" (rank {rank})"
    message = printable(str(error), keep="\n\t")
    print(f"{program}: error{where}: {message}", file=sys.stderr, flush=True)
    # Not sys.exit: other ranks may be inside a collective, and the interpreter's clean-up would wait for them.
    sys.stdout.flush()
    os._exit(EXIT_BAD_INPUT)
