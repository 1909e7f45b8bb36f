"""Apply torch.compile to layers before the first step; refuse it if the DeepSpeed JSON enables another compiler."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.engine.ds_config.activation import deep_compiles
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.engine.warm_up import NewEngine
from llava_ds.extensions.base import Extension, Wrap


def compile_layers(model: nn.Module, backend: str | None) -> int:
    """Compile the repeated layers of tower and language model for dynamic lengths. Returns the number of layers.

    It compiles layers, not the model, because equal layers share one compilation, and because ZeRO-3 gathers
    parameters in hooks around layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend or "inductor", dynamic=True)
    return len(layers)


def check(resolved: ResolvedConfig) -> Iterator[str]:
    """Yield a line for an unknown backend, and if the DeepSpeed JSON enables DeepSpeed's compiler."""
    flags = resolved.args.own["compile"]
    if not flags.torch_compile:
        return
    known, backend = torch._dynamo.list_backends(exclude_tags=()), flags.torch_compile_backend
    if backend is not None and backend not in known:
        yield f"--torch_compile_backend {backend} is unknown to torch: give one of {', '.join(known)}"
    if deep_compiles(resolved.config):
        yield (
            "compile.deepcompile is true in the DeepSpeed JSON but --torch_compile is True: both compile the model, "
            "remove one of them"
        )


class Compiled(Wrap):
    """Wraps layers in torch.compile, to compile them when they first run."""

    def started(self, new: NewEngine) -> list[str]:
        flags = new.resolved.args.own["compile"]
        if not flags.torch_compile:
            return []
        return [f"{compile_layers(new.model, flags.torch_compile_backend)} layers are compiled when they first run"]


extension = Extension(check=check, wrap=Compiled())
