"""The fast way to resize: never more than 2 of 255 from Pillow's, whatever the picture and its size."""

import numpy as np
import pytest
import torch
from PIL import Image

from llava_ds.data.images import resize as resize_module
from llava_ds.data.images.resize import padded, resized

COLOUR = (122, 116, 104)


def pictures(width: int, height: int) -> list[Image.Image]:
    """Noise, the hardest noise, and edges as long as the picture."""
    rng = np.random.default_rng(width * height)
    shades = rng.integers(0, 256, (height, width, 3))
    stripes = np.broadcast_to(255 * (np.arange(width)[None, :, None] // 3 % 2), (height, width, 3))
    return [Image.fromarray(array.astype(np.uint8)) for array in (shades, 255 * (shades > 127), stripes)]


SIZES = [(48, 36), (640, 480), (480, 640), (427, 640), (641, 479), (23, 24), (1, 1), (1, 300), (300, 1), (7, 4000)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_fast_way_is_within_two_of_pillows(size):
    worst = 0
    for picture in pictures(*size):
        for way in (
            lambda fast: resized(picture, (336, 250), fast),  # noqa: B023
            lambda fast: resized(picture, (40, 24), fast),  # noqa: B023
            lambda fast: padded(picture, 90, COLOUR, fast),  # noqa: B023
        ):
            exact, fast = way(False), way(True)
            assert fast.shape == exact.shape and fast.dtype == torch.uint8
            worst = max(worst, int((exact.int() - fast.int()).abs().max()))
    assert worst <= 2


def test_one_colour_and_the_padding_keep_their_colour():
    plain = Image.new("RGB", (50, 31), COLOUR)
    for found in (padded(plain, 24, COLOUR, True), resized(plain, (24, 90), True)):
        assert (found == torch.tensor(COLOUR).view(3, 1, 1)).all()


def test_an_image_in_bands_is_the_same(monkeypatch):
    taken = [picture for size in [(50, 31), (31, 50), (1, 90), (200, 7)] for picture in pictures(*size)]

    def found() -> list[torch.Tensor]:
        return [padded(picture, 24, COLOUR, True) for picture in taken] + [resized(p, (30, 20), True) for p in taken]

    whole = found()
    monkeypatch.setattr(resize_module, "_BAND_PIXELS", 100)
    assert all(torch.equal(one, other) for one, other in zip(whole, found()))


def test_an_image_that_pillow_keeps_in_pieces_is_the_same():
    size = Image.core.get_block_size()
    found = []
    for one in (4096, size):
        Image.core.set_block_size(one)
        try:
            found += [padded(picture, 24, COLOUR, True) for picture in pictures(60, 40)]
        finally:
            Image.core.set_block_size(size)
    assert all(torch.equal(one, other) for one, other in zip(found[:3], found[3:]))
