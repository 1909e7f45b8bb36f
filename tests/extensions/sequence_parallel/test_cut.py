"""A micro-batch cut into the parts of several ranks: together they are the whole, and each needs its own images."""

import dataclasses
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from random_samples import ALL, SIZE, SQUARE, P, random_samples, sample

from llava_ds.batch import Batch
from llava_ds.constants import IMAGE_TOKEN_INDEX
from llava_ds.data.collate import collate
from llava_ds.data.shared_loader import without
from llava_ds.extensions.sequence_parallel.cut import cut
from llava_ds.geometry import ImageOptions
from llava_ds.layouts import MediaLayout
from llava_ds.model.llava import merge_features

WIDTH = 3


@dataclass(frozen=True)
class WholeOptions(ImageOptions):
    """Of a tower that takes whole images, for a language model with positions on three axes."""

    def tower_inputs(self, layouts):
        return {"cells": [layout.cells for layout in layouts for _ in range(layout.moments)] or ["blank"]}

    def position_ids(self, input_ids, layouts):
        return torch.stack([torch.arange(len(input_ids)) * axis for axis in (1, 2, 3)])


WHOLE = WholeOptions(SIZE, 2, (0.5, 0.5, 0.5))


def cells_of(across: int, down: int, moments: int) -> MediaLayout:
    """An image's layout, or a video's, whose tiles are cells."""
    n, box = across * down * moments, (0, 0, 2, 2)
    return MediaLayout(
        n, n * P, 2, None, box, None, None, "none", False, (), cells=(across, down), moments=moments
    )  # fmt: skip


def parts_of(samples, options, ranks) -> tuple[Batch, list[tuple[Batch, list[int]]]]:
    """The whole batch, and each rank's part with the numbers of its tiles."""
    bare = collate(samples, options, with_pixels=False)
    layouts = list({id(one): layout for each in samples for one, layout in each.media}.values())
    return collate(samples, options), [cut(bare, options, layouts, rank, ranks) for rank in range(ranks)]


