"""Check the machine: devices, memory, disks, limits, and the network between ranks."""

import contextlib
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llava_ds.extensions.doctor.requirements import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Requirements,
    output_of,
)
from llava_ds.files.writing import can_be_made, nearest_folder
from llava_ds.runtime.launchers import is_loopback_name

GIB = 2**30
ENOUGH_SHARED_BYTES = 2 * GIB  # for images from loader workers, and NCCL's buffers
ENOUGH_MEMORY_BYTES = 4 * GIB
ENOUGH_DISK_BYTES, LEAST_DISK_BYTES = 20 * GIB, GIB // 4
ENOUGH_FILES = 4096
BUSY_PART = 0.1  # share of a GPU's memory that other processes may use without a warning


def check_devices(required: Requirements) -> Iterator[Finding]:
    import torch

    seen = (output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    if not torch.cuda.is_available():
        yield Finding(OK, f"no GPU that torch can use: ranks train on the CPU ({os.cpu_count()} cores)")
        if seen and torch.version.cuda is None:
            found = f"this machine has GPUs ({seen[0]}), but torch is a build for CPU"
            yield Finding(WARNING, found, "install torch's CUDA build to use them")
        elif seen:
            found = f"this machine has GPUs ({seen[0]}), but torch does not see them"
            remedy = (
                f"install a driver for CUDA {torch.version.cuda} or newer, and unset CUDA_VISIBLE_DEVICES or name "
                "them in it"
            )
            yield Finding(WARNING, found, remedy)
        return
    if (accelerator := os.environ.get("DS_ACCELERATOR", "cuda")) != "cuda":
        yield Finding(WARNING, f"DS_ACCELERATOR is {accelerator}: the GPUs are not used", "unset DS_ACCELERATOR")
    names = set()
    for i in range(torch.cuda.device_count()):
        gpu, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        names.add(gpu.name)
        found = f"GPU {i}: {gpu.name}, {total / GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        yield Finding(OK, f"{found}, {'bf16' if gpu.major >= 8 else 'no bf16'}")
        if 1 - free / total > BUSY_PART:
            found = f"GPU {i}: other processes hold {(total - free) / GIB:.0f} of {total / GIB:.0f} GiB"
            yield Finding(WARNING, found, "nvidia-smi names the processes; choose with CUDA_VISIBLE_DEVICES")
    if len(names) > 1:
        yield Finding(WARNING, "the GPUs differ: all wait for the slowest", "choose with CUDA_VISIBLE_DEVICES")
    if seen:
        yield Finding(OK, f"driver {seen[0].rpartition(', ')[2]}, torch for CUDA {torch.version.cuda}")


def check_memory(required: Requirements) -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    limit = _read_number("/sys/fs/cgroup/memory.max")
    if limit is not None and limit < total:  # a container's own limit
        total, available = limit, min(available, limit - (_read_number("/sys/fs/cgroup/memory.current") or 0))
    found = f"{available / GIB:.0f} of {total / GIB:.0f} GiB available"
    if available < ENOUGH_MEMORY_BYTES:
        yield Finding(WARNING, found, "end other processes, or raise the container's limit")
    else:
        yield Finding(OK, found)


def check_limits(required: Requirements) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, unlimited = _locked_limit(), resource.RLIM_INFINITY
    yield Finding(OK, f"{files} open files, {'any' if locked is None else f'{locked // 1024} KiB of'} locked memory")
    if files != unlimited and files < ENOUGH_FILES:
        found = f"{files} open files: every tensor from a loader worker takes one"
        yield Finding(WARNING, found, f"ulimit -n {ENOUGH_FILES if most == unlimited else min(most, 65536)}")
    if locked is not None and _has_rdma():
        yield _little_locked(locked, "InfiniBand")


def _has_rdma() -> bool:
    return Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())


