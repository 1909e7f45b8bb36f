# M image positions of a pack, R rows of side features of all its samples, W their width, D language-model width
"""PAVE: a side channel, such as sound or depth, is patched into the image's tokens.

The idea of PAVE (arXiv 2503.19794): a record brings further features beside its image; the image's tokens attend to
them, and the result is added to the tokens, whose number stays the same. Written from the paper. The features are rows
of numbers under the record's key "side". The patch begins at zero, so training starts from the model as it was.
Answers of transformers' class don't see the channel.

    --plugin examples/plugins/pave.py --pave_width 16
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.config.bounds import Count, Positive
from llava_ds.config.flags import flags_of
from llava_ds.constants import DataError
from llava_ds.extensions.base import Extension, ExtensionFlags, SessionPart
from llava_ds.extensions.plugin_slots import RecordFields

_pave, _ = flags_of("pave")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the side channel."""

    differs: ClassVar = "transformers' class does not see the side channel"

    pave_width: Count = _pave(16, "Numbers in a row of a record's side features.")
    pave_learning_rate: Positive | None = _pave(None, "Learning rate of the patch. Absent: --learning_rate.")

    @property
    def module_rate(self) -> float | None:
        return self.pave_learning_rate


class Side(RecordFields):
    """The key "side": a list of rows of numbers."""

    names = ("side",)

    def load(self, values):
        tensors = super().load(values)
        if any(each.ndim != 2 for each in tensors.values()):
            raise DataError("'side' is not a list of rows of numbers, all of one length")
        return tensors


class Patch(nn.Module):
    """Cross-attention from image tokens (M, D) to side features (R, W) of the same sample: (M, D)."""

    def __init__(self, side_width: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(side_width, width, bias=False)
        self.value = nn.Linear(side_width, width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, tokens: torch.Tensor, side: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
        """is_own (M, R) bool: the token and the row are of one sample."""
        scores = self.query(self.norm(tokens)) @ self.key(side).T / math.sqrt(tokens.shape[1])
        scores = scores.masked_fill(~is_own, -torch.inf)
        nothing = scores.new_zeros(len(tokens), 1)  # for tokens without a row
        attention = torch.cat([nothing, scores], 1).softmax(1)[:, 1:]
        return self.out(attention @ self.value(side)) * is_own.any(1, keepdim=True)


def patch(text_config, tower, args) -> nn.Module:
    return Patch(args.own["pave"].pave_width, text_config.hidden_size)


class Patching(SessionPart):
    """Changes the embeddings that the language model begins with."""

    def built(self, model) -> None:
        plain, width = model.begin, self.plan.args.own["pave"].pave_width

        def begin(batch: Batch):
            embeds, options = plain(batch)  # (1, T, D)
            given = batch.extra.get("pave.side", [])
            found = [(i, rows) for i, rows in enumerate(given) if rows is not None]
            if any(rows.shape[1] != width for _, rows in found):
                raise DataError(f"a record has other side features than rows of --pave_width {width} numbers")
            side = torch.cat([rows.to(embeds) for _, rows in found] or [embeds.new_zeros(0, width)])  # (R, W)
            samples = torch.tensor([i for i, rows in found for _ in rows], device=embeds.device)
            at = batch.placing.positions  # (M,)
            of_tokens = torch.bucketize(at, batch.cu_seqlens[1:].to(at.dtype), right=True)
            is_own = of_tokens[:, None] == samples[None]  # (M, R)
            added = model.own_pave(embeds[0].index_select(0, at), side, is_own)
            return embeds.index_add(1, at, added[None].to(embeds.dtype)), options

        model.begin = begin


extension = Extension(module=patch, part=Patching, fields=Side())
