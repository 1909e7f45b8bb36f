"""Checks of the machine: devices, memory, disks, limits, and the network between ranks."""

import contextlib
import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path

from llava_ds.doctor.requirements import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Requirements,
    nearest_folder,
    output_of,
)
from llava_ds.files.writing import can_be_made
from llava_ds.runtime.launchers import is_loopback_name

GIB = 2**30
ENOUGH_SHARED_BYTES = 2 * GIB  # images on their way from loader workers, and NCCL's buffers
ENOUGH_MEMORY_BYTES = 4 * GIB
ENOUGH_DISK_BYTES, LEAST_DISK_BYTES = 20 * GIB, GIB // 4
ENOUGH_FILES = 4096
BUSY_PART = 0.1  # of a GPU's memory that other processes may use without a warning


def check_devices(required: Requirements) -> list[Finding]:
    import torch

    driver = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    findings = []
    if not torch.cuda.is_available():
        findings.append(Finding(OK, f"no GPU that torch can use: ranks train on the CPU ({os.cpu_count()} cores)"))
        if driver and torch.version.cuda is None:
            found = f"this machine has GPUs ({driver.splitlines()[0]}), but torch is a build for CPU"
            findings.append(Finding(WARNING, found, "install torch's CUDA build to use them"))
        elif driver:
            found = f"this machine has GPUs ({driver.splitlines()[0]}), but torch does not see them"
            remedy = f"a driver for CUDA {torch.version.cuda} or newer, and CUDA_VISIBLE_DEVICES unset or naming them"
            findings.append(Finding(WARNING, found, remedy))
        return findings
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        found = f"DS_ACCELERATOR is {os.environ['DS_ACCELERATOR']}: the GPUs are not used"
        findings.append(Finding(WARNING, found, "unset DS_ACCELERATOR"))
    names = set()
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        names.add(properties.name)
        capability = f"{properties.major}.{properties.minor}"
        bf16 = properties.major >= 8
        found = f"GPU {i}: {properties.name}, {total / GIB:.0f} GiB, compute capability {capability}"
        findings.append(Finding(OK, f"{found}, {'bf16' if bf16 else 'no bf16'}"))
        if 1 - free / total > BUSY_PART:
            found = f"GPU {i}: others hold {(total - free) / GIB:.0f} of {total / GIB:.0f} GiB"
            findings.append(Finding(WARNING, found, "nvidia-smi names the processes; choose with CUDA_VISIBLE_DEVICES"))
    if len(names) > 1:
        findings.append(
            Finding(WARNING, "the GPUs differ: all wait for the slowest", "choose with CUDA_VISIBLE_DEVICES")
        )
    seen = (driver or "").splitlines()
    if seen:
        findings.append(Finding(OK, f"driver {seen[0].rpartition(', ')[2]}, torch for CUDA {torch.version.cuda}"))
    return findings


