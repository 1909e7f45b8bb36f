"""Boxes and points on images: the coordinates that a model gives them in, and how it writes them. No files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Coordinates by ms-swift's names of them: pixels of an image, and fractions of its width and height in units of 1 or
# 1/1000.
BBOX_TYPES = ("real", "norm1", "norm1000")
BboxType = Literal["real", "norm1", "norm1000"]

Numbers = tuple[float, ...]  # of a box: left, top, right, bottom; of a point: x, y


@dataclass(frozen=True)
class BoxFormat:
    """The boxes and points of a model.

    bbox_type: their coordinates, where "real" are pixels of the image as its processor resizes it; box, point, ref:
    what is written for a box, a point, and the name of an object, with {} for each number and for the name; with
    {1} and {0}, y comes before x.
    """

    bbox_type: BboxType
    box: str = "[{}, {}, {}, {}]"
    point: str = "[{}, {}]"
    ref: str = "{}"

    @property
    def decimals(self) -> int | None:
        """Of a number; None for whole numbers."""
        return 2 if self.bbox_type == "norm1" else None

    def describe(self) -> str:
        """A line for a person."""
        where = {"real": "pixels of the resized image", "norm1": "0 to 1", "norm1000": "0 to 1000"}[self.bbox_type]
        return f"boxes are written as {self.box.format('x1', 'y1', 'x2', 'y2')}, in {where}"

    def text(self, numbers: Numbers) -> str:
        """A box or a point as the model writes it."""
        return (self.box if len(numbers) == 4 else self.point).format(*numbers)


# LLaVA-1.5's, which its data have for RefCOCO and Visual Genome.
LLAVA_BOXES = BoxFormat("norm1")
# Of models that were not trained on boxes, and of most that were.
THOUSANDTHS = BoxFormat("norm1000")


def coordinate_units(bbox_type: BboxType, size: tuple[int, int]) -> tuple[int, int]:
    """Units along the width and the height of an image with this size in pixels."""
    return {"real": size, "norm1": (1, 1), "norm1000": (1000, 1000)}[bbox_type]


@dataclass(frozen=True)
class CoordinateFrame:
    """The rectangle that coordinates count from and to. Pairs are of width and height, or of x and y.

    corner: its left top corner in pixels of the image; size: in pixels of the image; units: along its sides; decimals:
    of a number, None for whole numbers.
    """

    corner: tuple[float, float]
    size: tuple[float, float]
    units: tuple[float, float]
    decimals: int | None

    def numbers(self, pixels: Sequence[float]) -> Numbers:
        """A box or point in pixels of the image, as the numbers that a model writes."""
        return tuple(
            round((value - self.corner[i % 2]) / self.size[i % 2] * self.units[i % 2], self.decimals)
            for i, value in enumerate(pixels)
        )

    def pixels(self, numbers: Sequence[float]) -> Numbers:
        """A box or point that a model writes, in pixels of the image."""
        return tuple(
            value / self.units[i % 2] * self.size[i % 2] + self.corner[i % 2] for i, value in enumerate(numbers)
        )
