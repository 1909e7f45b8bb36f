"""Boxes and points on images: their coordinate systems, and the formats in which models write them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Coordinate systems under ms-swift's names: pixels, or fractions of the image's width and height, from 0 to 1 or from 0
# to 1000.
BBOX_TYPES = ("real", "norm1", "norm1000")
BboxType = Literal["real", "norm1", "norm1000"]

Numbers = tuple[float, ...]  # left, top, right, bottom of a box; x, y of a point


@dataclass(frozen=True)
class BoxFormat:
    """The format in which a model writes boxes and points.

    bbox_type: coordinate system; "real" means pixels of the image as resized by the model's processor. box, point, ref:
    format strings of a box, a point and an object's name, with {} for each number or the name; {1} before {0} puts y
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
        """Return a line that describes the format to the user."""
        where = {"real": "pixels of the resized image", "norm1": "0 to 1", "norm1000": "0 to 1000"}[self.bbox_type]
        return f"boxes are written as {self.box.format('x1', 'y1', 'x2', 'y2')}, in {where}"

    def text(self, numbers: Numbers) -> str:
        """Write a box or a point in the model's format."""
        return (self.box if len(numbers) == 4 else self.point).format(*numbers)


# LLaVA-1.5's format, used in its data for RefCOCO and Visual Genome.
LLAVA_BOXES = BoxFormat("norm1")
# Format of most models that were trained on boxes, and default for models that were not.
THOUSANDTHS = BoxFormat("norm1000")


def coordinate_units(bbox_type: BboxType, size: tuple[int, int]) -> tuple[int, int]:
    """Return the number of units along an image's width and height. size: of the image in pixels."""
    return {"real": size, "norm1": (1, 1), "norm1000": (1000, 1000)}[bbox_type]


@dataclass(frozen=True)
class CoordinateFrame:
    """The rectangle that coordinates refer to. Pairs are (width, height) or (x, y).

    corner, size: its top left corner and its size, in pixels of the image. units: number of units along its sides.
    decimals: decimal places of a number, None for whole numbers.
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
