"""Boxes, points and names of objects in a record, in ms-swift's form: under "objects", with marks in the text."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from llava_ds.boxes import BBOX_TYPES, BboxType
from llava_ds.constants import IMAGE_TOKEN, DataError
from llava_ds.data.sample import BOX_MARK, REF_MARK, Box, Message
from llava_ds.data.sources.options import nearest, short

OBJECTS = "objects"
KEYS = ("ref", "bbox", "bbox_type", "image_id")
# A mark and the backslashes before it. An odd number of them makes it plain text; each pair is one backslash.
MARKS = re.compile(rf"(\\*)({BOX_MARK}|{REF_MARK})")
MOST = 1e9  # largest coordinate: no image is this large

_LAYOUT = '{"ref": ["a dog"], "bbox": [[left, top, right, bottom]]}'


def objects_of(
    record: dict, messages: Sequence[Message], num_images: int, bbox_type: BboxType
) -> tuple[tuple[str, ...], tuple[Box, ...]]:
    """Return the names and boxes for the marks of a conversation, in order.

    num_images: number of images in the record; bbox_type: default for records without one. If the text has no marks,
    "objects" may have any value. Raises DataError if the marks and "objects" don't match.
    """
    found = [match.groups() for message in messages for match in MARKS.finditer(message.text)]
    wanted = Counter(mark for backslashes, mark in found if len(backslashes) % 2 == 0)
    if not wanted:
        return (), ()
    objects = record.get(OBJECTS)
    if not isinstance(objects, dict):
        found = "nothing" if objects is None else short(objects)
        words = " and ".join(f"\\{mark}" for mark in wanted)
        raise DataError(
            f"has {found} under {OBJECTS!r} for the marks in its text, expected {_LAYOUT}; {words} "
            f"{'are' if len(wanted) > 1 else 'is'} the word alone"
        )
    if unknown := [key for key in objects if key not in KEYS]:
        raise DataError(f"has the key {short(unknown[0])} in {OBJECTS!r}: {nearest(unknown[0], KEYS)}")
    refs, boxes = (_list(objects, key) for key in ("ref", "bbox"))
    for mark, found, key in ((REF_MARK, refs, "ref"), (BOX_MARK, boxes, "bbox")):
        if wanted[mark] != len(found):
            raise DataError(
                f"has {len(found)} under {key!r} of {OBJECTS!r}, but its text has {wanted[mark]} {mark} marks: make "
                f"them equal (\\{mark} is the word alone)"
            )
    if strange := [ref for ref in refs if not _is_name(ref)]:
        raise DataError(f"has {short(strange[0])} under 'ref' of {OBJECTS!r}, expected a name without marks")
    bbox_type = objects.get("bbox_type") or bbox_type
    if bbox_type not in BBOX_TYPES:
        raise DataError(f"has the bbox_type {short(bbox_type)} in {OBJECTS!r}, expected {' or '.join(BBOX_TYPES)}")
    images = _images(objects, len(boxes), num_images)
    return tuple(refs), tuple(Box(image, _numbers(box), bbox_type) for image, box in zip(images, boxes, strict=True))


def fill_marks(text: str, value: Callable[[str], str]) -> str:
    """Replace every mark by its value, and remove the backslash before a mark that is plain text."""

    def fill(found: re.Match) -> str:
        backslashes, mark = found.groups()
        return backslashes[: len(backslashes) // 2] + (mark if len(backslashes) % 2 else value(mark))

    return MARKS.sub(fill, text) if BOX_MARK in text or REF_MARK in text else text


def _list(objects: dict, key: str) -> list:
    found = objects.get(key)
    if found is not None and not isinstance(found, list):
        raise DataError(f"has {short(found)} under {key!r} of {OBJECTS!r}, expected {_LAYOUT}")
    return found or []


def _is_name(ref: object) -> bool:
    return isinstance(ref, str) and ref.isprintable() and IMAGE_TOKEN not in ref and MARKS.search(ref) is None


def _images(objects: dict, num_boxes: int, num_images: int) -> list[int]:
    """Image index (from 0) of each box."""
    images = _list(objects, "image_id") or [0] * num_boxes
    if num_images > 1 and not objects.get("image_id") and num_boxes:
        raise DataError(
            f"has {num_images} images, and does not say which one its boxes are on: list each box's image, from 0, "
            f"under 'image_id' of {OBJECTS!r}"
        )
    if len(images) != num_boxes or not all(type(image) is int and 0 <= image < num_images for image in images):
        raise DataError(
            f"has {short(images)} under 'image_id' of {OBJECTS!r}, expected one of its {num_images} images, from 0, "
            f"for each of its {num_boxes} boxes"
        )
    return images


def _numbers(box: object) -> tuple[float, ...]:
    is_box = isinstance(box, list) and len(box) in (2, 4)
    if not is_box or not all(type(each) in (int, float) and abs(each) <= MOST for each in box):
        raise DataError(f"has the box {short(box)}, expected left, top, right and bottom, or x and y of a point")
    return tuple(box)
