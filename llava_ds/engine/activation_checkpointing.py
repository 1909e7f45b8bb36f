"""Recomputing layers in backward instead of keeping what they made (activation checkpointing)."""

import deepspeed
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.config.arguments import Arguments, trained_parts
from llava_ds.engine.ds_config.activation import asks_for
from llava_ds.model.llava import LlavaModel


def mark_layers(model: LlavaModel, args: Arguments, ds_config: dict) -> tuple[dict[str, nn.Module], list[str]]:
    """Mark the layers that run again in backward, as --gradient_checkpointing and the resolved JSON say.

    Returns the parts that they are of, by name, none with "off", and lines that say how many. With "auto" all are
    marked, for engine/activation_budget.py to choose among, and no line is due yet.
    """
    if args.training.gradient_checkpointing == "off":
        return {}, []
    every = args.training.gradient_checkpointing_every_n_layers
    block = ds_config.get("activation_checkpointing") if asks_for(ds_config) else None
    parts = {"language model": model.language_model}
    counts = [recompute_layers(model.language_model, every, block)]
    if "vision_tower" in trained_parts(args.model):
        parts["vision tower"] = model.vision_tower.tower
        counts.append(recompute_layers(model.vision_tower.tower, every))
    lines = [f"{count} layers of the {name} run again in backward" for name, count in zip(parts, counts)]
    return parts, lines if args.training.gradient_checkpointing == "all" else []


def recompute_layers(part: nn.Module, every: int = 1, block: dict | None = None) -> int:
    """Keep only the input of every n-th layer, and run the layer again in backward. Returns how many layers those are.

    part: a language model or a vision tower.
    block: activation_checkpointing of the DeepSpeed JSON, where it asks for something: then DeepSpeed's own function
    does it, which can put the kept inputs into CPU memory or one buffer; number_checkpoints of it is how many layers.
    """
    # transformers 5.23 has given it another name, and warns of the old one.
    new = getattr(part, "activation_checkpointing_enable", None)
    (new or part.gradient_checkpointing_enable)({"use_reentrant": False})
    layers = repeated_layers(part)
    count = (block or {}).get("number_checkpoints")
    chosen = set(range(0, len(layers), every)) if count is None else _spread(min(count, len(layers)), len(layers))
    if block is not None:
        in_cpu = block.get("cpu_checkpointing", False)
        deepspeed.checkpointing.configure(
            None,
            # Without it, DeepSpeed 0.19 loses the shape of what it brings back from the CPU; over the one
            # tensor-parallel rank that there is, nothing is divided.
            partition_activations=block.get("partition_activations", False) or in_cpu,
            contiguous_checkpointing=block.get("contiguous_memory_optimization", False),
            num_checkpoints=len(chosen),
            checkpoint_in_cpu=in_cpu,
            synchronize=block.get("synchronize_checkpoint_boundary", False),
            profile=block.get("profile", False),
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen
        if block is not None:
            layer._gradient_checkpointing_func = _by_deepspeed
    return len(chosen)


def recompute_only(layers: list[GradientCheckpointingLayer], count: int) -> None:
    """Of layers that recompute_layers was called for, let that many run again, evenly spread, and the others not."""
    chosen = _spread(count, len(layers))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen


def repeated_layers(part: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that can run again, in the order in which they run."""
    return [module for module in part.modules() if isinstance(module, GradientCheckpointingLayer)]


def _spread(count: int, total: int) -> set[int]:
    return {index * total // count for index in range(count)}


def _by_deepspeed(layer, hidden_states: torch.Tensor, *others: object) -> torch.Tensor:
    if hidden_states.grad_fn is None:
        # Nothing in front of the first layer trains, as it may be with LoRA. DeepSpeed 0.19's function is an autograd
        # function of its inputs, without whose gradients those within get none.
        hidden_states.requires_grad_()
    if hidden_states.is_leaf or hidden_states._is_view():
        # It empties what it keeps elsewhere, which a leaf does not survive, and a view (OPT's layers return one) loses
        # its gradient by.
        hidden_states = hidden_states.clone()
    return deepspeed.checkpointing.checkpoint(lambda hidden: layer(hidden, *others), hidden_states)
