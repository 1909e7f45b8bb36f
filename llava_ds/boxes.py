"""Boxes and points on images: their coordinate systems, and how models write them. No files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Coordinate systems by ms-swift's names: pixels of an image, and fractions of its width and height in units of 1 or
# 1/1000.
BBOX_TYPES = ("real", "norm1", "norm1000")
BboxType = Literal["real", "norm1", "norm1000"]

Numbers = tuple[float, ...]  # left, top, right, bottom of a box; x, y of a point


@dataclass(frozen=True)
class BoxFormat:
    """How a model writes boxes and points.

    bbox_type: coordinate system, where "real" means pixels of the image as resized by its processor; box, point, ref:
    formats of a box, a point, and the name of an object, with {} for each number or the name; {1} before {0} puts y
    before x.
    """

    bbox_type: BboxType
    box: str = "[{}, {}, {}, {}]"
    point: str = "[{}, {}]"
    ref: str = "{}"

    @property
    def decimals(self) -> int | None:
        """Decimal places of a number; None for whole numbers."""
        return 2 if self.bbox_type == "norm1" else None

    def describe(self) -> str:
        """Describe the format in a line for a person."""
        where = {"real": "pixels of the resized image", "norm1": "0 to 1", "norm1000": "0 to 1000"}[self.bbox_type]
        return f"boxes are written as {self.box.format('x1', 'y1', 'x2', 'y2')}, in {where}"

    def text(self, numbers: Numbers) -> str:
        """Write a box or a point in the model's format."""
        return (self.box if len(numbers) == 4 else self.point).format(*numbers)


# LLaVA-1.5's format, used in its data for RefCOCO and Visual Genome.
LLAVA_BOXES = BoxFormat("norm1")
# For models that were not trained on boxes, and for most that were.
THOUSANDTHS = BoxFormat("norm1000")


def coordinate_units(bbox_type: BboxType, size: tuple[int, int]) -> tuple[int, int]:
    """Units along the width and height of an image of this size in pixels."""
    return {"real": size, "norm1": (1, 1), "norm1000": (1000, 1000)}[bbox_type]


@dataclass(frozen=True)
class CoordinateFrame:
    """The rectangle in which coordinates are counted. Pairs are (width, height) or (x, y).

    corner: its top left corner in pixels of the image; size: in pixels of the image; units: along its sides; decimals:
    decimal places of a number, None for whole numbers.
    """

    corner: tuple[float, float]
    size: tuple[float, float]
    units: tuple[float, float]
    decimals: int | None

    def numbers(self, pixels: Sequence[float]) -> Numbers:
        """Convert a box or point in pixels of the image to the numbers that a model writes."""
        return tuple(
            round((value - self.corner[i % 2]) / self.size[i % 2] * self.units[i % 2], self.decimals)
            for i, value in enumerate(pixels)
        )

    def pixels(self, numbers: Sequence[float]) -> Numbers:
        """Convert a box or point written by a model to pixels of the image."""
        return tuple(
            value / self.units[i % 2] * self.size[i % 2] + self.corner[i % 2] for i, value in enumerate(numbers)
        )
