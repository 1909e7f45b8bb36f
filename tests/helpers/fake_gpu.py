"""A fake GPU: CUDA tensors with shapes, dtypes and devices but no data, and a real GPU's rules.

torch's FakeTensorMode refuses mixed devices, and operations whose result's shape depends on values. What a real GPU
refuses or waits for beyond that, `Rules` adds: copies between host and device that wait, indices on the CPU, masks,
inputs of unlike dtypes.
"""

import contextlib
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from llava_ds.runtime.waiting import QUEUE, waits_for

aten = torch.ops.aten
CUDA = torch.device("cuda")
TORCH = str(Path(torch.__file__).parent)

# One kernel on a GPU. A build of torch without CUDA has no kernel for it, and takes it apart before it is counted.
KERNELS = torch.library.Library("aten", "IMPL")
KERNELS.impl("silu_backward", lambda gradient, x: torch.empty_like(x), "CUDA")


class HostWait(AssertionError):
    """The host would wait for the device."""


class UnlikeDtypes(AssertionError):
    """An operation whose inputs have to share a dtype was given several."""


# Their floating-point inputs have one dtype on CUDA; fake tensors take any.
ONE_DTYPE = {
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward",
    "_convolution",     "native_layer_norm", "native_group_norm", "_fused_rms_norm", "index_copy",
    "index_copy_", "index_add", "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "index_put", "index_put_", "masked_scatter", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_flash_attention_forward",
    "_efficient_attention_forward", "_varlen_attn",
}  # fmt: skip


class Rules(TorchDispatchMode):
    """What CUDA adds to fake tensors. Tensors of the host are real; values that come from the device are zeros.

    A wait is declared by runtime/waiting.py's marks, or by its place: a pattern for "file:function". waits: the
    declared ones that happened.
    """

    def __init__(self, fake: FakeTensorMode, declared: str = "", pageable: bool = False) -> None:
        """pageable: allow copies from pageable memory (they wait for queued work)."""
        super().__init__()
        self.fake, self.pageable = fake, pageable
        self.declared = re.compile(declared or "(?!)")
        self.waits: list[str] = []
        self.pinned = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.rpartition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "_pin_memory":
            return self._pin(args[0])
        if name == "is_pinned":
            return args[0] in self.pinned
        if torch.device(kwargs.get("device") or "cpu").type != "cuda" and not any(map(is_fake, tensors)):
            with _disable_current_modes():  # the host's own
                return function(*args, **kwargs)
        if name == "_local_scalar_dense":
            return self._value(function, args, kwargs)
        on_device = any(tensor.is_cuda for tensor in tensors)
        if on_device and name in ONE_DTYPE:
            self._check_dtypes(name, tensors)
        if on_device and name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self._check_indices(name, args)
        result = function(*args, **kwargs)
        if name in ("_to_copy", "copy_", "copy"):
            source = args[0] if name == "_to_copy" else args[1]
            target = result if name == "_to_copy" else args[0]
            self._check_copy(source, target, args, kwargs)
        return result

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Allow waits that a start may have."""
        before, self.declared, self.pageable = (self.declared, self.pageable), re.compile(""), True
        try:
            yield
        finally:
            self.declared, self.pageable = before
            self.waits.clear()

    def wait(self, what: str) -> None:
        """Count a wait where one is declared. Raises HostWait elsewhere."""
        place, mark = _place(), waits_for(threading.current_thread())
        if mark in ("", QUEUE) and not self.declared.search(place):
            raise HostWait(f"{place} waits for the device: {what}")
        self.waits.append(mark if mark not in ("", QUEUE) else place)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        assert not tensor.is_cuda, "only memory of the host is pinned"
        with _disable_current_modes():
            pinned = tensor.clone()
        self.pinned[pinned] = True
        return pinned

    def _value(self, function, args, kwargs) -> object:
        if args[0].is_cuda:
            self.wait("a value is read")
        try:
            return function(*args, **kwargs)
        except DataDependentOutputException:
            kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
            return kind(0)

    def _check_dtypes(self, name: str, tensors: list[torch.Tensor]) -> None:
        found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if len(found) > 1:
            raise UnlikeDtypes(f"{_place()}: {name} of {', '.join(sorted(map(str, found)))}")

    def _check_indices(self, name: str, args) -> None:
        for index in args[1]:
            if index is None:
                continue
            if not index.is_cuda and args[0].is_cuda:
                self.wait(f"{name} copies an index from the host")
            if index.dtype in (torch.bool, torch.uint8) and name != "index" and args[2].numel() != 1:
                self.wait(f"{name} counts the elements of a mask")

    def _check_copy(self, source: torch.Tensor, target: torch.Tensor, args, kwargs) -> None:
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if source.is_cuda and not target.is_cuda and waits:
            self.wait("a copy to the host")
        elif target.is_cuda and not source.is_cuda and not self.pageable and (waits or source not in self.pinned):
            self.wait("a copy from pageable memory" if source not in self.pinned else "a blocking copy")


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _place() -> str:
    """Return "file:function, line n" of the innermost frame outside torch and this file."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, __file__)) and "/contextlib.py" not in file:
            short = re.sub(r".*/(?=(llava_ds|transformers|tests|peft|bitsandbytes)/)", "", file)
            return f"{short}:{frame.f_code.co_name}, line {frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


