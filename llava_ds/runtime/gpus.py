"""The vendors' figures for GPUs, used by MFU and by the speed estimate.

Source, unless a comment on the line names another: NVIDIA's data sheets and architecture whitepapers (B200: HGX B200;
Hopper: H100, H200, H20; Ampere: A100, A800, A30, A40, A10, RTX A6000, GA102; Ada: L4, L40, L40S, RTX 6000 Ada, AD102;
RTX Blackwell; Volta: V100; Turing: T4). Tensor-core figures are dense (a data sheet's "with sparsity" figure is twice
as much) with fp32 accumulation; GeForce cards do half as many with it.
"""

import re
from dataclasses import dataclass

from llava_ds.constants import ConfigError

PCIE3, PCIE4, PCIE5 = 16.0, 32.0, 64.0  # GB/s of 16 lanes, one way


@dataclass(frozen=True)
class Gpu:
    """A GPU's figures. name: its name in --gpu. pattern: matches the whole name from torch, without "NVIDIA ".

    half: TFLOP/s in bf16, or in fp16 if it lacks bf16. tf32: TFLOP/s, None if it lacks TF32. fp32: TFLOP/s without
    tensor cores. memory: GB. bandwidth: GB/s of the memory. link: one-way GB/s of NVLink to all GPUs of the node
    together; None for PCIe, even if NVLink bridges join pairs of cards. pcie: one-way GB/s to the CPU. matmul: measured
    fraction of `half` that the fastest matrix products reach, None if unknown. network: Gbit/s of all network cards in
    the vendor's 8-GPU node, None without such a node.
    """

    name: str
    pattern: str
    half: float
    tf32: float | None
    fp32: float
    memory: float
    bandwidth: float
    link: float | None
    pcie: float
    matmul: float | None = None
    network: float | None = None


# matmul: Bekman, Machine Learning Engineering, "Maximum Achievable Matmul FLOPS comparison table" (bf16).
# Patterns are tried in this order.
GPUS = (
    Gpu("b200", r"(GB200|B200).*", 2250, 1125, 75, 180, 8000, 900, PCIE5, 0.776, 3200),
    Gpu("h100-pcie", r"(H100|H800) PCIe.*", 756, 378, 51.2, 80, 2039, None, PCIE5),
    Gpu("h100-nvl", r"H100 NVL.*", 835, 417.5, 60, 94, 3938, None, PCIE5),
    Gpu("h200-nvl", r"H200 NVL.*", 835.5, 418, 60, 141, 4800, None, PCIE5),
    Gpu("gh200", r"GH200.*", 989.4, 494.7, 66.9, 96, 4000, None, 450, 0.83),  # pcie: the CPU is connected by NVLink-C2C
    Gpu("h200", r"H200.*", 989.4, 494.7, 66.9, 141, 4800, 450, PCIE5, 0.803, 3200),
    Gpu("h800", r"H800.*", 989.4, 494.7, 66.9, 80, 3350, 200, PCIE5, None, 3200),
    Gpu("h100", r"H100.*", 989.4, 494.7, 66.9, 80, 3350, 450, PCIE5, 0.803, 3200),
    Gpu("h20", r"H20", 148, 74, 44, 96, 4000, 450, PCIE5, None, 3200),
    Gpu("a100-40gb-pcie", r"A100-PCIE-40GB", 312, 156, 19.5, 40, 1555, None, PCIE4, 0.822),
    Gpu("a100-80gb-pcie", r"A100 80GB PCIe|A100-PCIE-80GB", 312, 156, 19.5, 80, 1935, None, PCIE4, 0.822),
    Gpu("a100-40gb", r"A100.*40GB", 312, 156, 19.5, 40, 1555, 300, PCIE4, 0.859, 1600),
    Gpu("a100-80gb", r"A100.*", 312, 156, 19.5, 80, 2039, 300, PCIE4, 0.859, 1600),
    Gpu("a800", r"A800.*", 312, 156, 19.5, 80, 2039, 200, PCIE4, None, 1600),
    Gpu("a30", r"A30", 165, 82, 10.3, 24, 933, None, PCIE4),
    Gpu("a40", r"A40", 149.7, 74.8, 37.4, 48, 696, None, PCIE4),
    Gpu("a10", r"A10", 125, 62.5, 31.2, 24, 600, None, PCIE4),
    Gpu("l40s", r"L40S", 362.05, 183, 91.6, 48, 864, None, PCIE4),
    Gpu("l40", r"L40", 181.05, 90.5, 90.5, 48, 864, None, PCIE4),
    Gpu("l4", r"L4", 121, 60, 30.3, 24, 300, None, PCIE4),
    Gpu("rtx-a6000", r"RTX A6000", 154.8, 77.4, 38.7, 48, 768, None, PCIE4),
    Gpu("rtx-6000-ada", r"RTX 6000 Ada Generation", 364.2, 182.1, 91.1, 48, 960, None, PCIE4),
    Gpu("rtx-5090", r"GeForce RTX 5090", 209.5, 104.8, 104.8, 32, 1792, None, PCIE5),
    Gpu("rtx-4090", r"GeForce RTX 4090( D)?", 165.2, 82.6, 82.6, 24, 1008, None, PCIE4),
    Gpu("rtx-3090", r"GeForce RTX 3090( Ti)?", 71, 35.6, 35.6, 24, 936, None, PCIE4),
    Gpu("v100-32gb", r"(Tesla )?V100.*32GB", 125, None, 15.7, 32, 900, 150, PCIE3, None, 400),
    Gpu("v100-16gb", r"(Tesla )?V100.*", 125, None, 15.7, 16, 900, 150, PCIE3, None, 400),
    Gpu("t4", r"(Tesla )?T4", 65, None, 8.1, 16, 320, None, PCIE3),
)


def gpu_of_device(name: str) -> Gpu | None:
    """Return the GPU that torch reports under this name; None if it is not in the table, or is a MIG slice."""
    if " MIG " in name:
        return None  # nobody publishes figures of MIG slices
    bare = name.removeprefix("NVIDIA ")
    return next((gpu for gpu in GPUS if re.fullmatch(gpu.pattern, bare)), None)


def gpu_named(name: str) -> Gpu:
    """Return the GPU named by --gpu. Raises ConfigError listing the names."""
    found = {gpu.name: gpu for gpu in GPUS}.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu {name} is unknown: choose from {', '.join(sorted(gpu.name for gpu in GPUS))}")
    return found
