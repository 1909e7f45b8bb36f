"""Weights from files into a model, tensor by tensor: no rank ever holds a whole model beside its own share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import torch
from safetensors import safe_open
from torch import nn

from llava_ds.constants import DataError
from llava_ds.distributed import Ranks, all_sum
from llava_ds.model import quantize

MAX_SHOWN = 4  # problems named in one message


class WeightFiles:
    """The tensors of a folder or a single file, by name, read one at a time.

    Understands model.safetensors and pytorch_model.bin, whole or sharded with an index. Pickles are opened with
    weights_only=True. rename maps a name on disk to the model's, or to None to leave it out.
    """

    def __init__(self, path: str | Path, rename: Callable[[str], str | None] = lambda name: name) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[Path, str]] = {}  # model's name -> file, name on disk
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files():
            for name, shape in _shapes(file).items():
                new = rename(name)
                if new is not None:
                    self._places[new] = (file, name)
                    self.shapes[new] = shape

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        for single in ("model.safetensors", "pytorch_model.bin"):
            index = self.path / f"{single}.index.json"
            if index.is_file():
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = sorted({self.path / name for name in weight_map.values()})
                missing = [file.name for file in files if not file.is_file()]
                if missing:
                    raise DataError(
                        f"{self.path}: {index.name} names {', '.join(missing)}, which is not there: copy it again"
                    )
                return files
            if (self.path / single).is_file():
                return [self.path / single]
        raise DataError(
            f"{self.path} holds no weights: expected model.safetensors or pytorch_model.bin, or their index"
        )

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Every tensor's name and a function that reads it, file by file, so that one file is open at a time."""
        for file in sorted({file for file, _ in self._places.values()}):
            read = _reader(file)
            for name, (where, on_disk) in self._places.items():
                if where == file:
                    yield name, lambda on_disk=on_disk, read=read: read(on_disk)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return {name: tuple(tensor.shape) for name, tensor in _load_pickle(file).items()}


def _reader(file: Path) -> Callable[[str], torch.Tensor]:
    if file.suffix == ".safetensors":
        opened = safe_open(file, framework="pt")
        return opened.get_tensor
    return _load_pickle(file).__getitem__


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises several types for damaged or hostile pickles
        raise DataError(f"{file} can't be read as weights: {error}") from error


class TensorSource:
    """Tensors that are in memory already, with WeightFiles' face."""

    def __init__(self, tensors: dict[str, torch.Tensor], path: str) -> None:
        self.path, self._tensors = path, tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        for name, tensor in self._tensors.items():
            yield name, lambda tensor=tensor: tensor


@torch.no_grad()
def load_weights(
    module: nn.Module | dict[str, nn.Parameter], source: WeightFiles | TensorSource, ranks: Ranks, what: str
) -> None:
    """Fill every parameter of a module from a source, partitioned or not, and prove by checksum that it arrived.

    module: or some of its parameters by name. Weights of quantized layers are packed as they come, and it is the packed
    ones that are summed. Raises DataError when a tensor is missing, has another shape or is not the module's, and
    RuntimeError when what the ranks hold differs from what was read (weights put into partitioned parameters can vanish
    silently).
    """
    parameters, aliases = module, set()
    if isinstance(module, nn.Module):
        parameters = dict(module.named_parameters())  # a tied weight appears once
        aliases = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(parameters)
    _check_fit(parameters, aliases, source, what)
    sums = torch.zeros(len(parameters), dtype=torch.int64)
    order = {name: i for i, name in enumerate(parameters)}
    partitioned_one = next((p for p in parameters.values() if hasattr(p, "ds_id")), None)
    for name, read in source.tensors():
        if name not in parameters:
            continue
        parameter = parameters[name]
        if quantize.is_packed(parameter):
            packed = quantize.pack(module, name, read(), ranks.device)
            sums[order[name]] = _bit_sum(packed.data)
            if partitioned_one is not None:
                partitioned_one.convert_to_zero_parameters(param_list=[packed])
            parameters[name] = packed
            continue
        partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
            if ranks.is_first or not partitioned:
                tensor = read().to(parameter.dtype)
                sums[order[name]] = _bit_sum(tensor)
                parameter.data.copy_(tensor)
    _check_arrival(parameters, sums, ranks, f"{what} {source.path}")


def _check_fit(parameters: dict[str, nn.Parameter], aliases: set[str], source, what: str) -> None:
    """Compare names and shapes before anything is read; every rank finds the same, so none waits for another."""
    problems = []
    for names, problem in (
        (sorted(set(parameters) - set(source.shapes)), "missing"),
        (sorted(set(source.shapes) - set(parameters) - aliases), "that the model does not have"),
    ):
        if names:
            problems.append(f"{len(names)} tensors {problem}, the first are {', '.join(names[:3])}")
    for name, parameter in parameters.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if source.shapes.get(name, shape) != shape:
            problems.append(f"{name} has shape {source.shapes[name]}, the model needs {shape}")
    if problems:
        raise DataError(f"{what} {source.path} does not fit the model: " + "; ".join(problems[:MAX_SHOWN]))


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bit patterns: exact, in any order, and additive over partitions."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(width).sum(dtype=torch.int64).cpu()


def _check_arrival(parameters: dict[str, nn.Parameter], sums: torch.Tensor, ranks: Ranks, what: str) -> None:
    held = torch.zeros_like(sums)
    partitioned = [hasattr(p, "ds_id") for p in parameters.values()]
    for i, parameter in enumerate(parameters.values()):
        held[i] = _bit_sum(_own_part(parameter, ranks) if partitioned[i] else parameter.data)
    if any(partitioned):
        device = ranks.device
        held = all_sum(held.to(device)).cpu()
        torch.distributed.broadcast(expected := sums.to(device), 0)
        sums = expected.cpu()
    wrong = [name for name, a, b in zip(parameters, held.tolist(), sums.tolist()) if a != b]
    if wrong:
        raise RuntimeError(f"{what}: {len(wrong)} tensors did not arrive as read, the first is {wrong[0]}")


def _own_part(parameter: nn.Parameter, ranks: Ranks) -> torch.Tensor:
    """This rank's partition without the padding behind the parameter's end."""
    part = parameter.ds_tensor.flatten()
    return part[: max(0, min(part.numel(), parameter.ds_numel - ranks.rank * part.numel()))]
