# T tokens of a pack, L tokens of a sample, K keys over all segments
"""Restrict attention by marks on tokens: a base class for plugins."""

import itertools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from llava_ds.batch import Batch, SharedPrompts
from llava_ds.config.plugin_calls import returned
from llava_ds.extensions.base import SessionPart
from llava_ds.extensions.plugins.unproven import refuse_unproven
from llava_ds.model.llava import LlavaModel

Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class AttentionRule(SessionPart):
    """Restrict attention: a token sees itself, and those earlier tokens of its sample that sees() allows.

    A subclass implements marks() and sees(). Consecutive tokens that see the same earlier tokens become one segment
    with gathered keys, so that every attention kernel can compute it. This syncs with the device once per micro-batch.
    Raises ConfigError for models and meshes on which attention can't be restricted this way.
    """

    differs: ClassVar = "transformers' class has no rule of attention"

    def __init__(self, plan, started) -> None:
        super().__init__(plan, started)
        refuse_unproven("a rule of attention", plan, started)

    def marks(self, batch: Batch) -> torch.Tensor:
        """Return a mark of every token, (T,) int64."""
        raise NotImplementedError

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return True where a token with mark `query` sees an earlier token with mark `key`. The shapes broadcast."""
        raise NotImplementedError

    def built(self, model: LlavaModel) -> None:
        """Restrict the model's attention to these segments."""
        plain = model.begin

        def begin(batch: Batch) -> tuple[torch.Tensor, dict[str, object]]:
            embeds, options = plain(batch)
            return embeds, options | self._bounds(batch, options)

        model.begin = begin

    def _bounds(self, batch: Batch, options: dict[str, object]) -> dict[str, object]:
        """Return arguments that replace some of the layers' arguments for this pack. options: the current arguments."""
        marks, starts = self.marks(batch), options.get("cu_seqlens", batch.cu_seqlens)
        if marks.shape != batch.input_ids.shape[1:] or marks.is_floating_point():
            raise returned(self.marks, marks, f"a mark of every token, int64 ({batch.input_ids.shape[1]},)")
        marks = marks.cpu()
        if (places := options.get("places")) is not None:  # a dropped token has the place of its predecessor
            marks = marks[places.cpu().diff(prepend=torch.tensor([-1])) > 0]
        seen = self.sees(marks[1:], marks[:-1])
        if seen.dtype != torch.bool or seen.shape != marks[1:].shape:
            raise returned(self.sees, seen, f"bool in the arguments' shape, ({len(marks) - 1},)")
        found = segments_of(marks, starts.tolist(), self.sees)
        queries, keys = (torch.tensor([0, *each]).cumsum(0).int() for each in (found.queries, found.keys))
        none = torch.zeros(0, dtype=torch.int64)
        seen = SharedPrompts(found.positions, keys, max(found.keys), none, none)
        device = batch.input_ids.device
        return {
            "cu_seqlens": queries.to(device),
            "max_seqlen": max(found.queries),
            "shared_prompts": seen._replace(keys=seen.keys.to(device), cu_keys=seen.cu_keys.to(device)),
        }


class Segments(NamedTuple):
    """Runs of consecutive tokens that see the same earlier tokens, and each other causally.

    queries: number of tokens per segment. keys: number of keys per segment: its tokens and the earlier tokens that they
    see. positions (K,) int64: positions of all keys in the pack, segment after segment.
    """

    queries: list[int]
    keys: list[int]
    positions: torch.Tensor


def segments_of(marks: torch.Tensor, starts: Sequence[int], sees: Sees) -> Segments:
    """Divide a pack into the fewest segments. marks (T,) on the host; starts: of the samples, and T."""
    queries, seen = [], []
    for start, end in itertools.pairwise(starts):
        own = marks[start:end]  # (L,)
        changes = (own[1:] != own[:-1]) | ~sees(own[1:], own[:-1])
        firsts = [0, *(changes.nonzero()[:, 0] + 1).tolist()]
        for first, last in itertools.pairwise([*firsts, end - start]):
            earlier = start + sees(own[first], own[:first]).nonzero()[:, 0]
            new = torch.arange(start + first, start + last)
            if first and torch.equal(earlier, seen[-1]):  # this run continues the last segment
                queries[-1] += last - first
                seen[-1] = torch.cat([earlier, new])
            else:
                queries.append(last - first)
                seen.append(torch.cat([earlier, new]))
    return Segments(queries, [len(each) for each in seen], torch.cat(seen))
