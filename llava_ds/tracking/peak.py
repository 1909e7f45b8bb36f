"""The peak FLOP/s of a device, the reference for MFU."""

import time

import torch

from llava_ds.runtime.tf32 import tf32_allowed

TERA = 1e12
GEMM_SIDE, GEMM_SIDES_CPU = 8192, (128, 1024)
GEMM_TIME_S = 0.2


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return FLOP/s of a device in a precision, and a line that states their source.

    The number is the vendor's figure if the GPU is known. For unknown GPUs, for CPUs and for fp32 without TF32, it is
    the measured speed of a square matrix product.
    """
    name, known = "this CPU", None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = vendor_peak(name, dtype, tf32_allowed())
    short = str(dtype).removeprefix("torch.")
    if known is not None:
        return known, f"MFU is relative to {known / TERA:g} TFLOP/s, the vendor's dense figure for {name} in {short}"
    measured = gemm_peak(device, dtype)
    return measured, f"MFU is relative to {measured / TERA:.3g} TFLOP/s, a matrix product's speed on {name} in {short}"


def vendor_peak(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the vendor's FLOP/s for a GPU, None if unknown. name: as torch reports it."""
    from llava_ds.runtime.gpus import gpu_of_device

    found = gpu_of_device(name)
    if found is None or (dtype == torch.float32 and not tf32):
        return None
    figure = found.tf32 if dtype == torch.float32 else found.half
    return None if figure is None else figure * TERA


def gemm_peak(device: torch.device, dtype: torch.dtype, time_s: float = GEMM_TIME_S) -> float:
    """Return the FLOP/s of the fastest of several square matrix products, measured for about `time_s` seconds.

    The matrices are random, because GPUs multiply constant ones faster.
    """

    def drawn(side: int) -> torch.Tensor:
        """Return a random matrix from a new generator, so the state of training's generator is unchanged."""
        return torch.randn(side, side, device=device, generator=torch.Generator(device)).to(dtype)

    if device.type == "cuda":
        return 2 * GEMM_SIDE**3 / _cuda_time_s(drawn(GEMM_SIDE), drawn(GEMM_SIDE), time_s)
    # Begin small, because a large product would take minutes on a CPU that lacks the dtype.
    best, side, started = 0.0, GEMM_SIDES_CPU[0], time.perf_counter()
    while not best or time.perf_counter() - started < time_s:
        one, other = drawn(side), drawn(side)
        before = time.perf_counter()
        one @ other
        needed = max(time.perf_counter() - before, 1e-9)
        best = max(best, 2 * side**3 / needed)
        if side < GEMM_SIDES_CPU[1] and needed < time_s / 32:  # a product with twice the side takes eight times as long
            side *= 2
    return best


def _cuda_time_s(one: torch.Tensor, other: torch.Tensor, time_s: float) -> float:
    """Return the shortest time in seconds of repeated products, at least two because the first warms up."""
    times, started = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - started < time_s:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        one @ other
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return min(times)
