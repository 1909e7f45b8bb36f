# T tokens of a pack, M image positions, D language-model width
"""Drop image tokens depending on an image's content: a base class for plugins."""

from typing import ClassVar

import torch
import torch.nn.functional as F

from llava_ds.batch import Batch
from llava_ds.config.plugin_calls import returned
from llava_ds.constants import ConfigError
from llava_ds.extensions.base import SessionPart
from llava_ds.extensions.plugins.unproven import refuse_unproven
from llava_ds.model.llava import LlavaModel

LAYOUT = ("places", "position_ids", "cu_seqlens", "max_seqlen")


class ContentTokens(SessionPart):
    """Choose the number of tokens per image by its content.

    A subclass implements choose(). Packs have room for all features of every image. After tower and projector, image
    tokens that choose() drops are removed, and later tokens move up. Heads, token limits and counts use the full
    layout. Syncs once per micro-batch. Raises ConfigError for models and meshes whose layers take more than embeddings
    and positions.
    """

    differs: ClassVar = "transformers' class keeps all tokens of an image"

    def __init__(self, plan, started) -> None:
        super().__init__(plan, started)
        refuse_unproven("numbers of tokens by content", plan, started)

    def choose(self, model: LlavaModel, batch: Batch, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings (1, T, D), changed or not, and a mask of the tokens to keep, (T,) bool.

        Only image tokens may be dropped, not the first of an image. Called in every forward pass, also without images.
        """
        raise NotImplementedError

    def built(self, model: LlavaModel) -> None:
        """Make the model drop tokens before its language model."""
        plain = model.begin

        def begin(batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
            embeds, options = plain(batch)
            if others := sorted(options.keys() - {"lengths"}):
                raise ConfigError(
                    f"{type(self).__name__} can't leave out tokens of {', '.join(others)}: give its plugin before "
                    "those with a rule of attention, and a model whose layers take embeddings alone"
                )
            found = self.choose(model, batch, embeds)
            shapes = [getattr(each, "shape", None) for each in found]
            if shapes != [embeds.shape, embeds.shape[1:2]] or found[1].dtype != torch.bool:
                expected = f"embeddings {tuple(embeds.shape)} and the tokens that stay, bool ({embeds.shape[1]},)"
                raise returned(self.choose, found, expected)
            embeds, stays = found
            may_go = torch.zeros_like(stays).index_fill(0, batch.placing.positions, True)
            may_go &= may_go.roll(1).index_fill(0, batch.cu_seqlens[:-1].long(), False)  # keep an image's first token
            if not bool((stays | may_go).all()):
                raise returned(self.choose, stays, "True for tokens of texts and for an image's first token")
            fewer = layout_without(batch, stays)
            return embeds.index_select(1, stays.nonzero()[:, 0]), {name: fewer[name] for name in (*options, *LAYOUT)}

        model.begin = begin


def layout_without(batch: Batch, stays: torch.Tensor) -> dict[str, object]:
    """Return the layers' arguments after dropping tokens. stays (T,) bool: False for dropped tokens.

    places (T,): index of each token among the remaining ones; a dropped token has that of the last one before it.
    """
    places = stays.cumsum(0) - 1  # (T,)
    cu_seqlens = F.pad(places.index_select(0, batch.cu_seqlens[1:].long() - 1) + 1, (1, 0))
    lengths = tuple(cu_seqlens.diff().tolist())
    firsts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    return {
        "places": places,
        "position_ids": (torch.arange(len(firsts), device=firsts.device) - firsts)[None],
        "cu_seqlens": cu_seqlens.to(torch.int32),
        "max_seqlen": max(lengths),
        "lengths": lengths,
    }
