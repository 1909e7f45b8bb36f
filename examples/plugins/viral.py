# N image tiles, P patches of the tower, F features placed in a pack, E width of the second encoder, D of the model
"""VIRAL: hidden states at image positions stay close to the features of a frozen second encoder.

The idea of visual representation alignment (arXiv 2509.07979): a vision encoder that is not part of the model, such as
DINOv2, sees the same images; a small head maps the language model's hidden states at image positions to its width, and
one minus the cosine similarity is added to the loss. Written from the paper, which takes the hidden states of a middle
layer; here they are the last.

    --plugin examples/plugins/viral.py --viral_encoder dinov2-base --viral_weight 0.5
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from llava_ds.batch import Batch
from llava_ds.config.bounds import Rate
from llava_ds.config.flags import flags_of
from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension, ExtensionFlags, Number, SessionPart
from llava_ds.extensions.plugins.hidden_loss import HiddenLoss

_viral, _ = flags_of("viral")
DEPTH = 2  # layers of the head


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the alignment."""

    numbers: ClassVar = {"viral": Number("One minus the cosine with the second encoder", "viral {:.3f}")}

    viral_encoder: str | None = _viral(None, "Folder of the second encoder, of transformers' AutoModel.", path="model")
    viral_weight: Rate = _viral(0.5, "Weight of the alignment in the loss; 0 only logs it.")

    def problems(self, args) -> Iterator[str]:
        ratio = str(args.data.image_aspect_ratio)
        if self.viral_encoder is None:
            yield "--viral_encoder is missing: give the folder of a vision encoder"
        if args.training.objective != "sft":
            yield f"--plugin viral.py with --objective {args.training.objective}: give sft"
        if ratio.startswith("anyres"):
            yield f"--plugin viral.py with --image_aspect_ratio {ratio}: pooled tokens are no patches, give pad"


def encoder_config(folder: str):
    """Read the second encoder's configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return getattr(config, "vision_config", config)


def head(text_config, tower, args) -> nn.Module:
    """Maps hidden states (F, D) to features (F, E)."""
    width = encoder_config(args.own["viral"].viral_encoder).hidden_size
    return nn.Sequential(
        nn.Linear(text_config.hidden_size, width),
        *(layer for _ in range(DEPTH - 1) for layer in (nn.SiLU(), nn.Linear(width, width))),
    )


class Alignment(SessionPart):
    """Holds the encoder, outside of the model: it is not saved, and every rank has all of it."""

    def built(self, model) -> None:
        from transformers import AutoModel

        if self.plan.model.architecture is not None or self.plan.model.tower.stride > 1:
            raise ConfigError("--plugin viral.py needs a LLaVA whose tokens are the tower's patches, one to one")
        flags = self.plan.args.own["viral"]
        config = encoder_config(flags.viral_encoder)
        encoder = AutoModel.from_pretrained(flags.viral_encoder, local_files_only=True)
        self._encoder = getattr(encoder, "vision_model", encoder).eval().requires_grad_(False).to(self.ranks.device)
        self._size, self._patch = config.image_size, config.patch_size
        self._side = self.plan.model.tower.images.size // self.plan.model.tower.images.patch_size

    def training_objective(self, plain):
        return HiddenLoss(plain, "viral", self.plan.args.own["viral"].viral_weight, _features_at, self._values)

    @torch.no_grad()
    def _features(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the encoder's features of tiles (N, 3, S, S) uint8 on the tower's grid: (N * P, E)."""
        images = functional.interpolate(tiles.float() / 127.5 - 1, (self._size, self._size), mode="bilinear")
        patches = self._encoder(images).last_hidden_state[:, -((self._size // self._patch) ** 2) :].float()
        grid = patches.transpose(1, 2).unflatten(2, (math.isqrt(patches.shape[1]),) * 2)  # (N, E, side, side)
        return functional.adaptive_avg_pool2d(grid, self._side).flatten(2).transpose(1, 2).flatten(0, 1)

    def _values(self, model, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        wanted = self._features(batch.pixel_values).index_select(0, batch.placing.features)  # (F, E)
        found = model.own_viral(hidden)
        return 1 - functional.cosine_similarity(found.float(), wanted, dim=1)


def _features_at(batch: Batch) -> torch.Tensor:
    """The positions of placed features, (F,): newlines follow them."""
    return batch.placing.positions[: len(batch.placing.features)]


extension = Extension(module=head, part=Alignment)
