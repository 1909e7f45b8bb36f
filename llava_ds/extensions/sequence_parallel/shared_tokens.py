# H query heads, K key heads, t tokens of a rank, E head width
"""Sequence parallelism in the language model: attention over a pack whose tokens are divided over ranks."""

import torch
from torch import nn
from transformers import AttentionInterface

from llava_ds.extensions.sequence_parallel.cut import SHARED
from llava_ds.extensions.sequence_parallel.exchange import ColumnExchange, to_heads, to_tokens
from llava_ds.model.attention import in_autocast, varlen_attention
from llava_ds.model.llava import LlavaModel

NAME = "llava_ds_shared"


def share_tokens(model: LlavaModel, group: torch.distributed.ProcessGroup) -> None:
    """Make a model accept parts of packs, divided over a group's ranks, as well as complete packs.

    Recurrent layers get the exchange as their token_exchange. The last layer is computed at all positions, because
    skipping positions would need keys that only the exchange provides.
    """
    model.short_last_layer = False
    AttentionInterface.register(NAME, shared_attention)
    for module in model.language_model.modules():
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = NAME
            module.token_group = group
        if hasattr(module, "token_exchange"):
            module.token_exchange = ColumnExchange(group)


def shared_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: object,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute varlen_attention for this rank's t tokens over the tokens of all ranks in the module's group.

    query (1, H, t, E); key and value (1, K, t, E); all other arguments describe the whole pack. Returns (1, t, H, E),
    and None for the weights. The signature is dictated by transformers' AttentionInterface.
    """
    if not options.pop(SHARED, False):
        return varlen_attention(module, query, key, value, attention_mask, *args, **options)
    query, key, value = to_heads(*in_autocast(query, key, value), module.token_group)
    out, _ = varlen_attention(module, query, key, value, attention_mask, *args, **options)
    return to_tokens(out, module.token_group), None
