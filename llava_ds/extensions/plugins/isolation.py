# T tokens of a pack, N tiles of its images, S supervised positions, D language-model width
"""Check that no sample's loss depends on other samples of its pack.

All targets outside one sample get weight 0, also in a HiddenLoss. Gradients at other samples' embeddings and image
features then have to be exactly zero. Changing these inputs must not change the loss: this finds dependences without a
gradient, such as a detached mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from llava_ds.batch import Batch
from llava_ds.extensions.plugins.hidden_loss import COUNTED
from llava_ds.model.llava import LlavaModel

Numbers = Mapping[str, float]
Gradients = Mapping[str, torch.Tensor]  # at EMBEDDINGS (T, D) and FEATURES (N, P, C)
EMBEDDINGS, FEATURES = "token embeddings", "image features"


@dataclass(frozen=True)
class Owners:
    """The sample that each sequence, token (T,) and tile (N,) of a pack belongs to, int64; -1 for a blank tile."""

    sequences: torch.Tensor
    tokens: torch.Tensor
    tiles: torch.Tensor

    @classmethod
    def of(cls, pack: Batch, alone: Sequence[Batch]) -> "Owners | None":
        """Find the samples in a pack; None if they aren't laid end to end. alone: a batch per sample."""
        shown = [each.pixel_values[: len(each.pixel_values) * bool(len(each.placing.positions))] for each in alone]
        blank = not len(pack.placing.positions)
        if not torch.equal(pack.input_ids, torch.cat([each.input_ids for each in alone], 1)):
            return None
        if not (blank or torch.equal(pack.pixel_values, torch.cat(shown))):
            return None

        def owners(counts: list[int]) -> torch.Tensor:
            numbers = torch.arange(len(alone)).repeat_interleave(torch.tensor(counts))
            return numbers.to(pack.input_ids.device)

        tiles = torch.full((len(pack.pixel_values),), -1, device=pack.input_ids.device)
        return cls(
            owners([len(each.cu_seqlens) - 1 for each in alone]),
            owners([each.input_ids.shape[1] for each in alone]),
            tiles if blank else owners([len(each) for each in shown]),
        )

    def split(self, gradients: Gradients) -> dict[str, torch.Tensor]:
        """Return the gradients at each sample's inputs, keyed by name_of()."""
        owners = {EMBEDDINGS: self.tokens, FEATURES: self.tiles}
        return {
            name_of(name, index): gradient[owners[name] == index]
            for name, gradient in gradients.items()
            for index in range(int(self.sequences[-1]) + 1)
        }


def name_of(inputs: str, index: int) -> str:
    """Name a sample's inputs."""
    return f"the {inputs} of sample {index + 1}"


@dataclass(frozen=True)
class Isolation:
    """A pack whose samples are checked one after the other.

    run: runs forward and backward; returns the loss and other numbers, and gradients. values: returns the numbers.
    """

    model: LlavaModel
    pack: Batch
    owners: Owners
    run: Callable[[Batch], tuple[Numbers, Gradients]]
    values: Callable[[Batch], Numbers]

    def leak(self, alone: Sequence[Numbers], tolerance: float) -> str | None:
        """Describe a sample's number or gradient that depends on other samples, or None.

        alone: the numbers of each sample when it is alone in a pack. tolerance: relative.
        """
        none, plain = self.run(self._counting(-1))  # a plugin's loss may ignore the weights
        for index, own in enumerate(alone):
            batch = self._counting(index)
            found, gradients = self.run(batch)
            what = f"sample {index + 1} of {len(alone)} in one pack"
            if at := self._reached(index, gradients, plain):
                return f"the loss of {what} has a gradient at {at}, which is not zero"
            changed = self._changed(batch, index)
            rest = self._changed(self._counting(-1), index) if any(none.values()) else none
            for name, value in reversed(found.items()):
                before, after = value - none[name], changed[name] - rest[name]
                limit = tolerance / 10 * max(abs(value), abs(changed[name]), abs(none[name]))
                if not abs(before - after) <= limit:
                    return f"{name} of {what} is {before:g}, but {after:g} after a change of the other samples"
                if not none[name] and not abs(value - own[name]) <= tolerance * max(abs(value), abs(own[name])):
                    return f"{name} of {what} is {value:g}, but {own[name]:g} alone"
        return None

    def _counting(self, index: int) -> Batch:
        """Return the pack with weight only on sample `index`; -1: on no sample."""
        counted = self.owners.sequences == index  # (samples,)
        kept = counted.index_select(0, self.pack.target_samples).float()  # (S,)
        weights = kept if self.pack.target_weights is None else kept * self.pack.target_weights
        return replace(self.pack.with_extra(**{COUNTED: counted}), target_weights=weights)

    def _reached(self, index: int, gradients: Gradients, plain: Gradients) -> str | None:
        """Name another sample's inputs whose gradient differs from `plain` (no sample has weight); None if equal."""
        for name, owners in ((EMBEDDINGS, self.owners.tokens), (FEATURES, self.owners.tiles)):
            if name not in gradients:
                continue
            difference = (gradients[name] - plain.get(name, 0)).flatten(1)  # (T, D) or (N, P * C)
            wrong = ((difference != 0) & difference.isfinite()).any(1) & (owners != index)
            if bool(wrong.any()):
                other = int(owners[wrong][0])
                return name_of(name, other) if other >= 0 else f"the {name} of a blank image"
        return None

    def _changed(self, batch: Batch, index: int) -> Numbers:
        """Compute the numbers of a batch after changing embeddings and images of all samples but `index`."""
        others = (self.owners.tokens != index)[None, :, None]  # (1, T, 1)
        is_other = (self.owners.tiles != index).view(-1, *[1] * (batch.pixel_values.ndim - 1))

        def change(module: nn.Module, given: tuple, embeds: torch.Tensor) -> torch.Tensor:
            return torch.where(others, -2 * embeds.flip(-1), embeds) if embeds.shape[:2] == others.shape[:2] else embeds

        handle = self.model.language_model.get_input_embeddings().register_forward_hook(change)
        pixels = torch.where(is_other, 255 - batch.pixel_values, batch.pixel_values)
        try:
            return self.values(replace(batch, pixel_values=pixels))
        finally:
            handle.remove()


@contextmanager
def watching(model: LlavaModel, batch: Batch) -> Iterator[dict[str, torch.Tensor]]:
    """Collect gradients at token embeddings and at the tower's features, also of frozen weights."""
    seen: dict[str, torch.Tensor] = {}

    def add(name: str, gradient: torch.Tensor) -> None:
        gradient = gradient.detach().float().flatten(0, 1) if name == EMBEDDINGS else gradient.detach().float()
        seen[name] = seen.get(name, 0) + gradient

    def watch(name: str, size: tuple[int, ...], module: nn.Module, given: tuple, output: object) -> object:
        if not isinstance(output, torch.Tensor) or output.shape[: len(size)] != size:
            return output
        with torch.enable_grad():  # a frozen tower runs without gradients
            leaf = output if output.requires_grad else output.detach().requires_grad_()
            leaf.register_hook(partial(add, name))
            return leaf.clone()  # later code may change it in place

    tiles, tokens = batch.pixel_values.shape[:1], batch.input_ids.shape
    hooks = [
        model.language_model.get_input_embeddings().register_forward_hook(partial(watch, EMBEDDINGS, tokens)),
        model.vision_tower.register_forward_hook(partial(watch, FEATURES, tiles)),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
