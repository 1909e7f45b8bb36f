"""Join the process group, take this rank's device, and check that all ranks run the same versions."""

import hashlib
import importlib.metadata
import os
import resource
import socket
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from llava_ds import __version__
from llava_ds.constants import ConfigError
from llava_ds.runtime.launchers import is_loopback_name, rank_variables
from llava_ds.runtime.output import print_first
from llava_ds.runtime.ranks import Ranks, address_towards, check_same, local_ranks

MOST_IN_A_MESH = 64  # up to this many ranks, gloo groups connect all pairs at once
NUM_GLOO_GROUPS = 4  # on the CPU: torch's default group, DeepSpeed's clone of it, patient_group and Stopping's
OTHER_DESCRIPTORS = 512  # for files, worker processes and libraries
DESCRIPTORS = 65536  # limit to set for a process, if the system allows it


def init_ranks() -> Ranks:
    """Join the process group (NCCL on GPUs, gloo on CPU) and choose this rank's device.

    Reads the environment variables that deepspeed's launcher, torchrun, srun and mpirun set; without them, makes a
    group of one rank. Raises ConfigError if the variables are incomplete, the ranks do not connect, a rank has no
    device of its own, or the ranks run different versions.
    """
    import deepspeed  # not at the top, because importing it takes seconds and prints
    from deepspeed.accelerator import get_accelerator

    started_by_srun = "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ
    variables, note = rank_variables(os.environ)
    os.environ.update(variables)
    if note is not None:
        print_first(note)
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = local_ranks()
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        use_gloo_without_compiling(accelerator)
        if "OMP_NUM_THREADS" not in os.environ:
            # Two ranks that both use every core would run slower than one: divide the cores.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        device = torch.device("cpu")
    else:
        index = device_index(local_rank, accelerator.device_count(), started_by_srun)
        os.environ["LOCAL_RANK"] = str(index)  # DeepSpeed uses it as the device's number
        accelerator.set_device(index)
        device = torch.device(accelerator.device_name(index))
    prepare_connections(int(os.environ["WORLD_SIZE"]))
    if int(os.environ["WORLD_SIZE"]) > local_size:
        _choose_gloo_interface(os.environ["MASTER_ADDR"])
    try:
        deepspeed.init_distributed(verbose=False)
        # Rank 0 may read or write for longer than the timeout of training's collectives (10 minutes).
        patient = torch.distributed.new_group(backend="gloo", timeout=timedelta(hours=12))
    except RuntimeError as error:
        # Rank 0 does not answer, its port is taken, or ranks are missing. Gloo has no error type of its own.
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error).lower():
            raise
        raise ConfigError(_missing_ranks_message(error)) from error
    ranks = Ranks(torch.distributed.get_rank(), local_rank, torch.distributed.get_world_size(), device, patient)
    check_same(_versions(), ranks, "install the same on every machine: pip install -c constraints.txt -e .")
    return ranks


def use_gloo_without_compiling(accelerator) -> None:
    """Keep DeepSpeed from building its shared-memory collectives: they need a C++ compiler and are no faster here.

    DeepSpeed 0.19 has no public switch; init_distributed looks up in __compatible_ops__ whether the op can be built.
    """
    from deepspeed.ops import __compatible_ops__  # probes the ops on first access

    __compatible_ops__[accelerator.create_op_builder("ShareMemCommBuilder").NAME] = False


def prepare_connections(world_size: int) -> None:
    """Raise this process's limit on file descriptors as far as allowed, so that it can connect to the other ranks.

    With more than MOST_IN_A_MESH ranks, gloo is told to connect two ranks only when they first communicate. Its rings
    and trees then need about log2(ranks) connections per rank. Raises ConfigError if the limit is still too low.
    """
    per_group = world_size
    if world_size > MOST_IN_A_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if os.environ.get("TORCH_GLOO_LAZY_INIT") == "1":
        per_group = min(world_size, 8 + 4 * world_size.bit_length())
    # Rank 0 serves torch's store to every rank; any rank may run on rank 0's machine.
    needed = OTHER_DESCRIPTORS + 2 * world_size + NUM_GLOO_GROUPS * per_group
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, max(DESCRIPTORS, needed))
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"{socket.gethostname()} allows a process {soft:,} open files (ulimit -Hn), but the connections of "
            f"{world_size:,} ranks need up to {needed:,}: raise the limit (LimitNOFILE= of the service that starts the "
            "ranks, nofile in /etc/security/limits.conf, --ulimit nofile= of a container)"
        )


def device_index(local_rank: int, num_devices: int, started_by_srun: bool) -> int:
    """Return the index of a rank's device. Raises ConfigError if the machine shows too few devices."""
    if local_rank < num_devices:
        return local_rank
    if started_by_srun and num_devices == 1:
        return 0  # srun --gpus-per-task=1 shows every task only its own GPU
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    raise ConfigError(
        f"LOCAL_RANK is {local_rank}, but {socket.gethostname()} shows {num_devices} GPUs{seen}: start one rank per "
        "GPU (slots= in the hostfile, deepspeed --num_gpus, torchrun --nproc-per-node, srun --ntasks-per-node)"
    )


def _choose_gloo_interface(master_addr: str) -> None:
    """Let gloo use the network interface that leads to rank 0, if this machine's name resolves to a loopback address.

    Gloo binds to the address to which the host name resolves. In Debian's /etc/hosts this is 127.0.1.1, which other
    machines can't reach. Raises ConfigError if the user chose an interface that does not exist.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    present = [name for _, name in socket.if_nameindex()]
    if chosen is not None and not set(chosen.split(",")) <= set(present):
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME is {chosen}, but {socket.gethostname()} has the interfaces {', '.join(present)}: name "
            "one that leads to the other machines, or unset it"
        )
    if chosen is not None or not is_loopback_name(socket.gethostname()):
        return
    try:
        _, own = address_towards(master_addr)
    except OSError:
        return  # connecting to rank 0 will fail, with a message
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == own for each in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _missing_ranks_message(error: Exception) -> str:
    """Return the message for ranks that did not connect."""
    env = os.environ
    reason = str(error).strip().splitlines()[0]
    if any(sign in str(error).lower() for sign in ("eaddrinuse", "address already in use")):
        return (
            f"port {env['MASTER_PORT']} on {socket.gethostname()} is taken, by another run or by running ranks of an "
            "earlier one: give another port, by --master_port for deepspeed, --master-port for torchrun, "
            f"MASTER_PORT for srun and mpirun ({reason})"
        )
    return (
        f"rank {env['RANK']} of {env['WORLD_SIZE']}, on {socket.gethostname()}, did not meet the others at "
        f"{env['MASTER_ADDR']}:{env['MASTER_PORT']} ({reason}): start all machines within DEEPSPEED_TIMEOUT minutes "
        f"(now {env.get('DEEPSPEED_TIMEOUT', '10')}), with the same address, port and number of ranks; the address "
        "must be one by which the others reach the first machine, and the port (--master_port, MASTER_PORT) free there"
    )


def _versions() -> dict[str, object]:
    """Return the versions that must be equal on all machines."""
    package = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "llava_ds": f"{__version__} (source {source.hexdigest()[:10]})",
        "python": "{}.{}".format(*sys.version_info),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in ("deepspeed", "transformers")},
    }
