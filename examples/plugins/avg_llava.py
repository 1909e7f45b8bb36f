# T tokens of a pack, I images, P patches of each, G granularities, D language-model width
"""AVG-LLaVA: a router picks how many tokens an image has, by the image and the question.

The idea of AVG-LLaVA (arXiv 2410.02745): an image's tokens are pooled to several granularities; a router picks one, and
learns by ranking: the granularity under which the language model finds the answer likelier has to score higher. Written
from the paper. The router is an MLP of means; the language model trains with the granularity that was picked, where the
paper first trains it with all. Every step runs the model once for each granularity, without gradients, to rank them.
Images have one tile. Answers of transformers' class have all tokens.

    --plugin examples/plugins/avg_llava.py --avg_granularities 3 --image_aspect_ratio square
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from llava_ds.batch import Batch
from llava_ds.config.bounds import Count, Positive, Rate
from llava_ds.config.flags import flags_of
from llava_ds.constants import DataError
from llava_ds.extensions.base import Extension, ExtensionFlags, Number
from llava_ds.extensions.plugins.content_tokens import ContentTokens
from llava_ds.extensions.plugins.hidden_loss import HiddenLoss
from llava_ds.model.heads import LogProbs, sum_by_sample
from llava_ds.train.objectives.objective import Wrapped

_avg, _ = flags_of("avg_llava")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the granularities."""

    numbers: ClassVar = {"router": Number("Ranking loss of the router", "router {:.3f}")}

    avg_granularities: Count = _avg(3, "Granularities; each has half the tokens of the one before in a row.")
    avg_margin: Rate = _avg(0.1, "Difference of probabilities between a better and a worse granularity.")
    avg_weight: Rate = _avg(1.0, "Weight of the router's loss; 0 only logs it.")
    avg_learning_rate: Positive | None = _avg(None, "Learning rate of the router. Absent: --learning_rate.")

    @property
    def module_rate(self) -> float | None:
        return self.avg_learning_rate

    def problems(self, args) -> Iterator[str]:
        if str(args.data.image_aspect_ratio).startswith("anyres"):
            yield "--plugin avg_llava.py needs images in one tile: give --image_aspect_ratio square"


def router(text_config, tower, args) -> nn.Module:
    """Scores granularities, (I, G), by the means of an image and a question, (I, 2 * D)."""
    width = text_config.hidden_size
    last = nn.Linear(width, args.own["avg_llava"].avg_granularities)
    return nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), last)


@dataclass(frozen=True)
class Ranking(Wrapped):
    """Finds the likelihood of every sample's answer under every granularity before the forward pass."""

    part: "Granularities"

    def forward(self, engine, batch: Batch):
        found = []
        for number in range(self.part._flags.avg_granularities):
            self.part._fixed = number
            with torch.no_grad():
                found.append(sum_by_sample(engine(batch, LogProbs()), batch)[0])
        self.part._fixed, self.part._likelihood = None, torch.stack(found, 1)  # (samples, G)
        return self.objective.forward(engine, batch)


class Granularities(ContentTokens):
    """Pools every image to the granularity that the router picks."""

    _fixed = None  # a granularity for all images

    @property
    def _flags(self) -> Flags:
        return self.plan.args.own["avg_llava"]

    def training_objective(self, plain):
        return Ranking(HiddenLoss(plain, "router", self._flags.avg_weight, lambda batch: self._at, self._values), self)

    def choose(self, model, batch: Batch, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        patches = self.plan.model.tower.images.num_tokens
        if len(batch.placing.positions) % patches:
            raise DataError(f"--plugin avg_llava.py: an image has other than {patches} tokens: it was cut off")
        at = batch.placing.positions.view(-1, patches)  # (I, P)
        images, side = embeds[0][at], math.isqrt(patches)  # (I, P, D)
        self._at = at[:, 0]  # (I,): its first token stays
        self._samples = torch.bucketize(self._at, batch.cu_seqlens[1:].long(), right=True)  # (I,)
        question = _questions(batch, embeds[0])[self._samples]  # (I, D)
        self._scores = model.own_avg_llava(torch.cat([images.mean(1), question], 1).detach())  # (I, G)
        picked = self._scores.argmax(1) if self._fixed is None else torch.full_like(self._at, self._fixed)
        sides = [math.ceil(side / 2**number) for number in range(self._scores.shape[1])]
        grid = images.transpose(1, 2).unflatten(2, (side, side))  # (I, D, side, side)
        pooled = [functional.adaptive_avg_pool2d(grid, each).flatten(2).transpose(1, 2) for each in sides]
        pooled = torch.stack([functional.pad(each, (0, 0, 0, patches - each.shape[1])) for each in pooled])
        chosen = pooled[picked, torch.arange(len(at), device=at.device)]  # (I, P, D)
        counts = torch.tensor([each**2 for each in sides], device=at.device)[picked]  # (I,)
        stays = torch.ones_like(batch.input_ids[0], dtype=torch.bool)
        stays[at] = torch.arange(patches, device=at.device) < counts[:, None]
        return embeds.index_copy(1, at.flatten(), chosen.flatten(0, 1)[None]), stays

    def _values(self, model, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        likelihood, chances = self._likelihood[self._samples], self._scores.float().softmax(1)  # (I, G)
        is_better = likelihood[:, :, None] > likelihood[:, None]  # (I, G, G)
        hinge = functional.relu(self._flags.avg_margin - (chances[:, :, None] - chances[:, None]))
        best = functional.cross_entropy(self._scores.float(), likelihood.argmax(1), reduction="none")
        return (hinge * is_better).sum((1, 2)) + best


def _questions(batch: Batch, embeds: torch.Tensor) -> torch.Tensor:
    """The mean embedding of every sample's text before its first supervised token, (samples, D)."""
    num_samples, length = len(batch.cu_seqlens) - 1, len(embeds)
    owners = torch.arange(num_samples, device=embeds.device).repeat_interleave(batch.cu_seqlens.diff())
    first = torch.full_like(batch.cu_seqlens[1:].long(), length)
    first = first.scatter_reduce(0, batch.target_samples, batch.target_positions, "amin")
    is_text = torch.arange(length, device=embeds.device) <= first[owners]
    is_text[batch.placing.positions] = False
    sums = embeds.new_zeros(num_samples, embeds.shape[1]).index_add(0, owners, embeds * is_text[:, None])
    counts = is_text.new_zeros(num_samples, dtype=torch.long).index_add(0, owners, is_text.long())
    return sums / counts.clamp(min=1)[:, None]


extension = Extension(module=router, part=Granularities)
