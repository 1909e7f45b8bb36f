"""How far --fast_image_decoding is from the exact path, and how much faster: python tests/data/measure_decoding.py

Made-up photographs: clouds of noise at several scales, sharp-edged boxes and grain, as JPEG of quality 90.
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from llava_ds.data.images import load_media, probe
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import PictureOptions, media_layout

SIZES = ((640, 480), (1920, 1080), (4000, 3000))
NUM_PICTURES, NUM_ROUNDS = 4, 3


def photograph(width: int, height: int, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), 128, np.float32)
    for cells, strength in ((4, 60), (16, 45), (64, 30), (256, 16), (1024, 8)):
        rows, columns = height * cells // 4000 + 2, width * cells // 4000 + 2
        for channel in range(3):
            noise = Image.fromarray(rng.normal(0, strength, (rows, columns)).astype(np.float32))
            pixels[..., channel] += np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC))
    for _ in range(30):
        x, y = rng.integers(width), rng.integers(height)
        across, down = rng.integers(5, width // 5), rng.integers(5, height // 5)
        pixels[y : y + down, x : x + across] *= 0.3
        pixels[y : y + down, x : x + across] += 0.7 * rng.uniform(0, 255, 3)
    pixels += rng.normal(0, 3, (height, width, 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def load(media: Media, options: PictureOptions) -> tuple[torch.Tensor, float]:
    """The tiles and the processor time that they took."""
    sizes = probe(media, options)
    layout = media_layout("image", sizes, 1, options)
    started = time.process_time()
    return load_media(media, sizes, layout, options), time.process_time() - started


def main() -> None:
    print("size       ratio    mean   p99   max (of 255)   exact      fast   times faster")
    with tempfile.TemporaryDirectory() as folder:
        for width, height in SIZES:
            media = []
            for seed in range(NUM_PICTURES):
                path = Path(folder) / f"{width}-{seed}.jpg"
                photograph(width, height, seed).save(path, quality=90)
                media.append(Media("image", (FileRef(str(path)),)))
            for ratio in ("square", "pad", "anyres"):
                exact = PictureOptions(336, 14, (0.48, 0.46, 0.41), ratio)
                fast = dataclasses.replace(exact, fast_decoding=True)
                differences, times = [], ([], [])
                for _ in range(NUM_ROUNDS):  # one after the other, so that both see the machine as it is
                    for one in media:
                        (a, took_a), (b, took_b) = load(one, exact), load(one, fast)
                        times[0].append(took_a)
                        times[1].append(took_b)
                        differences.append((a.int() - b.int()).abs().flatten().numpy())
                all_of_them = np.concatenate(differences)
                slow_s, fast_s = map(statistics.median, times)
                print(
                    f"{width}x{height:<5} {ratio:7} {all_of_them.mean():6.3f} {np.percentile(all_of_them, 99):5.0f} "
                    f"{all_of_them.max():5} {slow_s * 1e3:16.1f} ms {fast_s * 1e3:6.1f} ms {slow_s / fast_s:10.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
