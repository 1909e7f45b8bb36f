"""Synthetic sample lengths like LLaVA-1.5's training data, generated from a seed, to measure packing and speed.

Known (LLaVA-1.5, arXiv 2310.03744, table 7): the parts of the 665K mix and their numbers of records; 576 positions per
image; 40,688 text records, truncated at 2,048 tokens. Estimated: text length and share of answers in each part, from
their form (turns of a question and a short answer, captions, boxes in digits). The totals match the means estimated for
the real mix: 847 tokens per sample, 16.7 % of them supervised.
"""

from dataclasses import dataclass

import numpy as np

IMAGE_TOKENS = 576
MAX_LENGTH = 2048


@dataclass(frozen=True)
class Part:
    """Records of one form. text: mean text tokens, including the template; spread: standard deviation of their
    logarithm; answers: supervised fraction of the text; images: images per record; least: minimum text tokens.
    """

    num_records: int
    text: float
    spread: float
    answers: float
    images: int = 1
    least: int = 45


FINETUNE = {
    "llava conversation": Part(57_669, 345, 0.40, 0.62),
    "llava detail": Part(23_240, 165, 0.25, 0.65),
    "llava reasoning": Part(76_643, 215, 0.30, 0.68),
    "vqav2": Part(82_783, 175, 0.40, 0.14),
    "gqa": Part(72_140, 285, 0.45, 0.14),
    "okvqa": Part(8_998, 85, 0.30, 0.10),
    "ocrvqa": Part(80_000, 180, 0.30, 0.22),
    "a-okvqa": Part(66_160, 105, 0.20, 0.04),
    "textcaps": Part(21_953, 125, 0.35, 0.15),
    "refcoco": Part(48_447, 330, 0.65, 0.42),
    "visual genome": Part(86_417, 415, 0.35, 0.42),
    "sharegpt": Part(40_688, 1_750, 0.90, 0.80, images=0),
}
# 558K captions after an image, without questions: <image>, the caption, an end token.
PRETRAIN = {"captions": Part(558_128, 24, 0.40, 1.0, least=8)}


@dataclass(frozen=True)
class LengthMix:
    """Counts per sample, (S,) int64 each: tokens including image positions, images, and supervised tokens (targets)."""

    tokens: np.ndarray
    images: np.ndarray
    targets: np.ndarray


def length_mix(parts: dict[str, Part], num_samples: int, seed: int, image_tokens: int = IMAGE_TOKENS) -> LengthMix:
    """Sample num_samples samples from the parts (FINETUNE or PRETRAIN), in proportion to their numbers of records."""
    rng = np.random.default_rng(seed)
    table = list(parts.values())
    records = np.array([part.num_records for part in table])
    which = rng.choice(len(table), size=num_samples, p=records / records.sum())
    text, spread, answers, images, least = (
        np.array([getattr(part, name) for part in table])[which]
        for name in ("text", "spread", "answers", "images", "least")
    )
    # Log-normal with the given mean.
    drawn = np.exp(np.log(text) - spread**2 / 2 + spread * rng.standard_normal(num_samples))
    room = MAX_LENGTH - images * IMAGE_TOKENS
    written = np.clip(drawn.round().astype(np.int64), least, room)
    targets = np.clip((written * answers).round().astype(np.int64), 1, written - 1)
    return LengthMix(written + images * image_tokens, images, targets)
