# N image tiles, P patches, F features placed in a pack, C tower width, D language-model width
"""Ross: the hidden states at image positions have to reconstruct the image's features.

The idea of reconstructive visual instruction tuning (arXiv 2410.09575), in its regressing form: a small head predicts
the frozen tower's feature of each patch from the language model's last hidden state at the patch's token, and one minus
their cosine similarity is added to the loss. Written from the paper, whose best form denoises latents instead.

    --plugin examples/plugins/ross.py --ross_weight 0.5 --ross_learning_rate 1e-3
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from llava_ds.batch import Batch
from llava_ds.config.bounds import Positive, Rate
from llava_ds.config.flags import flags_of
from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension, ExtensionFlags, Number, SessionPart
from llava_ds.extensions.plugins.hidden_loss import HiddenLoss

_ross, _ = flags_of("ross")


@dataclass(frozen=True)
class Flags(ExtensionFlags):
    """Flags of the reconstruction."""

    numbers: ClassVar = {"ross": Number("One minus the cosine of reconstructed features", "ross {:.3f}")}

    ross_weight: Rate = _ross(0.5, "Weight of the reconstruction in the loss; 0 only logs it.")
    ross_learning_rate: Positive | None = _ross(None, "Learning rate of the head. Absent: --learning_rate.")

    @property
    def module_rate(self) -> float | None:
        return self.ross_learning_rate

    def problems(self, args) -> Iterator[str]:
        objective, ratio = args.training.objective, str(args.data.image_aspect_ratio)
        if objective != "sft":
            yield f"--plugin ross.py with --objective {objective}: give sft"
        if ratio.startswith("anyres"):
            yield f"--plugin ross.py with --image_aspect_ratio {ratio}: pooled tokens are no patches, give pad"


def head(text_config, tower, args) -> nn.Module:
    """Predicts features (F, C) from hidden states (F, D)."""
    width = text_config.hidden_size
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, tower.width))


class Reconstruction(SessionPart):
    """Keeps the tower's features of a forward pass, and compares."""

    def built(self, model) -> None:
        if self.plan.model.architecture is not None or self.plan.model.tower.stride > 1:
            raise ConfigError("--plugin ross.py needs a LLaVA whose tokens are the tower's patches, one to one")
        model.vision_tower.register_forward_hook(self._keep)

    def training_objective(self, plain):
        return HiddenLoss(plain, "ross", self.plan.args.own["ross"].ross_weight, _features_at, self._values)

    def _keep(self, tower: nn.Module, inputs: tuple, features: torch.Tensor) -> None:
        self._features = features.detach()  # (N, P, C)

    def _values(self, model, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        table = self._features.flatten(0, 1)  # (N * P, C)
        wanted = table.index_select(0, batch.placing.features)  # (F, C)
        found = model.own_ross(hidden.to(table.dtype))
        return 1 - functional.cosine_similarity(found.float(), wanted.float(), dim=1)


def _features_at(batch: Batch) -> torch.Tensor:
    """The positions of placed features, (F,): newlines follow them."""
    return batch.placing.positions[: len(batch.placing.features)]


extension = Extension(module=head, part=Reconstruction)
