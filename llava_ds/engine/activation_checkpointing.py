"""Activation checkpointing: layers save only their input and are recomputed in backward."""

import deepspeed
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.config.arguments import Arguments, adapted_parts, trained_parts
from llava_ds.engine.ds_config.activation import switched_on
from llava_ds.model.llava import LlavaModel, all_models


def mark_checkpointed_layers(
    model: LlavaModel, args: Arguments, ds_config: dict
) -> tuple[dict[str, nn.Module], list[str]]:
    """Mark the layers to checkpoint, according to --gradient_checkpointing and the resolved JSON.

    Returns the parts with such layers by name, and lines that report their number. With "auto" all
    layers are marked, for an extension to choose from, and no lines are returned.
    """
    every = args.training.gradient_checkpointing_every_n_layers
    block = ds_config.get("activation_checkpointing") if switched_on(ds_config) else None
    tower_trains = "vision_tower" in trained_parts(args.model) | adapted_parts(args.model)
    parts, counts = {}, []
    for name, each in all_models(model).items():
        whose = name and f"{name}'s "
        parts[f"{whose}language model"] = each.language_model
        counts.append(checkpoint_layers(each.language_model, every, block))
        if tower_trains and next(each.vision_tower.parameters(), None) is not None:  # None on later pipeline stages
            parts[f"{whose}vision tower"] = each.vision_tower.tower
            counts.append(checkpoint_layers(each.vision_tower.tower, every))
    lines = [f"{count} layers of the {name} are checkpointed" for name, count in zip(parts, counts)]
    return parts, lines if args.training.gradient_checkpointing == "all" else []


def checkpoint_layers(part: nn.Module, every: int = 1, block: dict | None = None) -> int:
    """Checkpoint every n-th layer of a language model or a vision tower. Returns the number of these layers.

    block: activation_checkpointing of the DeepSpeed JSON if it enables something. Then DeepSpeed's own function is
    used: it can move the saved inputs to CPU memory or one buffer. Its number_checkpoints is the number of layers.
    """
    # transformers 5.23 renamed the method, and warns about its old name.
    new = getattr(part, "activation_checkpointing_enable", None)
    (new or part.gradient_checkpointing_enable)({"use_reentrant": False})
    layers = repeated_layers(part)
    count = (block or {}).get("number_checkpoints")
    chosen = set(range(0, len(layers), every)) if count is None else _spread(min(count, len(layers)), len(layers))
    if block is not None:
        in_cpu = block.get("cpu_checkpointing", False)
        deepspeed.checkpointing.configure(
            None,
            # Without partitioning, DeepSpeed 0.19.8 loses the shape of tensors that it copies back from the CPU.
            # DeepSpeed knows of only one tensor-parallel rank, so partitioning changes nothing else.
            partition_activations=block.get("partition_activations", False) or in_cpu,
            contiguous_checkpointing=block.get("contiguous_memory_optimization", False),
            num_checkpoints=len(chosen),
            checkpoint_in_cpu=in_cpu,
            synchronize=block.get("synchronize_checkpoint_boundary", False),
            profile=block.get("profile", False),
        )
        assert deepspeed.checkpointing.is_configured()
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen
        if block is not None:
            assert hasattr(layer, "_gradient_checkpointing_func"), "transformers has renamed the replaced function"
            layer._gradient_checkpointing_func = _by_deepspeed
    return len(chosen)


def checkpoint_spread(layers: list[GradientCheckpointingLayer], count: int) -> None:
    """Checkpoint `count` evenly spread layers of a part. Call it after checkpoint_layers."""
    chosen = _spread(count, len(layers))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen


def repeated_layers(part: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers that can be checkpointed, in the order in which they run."""
    return [module for module in part.modules() if isinstance(module, GradientCheckpointingLayer)]


def _spread(count: int, total: int) -> set[int]:
    return {index * total // count for index in range(count)}


def _by_deepspeed(layer, hidden_states: torch.Tensor, *others: object) -> torch.Tensor:
    if hidden_states.grad_fn is None:
        # With adapters, nothing before the first layer trains. DeepSpeed 0.19.8's function is an autograd.Function: if
        # none of its inputs requires a gradient, the layer's parameters get no gradients.
        hidden_states.requires_grad_()
    if hidden_states.is_leaf or hidden_states._is_view():
        # DeepSpeed empties tensors after saving them: leaves don't allow that, and views (OPT's layers return one) lose
        # their gradient.
        hidden_states = hidden_states.clone()
    return deepspeed.checkpointing.checkpoint(lambda hidden: layer(hidden, *others), hidden_states)
