"""Register tiled MLPs for every trained language model."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.extensions.active import text_part
from llava_ds.extensions.base import Extension, Wrap
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.runtime.ranks import Ranks

FLAG = "--mlp_tile_tokens"


def tile_mlps(language_model: nn.Module, num_tokens: int) -> str:
    """Run every MLP on num_tokens tokens at a time, recomputed in backward. Returns a line that reports it.

    Memory then holds one tile's activations, plus the MLP's input and output. Raises ConfigError for language models
    without an MLP per layer, or with a mixture of experts that distributes tokens itself.
    """
    layers = [module for module in language_model.modules() if isinstance(module, GradientCheckpointingLayer)]
    mlps = [getattr(layer, "mlp", None) for layer in layers]
    kind = language_model.config.model_type
    routed = "routerless_mlps" in text_part(language_model.config).breaks(language_model.config)
    if routed or not all(isinstance(mlp, nn.Module) for mlp in mlps):
        raise ConfigError(f"{FLAG} needs layers with an MLP, but the layers of {kind} have none: leave it out")
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for mlp in mlps for module in mlp.modules())
    for mlp in mlps:
        mlp.forward = functools.partial(_tiled, mlp.forward, num_tokens, drops)
    return f"{len(mlps)} MLPs of the language model take {num_tokens:,} tokens at a time ({FLAG})"


def _tiled(forward, num_tokens: int, drops: bool, hidden: torch.Tensor) -> torch.Tensor:
    """Run an MLP's forward, (1, T, D) to (1, T, D), on tiles of tokens.

    drops: True if the MLP has dropout, whose random numbers backward has to repeat.
    """
    if not torch.is_grad_enabled() or hidden.shape[1] <= num_tokens:
        return forward(hidden)
    tiles = hidden.split(num_tokens, 1)
    return torch.cat([checkpoint(forward, tile, use_reentrant=False, preserve_rng_state=drops) for tile in tiles], 1)


class Tiles(Wrap):
    """Replaces the forward of every MLP by its tiled version."""

    def kernels(self, model: LlavaModel, plan: ModelPlan, resolved: ResolvedConfig, ranks: Ranks) -> list[str]:
        return [tile_mlps(model.language_model, resolved.args.own["mlp_tiles"].mlp_tile_tokens)]


extension = Extension(wrap=Tiles())
