"""Sample scenes of coloured shapes from a seed, and draw them with anti-aliased edges.

A scene has 1 to 4 things, each in a separate cell of a 3 x 3 grid and completely inside it, so that places and
relations are never ambiguous and things never overlap. Lengths are fractions of the image's side, y downwards.
"""

import dataclasses
import math
import zlib

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 215, 40),
    "purple": (160, 50, 190),
}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
GROUNDS = ("plain", "gradient", "stripes", "checks", "speckle")
MAX_THINGS = 4

_COLOUR_NAMES = tuple(COLOURS)
HELDOUT_ONE_IN = 8  # one arrangement in this many is never shown in training
SUPERSAMPLE = 3  # shapes are drawn larger by this factor and averaged down, for smooth edges


@dataclasses.dataclass(frozen=True)
class Thing:
    """One coloured shape. place: index in PLACES; x, y (centre) and size (diameter): fractions of the image's side."""

    colour: str
    shape: str
    place: int
    x: float
    y: float
    size: float
    turn: float  # radians


@dataclasses.dataclass(frozen=True)
class Scene:
    """Things in reading order, and the other inputs of draw_scene."""

    things: tuple
    ground: str
    side_px: int
    draw_seed: int

    @property
    def arrangement(self):
        return arrangement_of([(t.colour, t.shape, t.place) for t in self.things])


def arrangement_of(kinds):
    """Describe a scene in words. The text decides whether it is a training or a held-out scene."""
    return ", ".join(f"{colour} {shape} {PLACES[place]}" for colour, shape, place in kinds)


def is_heldout(arrangement):
    """Return True for arrangements that are reserved for held-out data. It depends only on the text."""
    return zlib.crc32(arrangement.encode()) % HELDOUT_ONE_IN == 0


def sample_scene(rng, heldout=False):
    """Sample a scene from the training arrangements, or from the held-out ones."""
    kinds = _sample_kinds(rng)
    while is_heldout(arrangement_of(kinds)) != heldout:
        kinds = _sample_kinds(rng)
    return Scene(
        things=tuple(_thing(rng, *kind) for kind in kinds),
        ground=GROUNDS[int(rng.integers(len(GROUNDS)))],
        side_px=int(rng.integers(64, 97)),
        draw_seed=int(rng.integers(2**31)),
    )


def _sample_kinds(rng):
    """Sample [(colour, shape, place)] in reading order.

    The number of things is uniform over 1 to 4. In two thirds of the scenes some things share a colour or a shape;
    otherwise the answers to "how many circles are there?" would almost always be one.
    """
    num = int(rng.integers(1, MAX_THINGS + 1))
    colours = [_COLOUR_NAMES[i] for i in rng.integers(0, len(COLOURS), num)]
    shapes = [SHAPES[i] for i in rng.integers(0, len(SHAPES), num)]
    repeat = rng.random()
    num_equal = int(rng.integers(min(2, num), num + 1))
    if repeat < 0.35:
        colours[:num_equal] = colours[:1] * num_equal
    elif repeat < 0.7:
        shapes[:num_equal] = shapes[:1] * num_equal
    places = rng.permutation(len(PLACES))[:num].tolist()  # unsorted: which of the things comes first is random
    return sorted(zip(colours, shapes, places, strict=True), key=lambda kind: kind[2])


def _thing(rng, colour, shape, place):
    size = rng.uniform(0.22, 0.29)
    slack = 1 / 3 - size - 0.02
    x = (place % 3 + 0.5) / 3 + slack * rng.uniform(-0.5, 0.5)
    y = (place // 3 + 0.5) / 3 + slack * rng.uniform(-0.5, 0.5)
    return Thing(colour, shape, place, float(x), float(y), float(size), float(rng.uniform(-0.2, 0.2)))


def draw_scene(scene):
    """Draw a scene as an RGB image of side_px x side_px pixels. Equal scenes give equal pixels."""
    rng = np.random.default_rng(scene.draw_seed)
    picture = Image.fromarray(_ground(rng, scene.ground, scene.side_px))
    for thing in scene.things:
        colour = np.clip(np.array(COLOURS[thing.colour]) + rng.integers(-22, 23, 3), 0, 255)
        left, top, mask = _shape_mask(thing, scene.side_px)
        picture.paste(tuple(int(c) for c in colour), (left, top), mask)
    return picture


def _ground(rng, kind, side):
    """Return a background, uint8 (side, side, 3). It is too grey to be mistaken for a thing."""
    light = rng.uniform(30, 225)
    other = np.clip(light + rng.choice((-1, 1)) * rng.uniform(12, 30), 15, 240)
    y, x = np.mgrid[:side, :side].astype(np.float32) / side
    period = rng.uniform(0.08, 0.25)
    angle = rng.uniform(0, math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)
    across = y * math.cos(angle) - x * math.sin(angle)
    if kind == "plain":
        mix = np.zeros_like(x)
    elif kind == "gradient":
        mix = (along - along.min()) / (along.max() - along.min())
    elif kind == "stripes":
        mix = (along / period % 1 < 0.5).astype(np.float32)
    elif kind == "checks":
        mix = ((along / period % 1 < 0.5) ^ (across / period % 1 < 0.5)).astype(np.float32)
    else:
        mix = rng.random((side, side), dtype=np.float32)
    grey = light + (other - light) * mix
    tint = rng.uniform(-8, 8, 3).astype(np.float32)
    return np.clip(grey[..., None] + tint, 0, 255).astype(np.uint8)


def _shape_mask(thing, side):
    """Return (left, top, mask): position of a thing's mask in pixels, and the mask with values from 0 to 255."""
    radius = thing.size * side / 2
    left, top = math.floor(thing.x * side - radius) - 1, math.floor(thing.y * side - radius) - 1
    width = math.ceil(2 * radius) + 3
    canvas = Image.new("L", (width * SUPERSAMPLE, width * SUPERSAMPLE))
    draw = ImageDraw.Draw(canvas)
    centre_x, centre_y = (thing.x * side - left) * SUPERSAMPLE, (thing.y * side - top) * SUPERSAMPLE
    reach = radius * SUPERSAMPLE
    if thing.shape == "circle":
        r = reach * 0.94
        draw.ellipse((centre_x - r, centre_y - r, centre_x + r, centre_y + r), fill=255)
    else:
        corners = _corners(thing.shape)
        cos, sin = math.cos(thing.turn), math.sin(thing.turn)
        turned = [(x * cos - y * sin, x * sin + y * cos) for x, y in corners]
        draw.polygon([(centre_x + reach * x, centre_y + reach * y) for x, y in turned], fill=255)
    return left, top, canvas.reduce(SUPERSAMPLE)


def _corners(shape):
    """Return a shape's corners (x, y), inside the unit circle."""
    if shape == "square":
        return [(-0.7, -0.7), (0.7, -0.7), (0.7, 0.7), (-0.7, 0.7)]
    if shape == "triangle":
        return [(0, -1), (0.9, 0.6), (-0.9, 0.6)]
    arm, long = 0.3, 0.93  # half the width and half the length of a cross's bars
    quarter = [(arm, -long), (arm, -arm), (long, -arm)]
    return quarter + [(-y, x) for x, y in quarter] + [(-x, -y) for x, y in quarter] + [(y, -x) for x, y in quarter]
