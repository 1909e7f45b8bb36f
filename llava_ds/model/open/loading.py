"""Load weights from files into a model, tensor by tensor. A rank holds at most its partition and one more tensor."""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedConfig

from llava_ds.constants import DataError
from llava_ds.model.open.weights import Weights
from llava_ds.runtime.mesh import sum_over
from llava_ds.runtime.ranks import Ranks
from llava_ds.runtime.waiting import waiting

MAX_SHOWN = 4  # number of problems named in one message
MAX_NAME = 200  # maximum number of characters of a tensor's name in a message
SUM_NUMBERS = 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h


@torch.no_grad()
def load_weights(
    module: nn.Module | dict[str, nn.Parameter],
    source: Weights,
    ranks: Ranks,
    what: str,
    copies: bool = True,
    elsewhere: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Load all parameters of a module, partitioned or not, and its stored buffers. Verifies parameters by checksum.

    module: a module, or some of its parameters by name; copies: if False, parameters become views of the mapped file,
    whose pages all processes of a machine share (for a module in CPU memory that is moved or sharded next); elsewhere:
    names and shapes of parameters on other ranks that the source must have as well. Weights of quantized layers are
    packed when they are read. Raises DataError if a tensor is missing, has another shape or is not in the module, and
    RuntimeError if values in the model differ from the files (writes to partitioned parameters can be lost silently).
    """
    check_fit(module, source, what, elsewhere)
    parameters, _ = _named(module)
    sums = torch.zeros(len(parameters), dtype=torch.int64)
    order = {name: i for i, name in enumerate(parameters)}
    partitioned_one = next((p for p in parameters.values() if hasattr(p, "ds_id")), None)
    buffers = {} if isinstance(module, dict) else persistent_buffers(module)
    for name, read in source.tensors():
        if name in buffers:
            buffers[name].copy_(read())
        if name not in parameters:
            continue
        parameter = parameters[name]
        if is_packed(parameter):
            packed = module.get_submodule(name.rpartition(".")[0]).pack(name, read(), ranks.device)
            sums[order[name]] = bit_sum(packed.data)
            if partitioned_one is not None:
                partitioned_one.convert_to_zero_parameters(param_list=[packed])
            parameters[name] = packed
            continue
        partitioned = hasattr(parameter, "ds_id")
        with _gathered(parameter) if partitioned else contextlib.nullcontext():
            if not partitioned or torch.distributed.get_rank(parameter.ds_process_group) == 0:
                tensor = read().to(parameter.dtype)
                sums[order[name]] = bit_sum(tensor)
                if copies:
                    parameter.data.copy_(tensor)
                else:
                    parameter.data = tensor
                del tensor  # a reference would keep the mapped file in memory
    _check_arrival(parameters, sums, ranks, f"{what} {source.path}")


def _gathered(parameter: nn.Parameter) -> contextlib.AbstractContextManager:
    """Gather a partitioned parameter on all ranks inside a context. At its end, rank 0's values are distributed."""
    import deepspeed  # not at the top: it takes seconds, and only partitioned parameters need it

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _named(module: nn.Module | dict[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], set[str]]:
    """Return the parameters by name, with tied parameters once, and the other names of tied parameters."""
    if isinstance(module, dict):
        return module, set()
    parameters = dict(module.named_parameters())
    return parameters, {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(parameters)


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are stored on disk with the parameters, by name."""
    inside = ((f"{prefix}." if prefix else "", each) for prefix, each in module.named_modules())
    return {
        prefix + name: buffer
        for prefix, each in inside
        for name, buffer in each.named_buffers(recurse=False)
        if name not in each._non_persistent_buffers_set
    }


def check_fit(
    module: nn.Module | dict[str, nn.Parameter],
    source: Weights,
    what: str,
    elsewhere: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Compare names and shapes before any tensor is read. The result is the same on all ranks.

    elsewhere: see load_weights. Raises DataError if a tensor is missing, has another shape or is not in the module.
    """
    parameters, aliases = _named(module)
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()} | elsewhere
    buffers = {} if isinstance(module, dict) else persistent_buffers(module)
    problems = []
    for names, problem in (
        (sorted(set(shapes) - set(source.shapes)), "missing"),
        (sorted(set(source.shapes) - set(shapes) - aliases - set(buffers)), "that the model does not have"),
    ):
        if names:
            first = ", ".join(name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..." for name in names[:3])
            problems.append(f"{len(names)} tensors {problem}, such as {first}")
    for name, shape in (shapes | {name: tuple(buffer.shape) for name, buffer in buffers.items()}).items():
        if source.shapes.get(name, shape) != shape:
            problems.append(f"{name} has shape {source.shapes[name]}, the model needs {shape}")
    if problems:
        raise DataError(f"{what} {source.path} does not fit the model: " + "; ".join(problems[:MAX_SHOWN]))


def check_depth(config: PreTrainedConfig, source: Weights, what: str) -> None:
    """Raise DataError if the configuration has more layers than there are tensors. Call it before building layers."""
    if config.num_hidden_layers > len(source.shapes):
        raise DataError(
            f"{what} {source.path} does not fit the model: config.json says num_hidden_layers "
            f"{config.num_hidden_layers}, but its files have {len(source.shapes)} tensors: copy it again"
        )


@contextlib.contextmanager
def return_freed_memory() -> Iterator[None]:
    """Inside this context, return freed tensors' memory to the system immediately, if the C library is glibc.

    By default glibc keeps freed blocks below 32 MB in its heap; loading would grow it by more than the whole model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:  # set the largest values of glibc's own adjustment, so that training reuses freed blocks
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(M_TRIM_THRESHOLD, 64 * 2**20)


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bit patterns as integers of the same size, (numel,)."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(-1).view(width)


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor's bit patterns on its device: exact, independent of order, and additive over partitions."""
    # Sum piece by piece, because torch first converts its input to 64 bits.
    return torch.stack([piece.sum(dtype=torch.int64) for piece in bit_view(tensor).split(SUM_NUMBERS)]).sum()


def _check_arrival(parameters: dict[str, nn.Parameter], sums: torch.Tensor, ranks: Ranks, what: str) -> None:
    held = torch.zeros_like(sums)
    partitioned = [hasattr(p, "ds_id") for p in parameters.values()]
    for i, parameter in enumerate(parameters.values()):
        held[i] = bit_sum(_own_partition(parameter) if partitioned[i] else parameter.data)
    if any(partitioned):
        device = ranks.device
        group = next(p.ds_process_group for p in parameters.values() if hasattr(p, "ds_id"))
        held = sum_over(group, held.to(device))
        torch.distributed.broadcast(expected := sums.to(device), group=group, group_src=0)
        with waiting("sums of the weights"):
            held, sums = held.cpu(), expected.cpu()
    wrong = [name for name, a, b in zip(parameters, held.tolist(), sums.tolist()) if a != b]
    if wrong:
        raise RuntimeError(f"{what}: {len(wrong)} tensors in the model differ from the files, such as {wrong[0]}")


def _own_partition(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's partition of a parameter, without padding."""
    part, place = parameter.ds_tensor.flatten(), torch.distributed.get_rank(parameter.ds_process_group)
    return part[: max(0, min(part.numel(), parameter.ds_numel - place * part.numel()))]


def is_packed(parameter: nn.Parameter) -> bool:
    """True for a weight that bitsandbytes has packed."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def num_packed(parameter: nn.Parameter) -> int:
    """Return the number of weights in a packed parameter."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def is_4bit(layer: nn.Module) -> bool:
    """True for a layer whose weight is packed in 4 bits."""
    return hasattr(layer, "quant_storage")


def scales_of(layer: nn.Module) -> list[torch.Tensor]:
    """Return a packed layer's scales: all tensors from which its weight is computed, except the packed integers."""
    if not is_4bit(layer):
        return [layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB]
    state = layer.quant_state
    return [state.absmax, *([state.offset, state.state2.absmax, state.state2.code] if state.nested else [])]