class LiveBytes(TorchDispatchMode):
    """Bytes of the device's tensors made within it: those alive, and the most that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.now += self.alive[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key)


class Event:
    """A fake torch.cuda.Event."""

    def __init__(self, rules: Rules, **options: object) -> None:
        self.rules = rules

    def record(self, stream: object = None) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        self.rules.wait("an event")


@contextlib.contextmanager
def gpu(
    *, declared: str = "", pageable: bool = False, capability: tuple[int, int] = (9, 0), tracks: bool = False
) -> Iterator[Rules]:
    """Run with a fake GPU; see Rules. tracks: rules.live has the bytes alive."""
    import peft  # noqa: F401  # before the fake GPU: it imports bitsandbytes, and that would load CUDA's library
    from transformers.utils import import_utils

    from llava_ds.model import attention

    assert hasattr(import_utils, "is_fake_tensor"), "transformers has renamed what is replaced here"
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    rules = Rules(fake, declared, pageable)
    attention._best_kernel.cache_clear()
    with pytest.MonkeyPatch.context() as patch, fake, contextlib.ExitStack() as stack:
        # While tracing, transformers takes other branches: this would hide waits.
        patch.setattr(import_utils, "is_fake_tensor", lambda x: False)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(FakeTensorMode, "avoid_device_init", True)  # as without a GPU: nothing is computed there
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: rules.wait("torch.cuda.synchronize"))
        patch.setattr(torch.cuda, "Event", lambda **options: Event(rules, **options))
        patch.setattr(FakeTensor, "numpy", lambda tensor: np.zeros(tuple(tensor.shape)), raising=False)
        patch.setattr(torch.utils.data, "DataLoader", PinningLoader)
        rules.live = stack.enter_context(LiveBytes()) if tracks else None
        stack.enter_context(rules)
        try:
            yield rules
        finally:
            attention._best_kernel.cache_clear()


class PinningLoader:
    """torch's DataLoader, as far as micro_batches uses it: collates on the host, and pins."""

    def __init__(self, dataset, *, batch_sampler, collate_fn, pin_memory, **others: object) -> None:
        assert pin_memory, "copies from pageable memory wait"
        self._dataset, self._batches, self._collate = dataset, batch_sampler, collate_fn

    def __iter__(self):
        for numbers in self._batches:
            with _disable_current_modes():
                collated = self._collate([self._dataset[i] for i in numbers])
            yield collated.pin_memory()


def stand_in(name: str, **functions: object) -> types.ModuleType:
    """A module that importlib finds."""
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name, submodule_search_locations=[])
    vars(module).update(functions)
    return module
