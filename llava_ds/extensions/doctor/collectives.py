"""Test the connection between ranks: check and time every collective that training uses.

On one machine, run/doctor.py starts this. On several machines, start it like a training:
    deepspeed --hostfile hosts --module llava_ds.extensions.doctor.collectives
    srun python -m llava_ds.extensions.doctor.collectives
"""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from llava_ds.extensions.doctor.requirements import OK, PROBLEM, Finding, Requirements
from llava_ds.runtime.launchers import free_port

TIMEOUT_S = 180.0  # on a slow disk, starting two Python processes can take most of this
MARK = "collectives: "
REMEDIES = {
    "gloo": "set GLOO_SOCKET_IFNAME=lo to test the network; the machine's name must resolve to one of its "
    "own addresses",
    "nccl": "NCCL_DEBUG=INFO shows how far it gets; NCCL_P2P_DISABLE=1 tests whether the GPUs' direct path is "
    "at fault; in a container, --ipc=host and --ulimit memlock=-1 are needed",
}


def check_collective(required: Requirements) -> Iterator[Finding]:
    """Test one rank per GPU, and two CPU ranks if there are fewer than two GPUs, through the deepspeed launcher."""
    import torch

    num_gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
    if num_gpus < 2:
        yield try_collective("gloo", 2)
    if num_gpus:
        yield try_collective("nccl", num_gpus)


def try_collective(backend: str, num_ranks: int, timeout_s: float = TIMEOUT_S) -> Finding:
    """Start ranks that run main(), and return a finding with their output. Kills them after timeout_s seconds."""
    ranks = ["--num_accelerators", str(num_ranks)] if backend == "gloo" else []
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--log_level", "error"]
    command += [*ranks, "--master_port", str(free_port()), "--module", "llava_ds.extensions.doctor.collectives"]
    started = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in started}
    package = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
    environment |= {"DEEPSPEED_TIMEOUT": "2", "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu"} if backend == "gloo" else {}
    what = f"{num_ranks} rank{'s' if num_ranks > 1 else ''} over {backend}"
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # launcher and ranks have a process group of their own
        process.communicate()
        return Finding(PROBLEM, f"{what} did not end within {timeout_s:.0f} s", REMEDIES[backend])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reports = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if process.returncode == 0 and reports:
        return Finding(OK, reports[-1])
    errors = [line for line in lines if "rror" in line] or lines or ["no output"]
    return Finding(PROBLEM, f"{what} failed (exit code {process.returncode}): {errors[0]}", REMEDIES[backend])


def main() -> None:
    import torch

    from llava_ds.engine.process_group import init_ranks
    from llava_ds.runtime.ranks import gather, print_first

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # names new in torch 2.13
    ranks = init_ranks()
    num_machines = len(set(gather(socket.gethostname(), ranks)))
    backend = torch.distributed.get_backend()
    size = 2 ** (26 if backend == "nccl" else 22)  # bytes, similar to the buckets in training
    where = f"{ranks.world_size} rank{'s' if ranks.world_size > 1 else ''} on {num_machines} machine"
    times = measure(ranks.rank, ranks.world_size, ranks.device, size)
    shown = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.items())
    print_first(f"{MARK}{where}{'s' if num_machines > 1 else ''} over {backend}, {size >> 20} MiB: {shown}")
    torch.distributed.destroy_process_group()


def measure(rank: int, world_size: int, device, num_bytes: int) -> dict[str, float]:
    """Return the time of each collective in seconds, the best of three. Raises RuntimeError if a result is wrong."""
    import torch
    import torch.distributed as dist

    part = torch.arange(num_bytes // 4 // world_size, dtype=torch.float32, device=device) % 1000  # sums are exact
    whole = torch.cat([part + each for each in range(world_size)])  # rank r holds part + r
    total = world_size * (world_size - 1) / 2  # sum of the rank numbers

    own = part + rank

    def into(out: torch.Tensor, collective: Callable, *given: object) -> torch.Tensor:
        collective(out, *given)
        return out

    def send() -> torch.Tensor:  # to the next pipeline stage
        out = torch.empty_like(part)
        sent = dist.P2POp(dist.isend, own, (rank + 1) % world_size)
        received = dist.P2POp(dist.irecv, out, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        return out

    empty = torch.empty_like
    collectives: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {  # the call, and the expected result
        "all_reduce": (lambda: into(own.clone(), dist.all_reduce), part * world_size + total),
        "all_gather": (lambda: into(empty(whole), dist.all_gather_into_tensor, own), whole),
        "reduce_scatter": (lambda: into(empty(part), dist.reduce_scatter_tensor, whole.clone()), own * world_size),
        "broadcast": (lambda: into(own.clone(), dist.broadcast, 0), part),
        # used by ranks that share samples
        "all_to_all": (lambda: into(empty(whole), dist.all_to_all_single, own.repeat(world_size)), whole),
        **({"send": (send, part + (rank - 1) % world_size)} if world_size > 1 else {}),
    }
    return {name: _best_of_three(name, *collective, rank, device) for name, collective in collectives.items()}


def _best_of_three(name: str, collective: Callable, expected, rank: int, device) -> float:
    import torch

    best = float("inf")
    for _ in range(3):
        torch.distributed.barrier()
        started = time.perf_counter()
        out = collective()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    if not torch.equal(out, expected):
        raise RuntimeError(f"{name} gave rank {rank} wrong values")
    return best


if __name__ == "__main__":
    from llava_ds.constants import ConfigError
    from llava_ds.runtime.ranks import exit_for_bad_input

    try:
        main()
    except ConfigError as error:
        exit_for_bad_input(error, "llava_ds.extensions.doctor.collectives")
