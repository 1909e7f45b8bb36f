"""Sizes of pictures on their way to the tower: pure arithmetic, no tensors, no files."""


def num_image_tokens(image_size: int, patch_size: int) -> int:
    """Features that one picture gives: one per patch of the square, the class token dropped."""
    return (image_size // patch_size) ** 2


def resized_size(width: int, height: int, short_side: int) -> tuple[int, int]:
    """(width, height) after the shorter side was scaled to short_side.

    Source: transformers' get_resize_output_image_size with default_to_square=False, which rounds the long side down.
    """
    if width <= height:
        return short_side, int(short_side * height / width)
    return int(short_side * width / height), short_side


def centre_box(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of the size x size square in the middle, for a picture at least that large.

    Source: transformers' center_crop, which rounds the margins down.
    """
    left, top = (width - size) // 2, (height - size) // 2
    return left, top, left + size, top + size


def square_padding(width: int, height: int) -> tuple[int, int, int]:
    """(side, left, top): the square that holds the picture, and where the picture's corner goes in it.

    Source: LLaVA's expand2square.
    """
    side = max(width, height)
    return side, (side - width) // 2, (side - height) // 2
