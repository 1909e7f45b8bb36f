"""Store and reload plugins' modules and projectors, and compare their outputs with those in training."""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from llava_ds.constants import ConfigError
from llava_ds.export.tensors import live_entries
from llava_ds.extensions.active import active, plugins
from llava_ds.files.writing import write_tensors
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.names import OWN
from llava_ds.runtime.ranks import Ranks, broadcast_from_first
from llava_ds.train.plan import Plan

OWN_PROJECTOR = "projector.layers.own."
TOLERANCE = 1e-3  # relative to the largest output, in float32
FOR_HALF = 5e-2


def is_own(name: str) -> bool:
    """Return True for a parameter or buffer of a plugin's module or projector."""
    return name.startswith((OWN, OWN_PROJECTOR))


def slot_of(name: str) -> str:
    """Return the plugin and the slot that a parameter or buffer comes from."""
    part = name.partition(".")[0]
    if part.startswith(OWN):
        return f"{part.removeprefix(OWN)}.py: module"
    return f"{' and '.join(f'{each}.py' for each in plugins())}: choices of mm_projector_type"


@dataclass
class StoredModules:
    """Copies of modules, loaded from stored tensors, that get the originals' inputs. Only rank 0 has copies.

    Copies are unsharded, so under ZeRO-3 the check also compares sharded with unsharded weights.
    """

    ranks: Ranks
    copies: dict[str, tuple[nn.Module, nn.Module]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, model: LlavaModel, ranks: Ranks) -> "StoredModules":
        """Store and load the modules. Collective. Raises ConfigError if a module can't be stored or loaded."""
        builds = {
            OWN + name: partial(build, plan.model.text_config, plan.model.tower, plan.args.model)
            for name, build in active(plan.args.model.own).modules.items()
        }
        if any(name.startswith(OWN_PROJECTOR) for name, _ in model.named_parameters()):
            width = plan.model.text_config.hidden_size
            builds["projector"] = partial(plan.model.tower.build_projector, plan.args.model, width)
        read = {
            entry.name: entry.read() for entry in live_entries(model, ranks) if entry.name.startswith(tuple(builds))
        }
        found = cls(ranks)

        def load() -> None:
            for name, build in builds.items():
                prefix = f"{name}."
                tensors = {key.removeprefix(prefix): each for key, each in read.items() if key.startswith(prefix)}
                live = getattr(model, name)
                found.copies[name] = live, _again(build, tensors, slot_of(f"{name}.")).to(ranks.device)

        broadcast_from_first(ranks, load)
        return found

    @property
    def line(self) -> str:
        """A line with the result, for the log."""
        return f"{len(self.copies)} stored modules load and compute the same"

    def __enter__(self) -> "StoredModules":
        self._hooks = [
            live.register_forward_hook(partial(self._compare, name, again), with_kwargs=True)
            for name, (live, again) in self.copies.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def check(self) -> None:
        """Raise ConfigError on every rank if a copy's output differed from the original's. Collective."""

        def report() -> None:
            if self.problems:
                raise ConfigError(self.problems[0])

        broadcast_from_first(self.ranks, report)

    def _compare(self, name: str, again: nn.Module, live: nn.Module, given: tuple, named: dict, output) -> None:
        if not isinstance(output, torch.Tensor):
            return
        with torch.no_grad():
            wanted = again.to(_dtype(live, output))(*given, **named)
        limit = TOLERANCE if output.dtype == torch.float32 else FOR_HALF
        largest = output.detach().abs().max() if output.numel() else 0
        if output.numel() and not float((output.detach() - wanted).abs().max()) <= limit * float(largest):
            self.problems.append(
                f"--plugin {slot_of(f'{name}.')}: the module, stored and loaded again, gives another output: keep all "
                "that it computes with in parameters and buffers, and build them from flags and configuration alone"
            )


def _dtype(module: nn.Module, output: torch.Tensor) -> torch.dtype:
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), output.dtype)


def _again(build, tensors: dict[str, torch.Tensor], slot: str) -> nn.Module:
    """Write tensors, read them into a newly built module, and return it."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        file = Path(folder) / "module.safetensors"
        try:
            write_tensors(file, tensors)
            read, module = load_file(file), build()
            module.load_state_dict(read)
        except (RuntimeError, SafetensorError, ValueError) as error:
            raise ConfigError(
                f"--plugin {slot}: the module can't be stored and loaded again: {' '.join(str(error).split())}: build "
                "the same parameters every time, each with its own memory; buffers are not stored: give "
                "register_buffer persistent=False"
            ) from error
    return module
