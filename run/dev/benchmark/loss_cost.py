# T tokens of all samples laid end to end, S supervised positions, D language-model width, V vocabulary
"""Compare the cost of the loss over supervised rows with the usual cross-entropy over the logits of all tokens."""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from llava_ds.constants import IGNORE_INDEX
from llava_ds.model.output_loss import add_loss


def measure_output_loss(
    num_tokens: int = 2048,
    hidden_size: int = 256,
    vocabulary: int = 32000,
    supervised_fraction: float = 0.167,
    repeats: int = 3,
    trains: bool = True,
) -> dict[str, object]:
    """Measure seconds and bytes of output layer and loss, forward and backward, both ways in turn; medians and ratios.

    ours: supervised rows through the output layer's own loss; full: all rows through the output layer, torch's
    cross-entropy ignoring the unsupervised ones. bytes: peak of tensors created, including gradients, without weights
    and hidden states. trains: train the output layer's weights. In float32 on the CPU with torch's current number of
    threads: set it to one before.
    """
    torch.manual_seed(0)
    layer = nn.Linear(hidden_size, vocabulary, bias=False).requires_grad_(trains)
    hidden = torch.randn(num_tokens, hidden_size)  # (T, D)
    positions = torch.randperm(num_tokens)[: round(num_tokens * supervised_fraction)].sort().values
    labels = torch.full((num_tokens,), IGNORE_INDEX)
    labels[positions] = targets = torch.randint(vocabulary, positions.shape)  # (S,)
    add_loss(layer)
    losses = {
        "ours": lambda states: layer(states.index_select(0, positions), targets=targets)[0],
        "full": lambda states: F.cross_entropy(layer(states), labels, ignore_index=IGNORE_INDEX, reduction="sum"),
    }

    def run_once(name: str) -> tuple[float, torch.Tensor]:
        layer.weight.grad = None
        states = hidden.clone().requires_grad_()
        loss = losses[name](states)
        loss.backward()
        return loss.item(), states.grad

    (our_loss, our_gradient), (full_loss, full_gradient) = (run_once(name) for name in losses)  # warms up
    memory = {}
    for name in losses:
        with PeakBytes() as found:
            run_once(name)
        memory[name] = found.peak
    times: dict[str, list[float]] = {name: [] for name in losses}
    for name in [*losses] * repeats:
        started = time.perf_counter()
        run_once(name)
        times[name].append(time.perf_counter() - started)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return {
        "num_supervised": len(positions),
        "output_layer_trains": trains,
        "all_seconds": times,
        "peak_bytes": memory,
        "times_faster": seconds["full"] / seconds["ours"],
        "times_less_memory": memory["full"] / memory["ours"],
        "loss_difference": abs(our_loss - full_loss) / full_loss,
        "gradient_difference": ((our_gradient - full_gradient).abs().max() / full_gradient.abs().max()).item(),
    }


class PeakBytes(TorchDispatchMode):
    """Tracks the peak bytes of tensors that operations return; buffers inside an operation are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        given = {id_of(x) for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in given:
                storage = tensor.untyped_storage()
                self.alive[id_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