def merged(batch: Batch, features: torch.Tensor) -> torch.Tensor:
    """(T, WIDTH): what stands at image positions, zeros elsewhere; a newline is -1."""

    def newline(placed: torch.Tensor, number: int) -> torch.Tensor:
        return torch.cat([placed, placed.new_full((number - len(placed), WIDTH), -1)])

    return merge_features(torch.zeros(1, batch.input_ids.shape[1], WIDTH), features, batch.placing, newline)[0][0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("seed", range(8))
def test_the_parts_are_the_whole(seed, options, ranks):
    whole, parts = parts_of(random_samples(seed, options), options, ranks)
    length = whole.input_ids.shape[1]
    assert len({part.input_ids.shape[1] for part, _ in parts}) == 1
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part, _ in parts], 1)
        assert torch.equal(joined[:, :length], getattr(whole, name)) and joined.shape[1] - length < ranks
    firsts = range(0, joined.shape[1], joined.shape[1] // ranks)
    for name in ("targets", "target_samples"):
        assert torch.equal(torch.cat([getattr(part, name) for part, _ in parts]), getattr(whole, name))
    positions = [part.target_positions + first for (part, _), first in zip(parts, firsts)]
    assert torch.equal(torch.cat(positions), whole.target_positions)
    # All ranks know where every sample starts; what was added is a sample of its own, asked for nothing.
    for part, _ in parts:
        assert part.cu_seqlens[: len(whole.cu_seqlens)].tolist() == whole.cu_seqlens.tolist()
        assert part.cu_seqlens[-1] == joined.shape[1] and len(part.sources) == len(part.cu_seqlens) - 1
        assert part.max_seqlen == max(b - a for a, b in itertools.pairwise(part.cu_seqlens.tolist()))

    # Features of tiles are numbers of their own, of which each rank computes those of its tiles.
    features = torch.randn(len(whole.pixel_values), P, WIDTH, generator=torch.Generator().manual_seed(seed))
    blank = torch.full((1, P, WIDTH), torch.nan)
    placed = [merged(part, features[tiles] if tiles else blank) for part, tiles in parts]
    assert torch.equal(torch.cat(placed)[:length], merged(whole, features))


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("seed", range(8))
def test_a_rank_takes_the_tiles_that_its_tokens_need_and_no_other(seed, options):
    samples, ranks = random_samples(seed, options), 4
    whole, parts = parts_of(samples, options, ranks)
    features = torch.zeros(len(whole.pixel_values), P, WIDTH, requires_grad=True)
    placed = merged(whole, features)
    bounds = -(-len(placed) // ranks)
    for rank, (_, tiles) in enumerate(parts):
        own = placed[rank * bounds : (rank + 1) * bounds]
        gradient = torch.zeros_like(features)
        if own.requires_grad and len(own):
            # The largest of equal features alone has a gradient, so all of them count that stand in its table.
            (gradient,) = torch.autograd.grad(own.sum(), features, retain_graph=True)
        assert set(tiles) >= set(gradient.abs().sum((1, 2)).nonzero()[:, 0].tolist())
        if not options.pools_tiles:
            assert set(tiles) == set(gradient.abs().sum((1, 2)).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_of_the_loss_go_with_their_targets(ranks):
    """Each weighs what its token's id says, so that a weight in another's place would be seen."""
    samples = [sample([1, 2, 3, 4, 5]), sample([6, 7, 8, 9])]
    weighed = dataclasses.replace(samples[1], weights=samples[1].labels.float())
    whole, parts = parts_of([samples[0], weighed], SQUARE, ranks)
    assert whole.target_weights.tolist() == [1, 1, 1, 1, 7, 8, 9] and whole.target_weights.dtype == torch.float32
    assert torch.equal(torch.cat([part.target_weights for part, _ in parts]), whole.target_weights)
    for part, _ in parts:
        rest = without(part, {0})
        assert torch.equal(rest.target_weights, rest.targets.float())
    assert all(part.target_weights is None for part, _ in parts_of(samples, SQUARE, ranks)[1])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_a_tower_that_takes_whole_images_gets_whole_ones(seed, ranks):
    """And whole moments of videos; an image on both sides of a cut goes to both ranks."""
    rng, samples = random.Random(seed), []
    for _ in range(rng.randint(1, 4)):
        layouts = [cells_of(*(rng.randint(1, 3) for _ in range(3))) for _ in range(rng.randint(0, 2))]
        ids = list(range(1, rng.randint(2, 6)))
        for layout in layouts:
            ids += [IMAGE_TOKEN_INDEX] * layout.num_tokens + [5]
        samples.append(sample(ids[: rng.randint(1, len(ids))], layouts=layouts))
    whole, parts = parts_of(samples, WHOLE, ranks)
    length = whole.input_ids.shape[1]
    joined = torch.cat([part.position_ids for part, _ in parts], 2)
    assert torch.equal(joined[..., :length], whole.position_ids)

    moments, first = [], 0  # (cells of the image, its tiles) of each
    for layout in (layout for each in samples for _, layout in each.media):
        for _ in range(layout.moments):
            moments.append((layout.cells, range(first, first + layout.num_tiles // layout.moments)))
            first = moments[-1][1].stop
    features = torch.randn(len(whole.pixel_values), P, WIDTH, generator=torch.Generator().manual_seed(seed))
    expected, blank = merged(whole, features), torch.full((1, P, WIDTH), torch.nan)
    step = parts[0][0].input_ids.shape[1]
    for rank, (part, tiles) in enumerate(parts):
        own = expected[rank * step : (rank + 1) * step]
        assert torch.equal(merged(part, features[tiles] if tiles else blank)[: len(own)], own)
        rows = {tuple(row) for row in own.tolist()}
        touched = [one for one in moments if rows & {tuple(row) for i in one[1] for row in features[i].tolist()}]
        assert tiles == sorted(itertools.chain(*(tiles for _, tiles in touched)))
        assert part.tower == {"cells": [cells for cells, _ in touched] or ["blank"]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_host_knows_the_lengths_of_all_samples(ranks):
    for part, _ in parts_of([sample([1, 2, 3, 4, 5]), sample([6, 7])], SQUARE, ranks)[1]:
        assert list(part.lengths) == part.cu_seqlens.diff().tolist()
