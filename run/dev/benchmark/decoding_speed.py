# S side of the tower's square input
"""Measure images per second per core, from JPEG to the tower's input, in LLaVA's code and both of our paths."""

import dataclasses
import os
import statistics
import tempfile
import time
from functools import partial

import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

from llava_ds.data.images.decode import load_media
from llava_ds.data.images.headers import probe
from llava_ds.data.sample import FileRef, Media
from llava_ds.geometry import ImageOptions, Size, media_layout

SIDE = 336
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PHOTO_SIZES = ((640, 480), (640, 427), (480, 640))  # COCO's sizes, the majority in LLaVA's data
RATIOS = ("pad", "square")


def measure_decoding(
    num_images: int, seconds: float, seed: int, sizes: tuple[Size, ...] = PHOTO_SIZES
) -> dict[str, dict[str, float]]:
    """Measure images per second per core for pad and square, their ratios, and the error of the fast path.

    Each image is decoded each way in turns, with one thread, for about `seconds` of processor time in total and at
    least once. Figures are medians over the images of each image's median time. Returns {ratio: {llava_per_s,
    ours_per_s, fast_per_s, fast_over_llava, fast_over_ours, max_error}}; errors are out of 255, against our exact path.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for i in range(num_images):
                paths.append(os.path.join(folder, f"{i}.jpg"))
                photograph(*sizes[i % len(sizes)], seed + i).save(paths[-1], quality=90)
            return {ratio: _measured(paths, ratio, seconds / len(RATIOS)) for ratio in RATIOS}
    finally:
        torch.set_num_threads(threads)


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Generate a photograph: clouds of noise at several scales, sharp-edged boxes and grain."""
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


def llava_pixels(path: str, processor: CLIPImageProcessorPil, aspect_ratio: str) -> torch.Tensor:
    """Decode like LLaVA's LazySupervisedDataset.__getitem__ and expand2square: (3, S, S) float32, normalised."""
    image = Image.open(path).convert("RGB")
    if aspect_ratio == "pad":
        width, height = image.size
        if width != height:
            side = max(width, height)
            square = Image.new(image.mode, (side, side), tuple(int(x * 255) for x in processor.image_mean))
            square.paste(image, ((side - width) // 2, (side - height) // 2))
            image = square
    return processor.preprocess(image, return_tensors="pt")["pixel_values"][0]


def _measured(paths: list[str], ratio: str, seconds: float) -> dict[str, float]:
    exact = ImageOptions(SIDE, 14, MEAN, ratio)
    fast = dataclasses.replace(exact, fast_decoding=True)
    square = {"height": SIDE, "width": SIDE}
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square, image_mean=MEAN, image_std=STD)
    ways = {
        "ours": partial(_loaded, options=exact),
        "fast": partial(_loaded, options=fast),
        "llava": partial(llava_pixels, processor=processor, aspect_ratio=ratio),
    }
    errors = [(ways["ours"](path).int() - ways["fast"](path).int()).abs() for path in paths]
    times: dict[str, list[list[float]]] = {way: [[] for _ in paths] for way in ways}
    ends = time.perf_counter() + seconds
    while not times["ours"][0] or time.perf_counter() < ends:
        for i, path in enumerate(paths):
            for way, load in ways.items():
                started = time.process_time()
                load(path)
                times[way][i].append(time.process_time() - started)
    taken = {way: statistics.median(map(statistics.median, each)) for way, each in times.items()}
    found = {f"{way}_per_s": 1 / took for way, took in taken.items()}
    found |= {f"fast_over_{way}": taken[way] / taken["fast"] for way in taken if way != "fast"}
    return found | {"max_error": max(int(one.max()) for one in errors)}


def _loaded(path: str, options: ImageOptions) -> torch.Tensor:
    media = Media("image", (FileRef(path),))
    sizes = probe(media, options)  # in training this runs once, before the start; its time is small
    return load_media(media, sizes, media_layout("image", sizes, 1, options), options)
