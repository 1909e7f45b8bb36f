"""The peak memory of operations on the CPU."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


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