def check_memory(required: Requirements) -> list[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    available, total = memory.available, memory.total
    limit = _read_number("/sys/fs/cgroup/memory.max")
    if limit is not None and limit < total:  # a container's own limit
        total, available = limit, min(available, limit - (_read_number("/sys/fs/cgroup/memory.current") or 0))
    found = f"{available / GIB:.0f} of {total / GIB:.0f} GiB available"
    if available < ENOUGH_MEMORY_BYTES:
        return [Finding(WARNING, found, "end other processes, or raise the container's limit")]
    return [Finding(OK, found)]


def check_limits(required: Requirements) -> list[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = _locked_limit()
    unlimited = resource.RLIM_INFINITY
    findings = [
        Finding(OK, f"{files} open files, {'any' if locked is None else f'{locked // 1024} KiB of'} locked memory")
    ]
    if files != unlimited and files < ENOUGH_FILES:
        found = f"{files} open files: every tensor from a loader worker takes one"
        findings.append(Finding(WARNING, found, f"ulimit -n {ENOUGH_FILES if most == unlimited else min(most, 65536)}"))
    if locked is not None and _has_rdma():
        findings.append(_little_locked(locked, "InfiniBand"))
    return findings


def _has_rdma() -> bool:
    return Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())


def _locked_limit() -> int | None:
    """Bytes that a process may pin; None for no limit."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if locked == resource.RLIM_INFINITY else locked


def _little_locked(locked: int, why: str) -> Finding:
    found = f"{locked // 1024} KiB of locked memory: {why} pins more"
    return Finding(WARNING, found, "ulimit -l unlimited (docker run --ulimit memlock=-1)")


def check_shared_memory(required: Requirements, folder: Path = Path("/dev/shm")) -> list[Finding]:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        found = f"{folder} is missing or can't be written to: processes have no way to share images"
        return [Finding(PROBLEM, found, f"mount a tmpfs at {folder}")]
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.2f} GiB free in {folder}"
    if free < ENOUGH_SHARED_BYTES:
        remedy = "docker run --shm-size=16g or --ipc=host; --dataloader_num_workers 0 needs none for images"
        return [Finding(WARNING, f"{found}: loader workers or NCCL may die with a bus error", remedy)]
    return [Finding(OK, found)]


def check_disks(required: Requirements) -> list[Finding]:
    findings = []
    for flag, folder in (("--output_dir", required.output_dir), ("--cache_dir", required.cache_dir)):
        if not can_be_made(str(folder)):
            findings.append(Finding(PROBLEM, f"{flag} {folder} can't be written to", "name another folder"))
            continue
        free = shutil.disk_usage(nearest_folder(folder)).free
        found = f"{flag} {folder}: {free / GIB:.1f} GiB free"
        if free < ENOUGH_DISK_BYTES:
            level = PROBLEM if free < LEAST_DISK_BYTES else WARNING
            remedy = "name a folder on another disk"
            if flag == "--output_dir":
                found += "; a checkpoint takes up to 12 bytes per trained parameter"
                remedy += ", or keep fewer checkpoints (--save_total_limit)"
            findings.append(Finding(level, found, remedy))
        else:
            findings.append(Finding(OK, found))
    return findings


def check_nvme(required: Requirements) -> list[Finding]:
    """Check the folders that the JSON offloads to, in which DeepSpeed bypasses the page cache."""
    if required.config_problems:
        return [Finding(WARNING, "not checked, because the configuration can't be used")]
    findings = []
    for text, key in required.nvme_paths.items():
        folder = Path(text)
        if not _opens_directly(nearest_folder(folder)):
            found = f"{key} {folder}: its file system refuses O_DIRECT, which DeepSpeed's reading and writing needs"
            findings.append(Finding(PROBLEM, found, "name a folder on a local disk (ext4, xfs)"))
        else:
            free = shutil.disk_usage(nearest_folder(folder)).free
            level = WARNING if free < ENOUGH_DISK_BYTES else OK
            remedy = "" if level == OK else "name a folder on a larger disk"
            findings.append(Finding(level, f"{key} {folder}: {free / GIB:.1f} GiB free", remedy))
    locked = _locked_limit()
    if required.nvme_paths and locked is not None:
        findings.append(_little_locked(locked, "offload to NVMe"))
    return findings or [Finding(OK, "nothing is offloaded to it")]


def check_network(required: Requirements) -> list[Finding]:
    """Check the names, interfaces and variables by which ranks of several machines connect."""
    host, present = socket.gethostname(), [name for _, name in socket.if_nameindex()]
    findings = [Finding(OK, f"{host}, interfaces {', '.join(present)}")]
    if is_loopback_name(host) and len(present) > 1:
        found = f"{host} resolves to no address that other machines reach: with several, gloo gets the way to rank 0"
        remedy = f"give {host} its address in /etc/hosts, or set GLOO_SOCKET_IFNAME ({', '.join(present)})"
        findings.append(Finding(WARNING, found, remedy))
    gloo = os.environ.get("GLOO_SOCKET_IFNAME")
    if gloo is not None and not set(gloo.split(",")) <= set(present):
        findings.append(_no_such_interface("GLOO_SOCKET_IFNAME", gloo, present))
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    # NCCL takes beginnings of names; = before them takes whole names, ^ leaves them out.
    wanted = nccl.removeprefix("=").split(",")
    exact = nccl.startswith("=")
    if nccl and not nccl.startswith("^"):
        fits = [name for name in present if any(name == w if exact else name.startswith(w) for w in wanted)]
        if not fits:
            findings.append(_no_such_interface("NCCL_SOCKET_IFNAME", nccl, present))
    timeout = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    if not timeout.isdecimal() or int(timeout) == 0:
        found = f"DEEPSPEED_TIMEOUT is {timeout!r}: DeepSpeed takes whole minutes"
        findings.append(Finding(PROBLEM, found, "export DEEPSPEED_TIMEOUT=30"))
    return findings


def _no_such_interface(variable: str, value: str, present: list[str]) -> Finding:
    found = f"{variable} is {value}, and there is no such interface"
    return Finding(PROBLEM, found, f"name one of {', '.join(present)}, or unset it")


def check_backends(required: Requirements) -> list[Finding]:
    """Check the backends of collectives: gloo on CPUs and for waits, NCCL on GPUs."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return [Finding(PROBLEM, "this torch has no gloo", "install a build of torch with distributed and gloo")]
    if not torch.cuda.is_available():
        return [Finding(OK, "gloo")]
    if not torch.distributed.is_nccl_available():
        return [Finding(PROBLEM, "this torch has no NCCL", "install torch's CUDA build for Linux")]
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return [Finding(OK, f"gloo, NCCL {version}")]


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
    """The number in one of the kernel's files; None if there is no such file, or it says max."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8").strip()
        return int(text) if text.isdecimal() else None
    return None