def _locked_limit() -> int | None:
    """Return the bytes that a process may pin; None if unlimited."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if locked == resource.RLIM_INFINITY else locked


def _little_locked(locked: int, why: str) -> Finding:
    found = f"{locked // 1024} KiB of locked memory: {why} pins more"
    return Finding(WARNING, found, "ulimit -l unlimited (docker run --ulimit memlock=-1)")


def check_shared_memory(required: Requirements, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        found = f"{folder} is missing or can't be written to: processes can't share images"
        yield Finding(PROBLEM, found, f"mount a tmpfs at {folder}")
        return
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.2f} GiB free in {folder}"
    if free < ENOUGH_SHARED_BYTES:
        remedy = "docker run --shm-size=16g or --ipc=host; with --dataloader_num_workers 0, images need none"
        yield Finding(WARNING, f"{found}: loader workers or NCCL may die with a bus error", remedy)
    else:
        yield Finding(OK, found)


def check_disks(required: Requirements) -> Iterator[Finding]:
    for flag, folder in (("--output_dir", required.output_dir), ("--cache_dir", required.cache_dir)):
        if not can_be_made(str(folder)):
            yield Finding(PROBLEM, f"{flag} {folder} can't be written to", "name another folder")
            continue
        free = shutil.disk_usage(nearest_folder(folder)).free
        found, remedy = f"{flag} {folder}: {free / GIB:.1f} GiB free", "name a folder on another disk"
        if free >= ENOUGH_DISK_BYTES:
            yield Finding(OK, found)
            continue
        if flag == "--output_dir":
            found += "; a checkpoint takes up to 12 bytes per trained parameter"
            remedy += ", or keep fewer checkpoints (--save_total_limit)"
        yield Finding(PROBLEM if free < LEAST_DISK_BYTES else WARNING, found, remedy)


def check_nvme(required: Requirements) -> Iterator[Finding]:
    """Check that DeepSpeed can use the JSON's offload folders: it needs O_DIRECT, free space and locked memory."""
    if required.config_problems:
        yield Finding(WARNING, "not checked, because the configuration can't be used")
        return
    for folder, key in required.nvme_paths.items():
        nearest = nearest_folder(folder)
        if not _opens_directly(nearest):
            found = f"{key} {folder}: its file system refuses O_DIRECT, but DeepSpeed needs it to read and write"
            yield Finding(PROBLEM, found, "name a folder on a local disk (ext4, xfs)")
            continue
        free = shutil.disk_usage(nearest).free
        level, remedy = (WARNING, "name a folder on a larger disk") if free < ENOUGH_DISK_BYTES else (OK, "")
        yield Finding(level, f"{key} {folder}: {free / GIB:.1f} GiB free", remedy)
    if not required.nvme_paths:
        yield Finding(OK, "nothing is offloaded to it")
    elif (locked := _locked_limit()) is not None:
        yield _little_locked(locked, "offload to NVMe")


def check_network(required: Requirements) -> Iterator[Finding]:
    """Check the names, interfaces and variables that ranks on several machines use to connect."""
    host, present = socket.gethostname(), [name for _, name in socket.if_nameindex()]
    listed = ", ".join(present)
    yield Finding(OK, f"{host}, interfaces {listed}")
    if is_loopback_name(host) and len(present) > 1:
        found = f"{host} resolves to no address that other machines reach: on several, gloo uses the route to rank 0"
        yield Finding(WARNING, found, f"give {host} its address in /etc/hosts, or set GLOO_SOCKET_IFNAME ({listed})")
    gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
    # NCCL matches prefixes of interface names. A leading = means exact names, and ^ excludes interfaces.
    exact, wanted = nccl.startswith("="), nccl.removeprefix("=").split(",")
    fits = [name for name in present if (name in wanted if exact else name.startswith(tuple(wanted)))]
    for variable, value, exists in (
        ("GLOO_SOCKET_IFNAME", gloo, set(gloo.split(",")) <= set(present)),
        ("NCCL_SOCKET_IFNAME", nccl, fits or nccl.startswith("^")),
    ):
        if value and not exists:
            found = f"{variable} is {value}, but this machine has no such interface"
            yield Finding(PROBLEM, found, f"name one of {listed}, or unset it")
    timeout = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not timeout.isdecimal() or int(timeout) == 0:
        found = f"DEEPSPEED_TIMEOUT is {timeout!r}: DeepSpeed takes whole minutes"
        yield Finding(PROBLEM, found, "export DEEPSPEED_TIMEOUT=30")


def check_backends(required: Requirements) -> Iterator[Finding]:
    """Check that torch has gloo, needed on CPUs and for waits between ranks, and NCCL if there are GPUs."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        yield Finding(PROBLEM, "this torch has no gloo", "install a build of torch with distributed and gloo")
    elif not torch.cuda.is_available():
        yield Finding(OK, "gloo")
    elif not torch.distributed.is_nccl_available():
        yield Finding(PROBLEM, "this torch has no NCCL", "install torch's CUDA build for Linux")
    else:
        yield Finding(OK, f"gloo, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")


def _opens_directly(folder: Path) -> bool:
    handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor-")
    os.close(handle)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        os.unlink(name)
    return True


def _read_number(path: str) -> int | None:
    """Return the number in a kernel file; None if the file is missing or contains "max"."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8").strip()
        return int(text) if text.isdecimal() else None
    return None
