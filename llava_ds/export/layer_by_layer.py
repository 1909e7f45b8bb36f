# T tokens, V vocabulary
"""Run a reloaded model's forward during a run, on the GPU or all cores, with little memory and a time limit."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

LIMIT_S = 600.0  # maximum time of a comparison, during which the other ranks' GPUs are idle
MARGIN_BYTES = 10**9  # GPU memory reserved for a layer's activations
COPIES_OF_LOGITS = 4  # float32 copies of the logits that a comparison needs, besides the model's output
SMALL_BYTES = 10**9  # smaller models keep training's number of threads, to round like training


class NotCompared(Exception):
    """Raised if a comparison is abandoned. The message is the reason."""


class TooSlow(NotCompared):
    """Raised if a comparison reaches its time limit."""


class Deadline:
    """The deadline of a comparison: LIMIT_S seconds after construction."""

    def __init__(self) -> None:
        self._end = time.monotonic() + LIMIT_S

    def check(self, done: int, of: int, device: torch.device) -> None:
        """Raise TooSlow after the deadline. done, of: numbers of finished and of all layers, for the message."""
        if time.monotonic() > self._end:
            where = "the GPU" if device.type == "cuda" else f"{torch.get_num_threads()} threads of the CPU"
            raise TooSlow(f"after {LIMIT_S:g} s only {done} of {of} layers were computed, on {where}")


@contextlib.contextmanager
def layer_by_layer(model: nn.Module, logits: torch.Tensor, deadline: Deadline) -> Iterator[torch.device]:
    """Prepare a model on the CPU for forwards on the GPU that has `logits` (T, V), the expected result.

    A layer's weights are on the GPU only while it computes, so a model mapped from its files needs memory for one
    layer, the embedding and the output layer. Yields the device for the inputs: the CPU if the GPU lacks that memory. A
    forward raises TooSlow at the deadline.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(tensor) for layer in layers for tensor in _tensors(layer)}
    ends = [tensor for tensor in _tensors(model) if id(tensor) not in inner]
    largest = max((_num_bytes(_tensors(layer)) for layer in layers), default=0)
    device = _device(logits, _num_bytes(ends) + 2 * largest)
    for tensor in ends:
        tensor.data = _moved(tensor.data, device)
    done: list[nn.Module] = []
    before: dict[nn.Module, list[torch.Tensor]] = {}  # each running layer's tensors before they were moved

    def enter(layer: nn.Module, _: object) -> None:
        deadline.check(len(done), len(layers), device)
        before[layer] = [tensor.data for tensor in _tensors(layer)]
        for tensor in _tensors(layer):
            tensor.data = _moved(tensor.data, device)

    def leave(layer: nn.Module, *_: object) -> None:
        done.append(layer)
        for tensor, data in zip(_tensors(layer), before.pop(layer)):
            tensor.data = data

    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    with _threads(device, _num_bytes(_tensors(model))):
        yield device


def _device(logits: torch.Tensor, num_bytes: int) -> torch.device:
    """Return the device of the logits, or the CPU if that GPU lacks memory for num_bytes of weights."""
    if logits.device.type != "cuda":
        return torch.device("cpu")
    torch.cuda.empty_cache()  # training's activations are freed, but torch still holds their memory
    free, _ = torch.cuda.mem_get_info(logits.device)
    needed = num_bytes + COPIES_OF_LOGITS * 4 * logits.numel() + MARGIN_BYTES
    return logits.device if needed <= free else torch.device("cpu")


@contextlib.contextmanager
def _threads(device: torch.device, num_bytes: int) -> Iterator[None]:
    """Use all available cores within the block, if the model is on the CPU and larger than SMALL_BYTES."""
    before = torch.get_num_threads()
    if device.type == "cpu" and num_bytes > SMALL_BYTES:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # launchers limit a rank's number of threads
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _moved(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    return data.to(device)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
