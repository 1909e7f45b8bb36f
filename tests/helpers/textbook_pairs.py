"""Preferences for tests, and what textbook loops over them need: padded batches and a schedule."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import toys
from PIL import Image
from transformers import AutoTokenizer

from llava_ds.data.dataset import PreflightOptions, open_encoded
from llava_ds.data.sample_order import SampleOrder
from llava_ds.data.sources import SourceOptions, open_sources

BATCH, IMAGE_ID = 4, 3
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def write_pairs(folder: Path, number: int) -> dict[str, str]:
    """Preferences in all forms, two of three with an image; the rejected answers differ in length."""
    rng = np.random.default_rng(3)
    (folder / "images").mkdir(parents=True)
    records = []
    for i in range(number):
        question, form = f"What is it, number {i}?", i % 3
        good, bad = (toys.ANSWERS[int(rng.integers(4))] + end for end in ("", " No.", " Two cats.")[:2])
        record: dict[str, object] = {"id": f"p{i}", "chosen": good, "rejected": bad}
        if i % 3:
            pixels = rng.integers(0, 256, (*rng.integers(20, 50, 2), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
            record["image"], question = f"{i}.png", f"<image>\n{question}"
        turns = [{"from": "human", "value": question}]
        if form == 0:
            turns = [{"from": "human", "value": "two"}, {"from": "gpt", "value": "yes"}, *turns]
            record |= {"conversations": turns}
        elif form == 1:
            answers = [{"chosen": {"from": "gpt", "value": good}, "rejected": {"from": "gpt", "value": bad}}]
            record |= {"conversations": turns, **answers[0]}
        else:
            record |= {"prompt": question}
        records.append(record)
    (folder / "data.json").write_text(json.dumps(records))
    return {"data_path": str(folder / "data.json"), "image_folder": str(folder / "images")}


def read_pairs(folder: Path, given: dict, **options: object) -> list:
    """The pairs as training has them. options: of SourceOptions."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base" / "llama")
    sources = open_sources(
        given["data_path"],
        SourceOptions(
            image_folder=given["image_folder"], cache_dir=str(folder / "own"), are_preferences=True, **options
        ),
    )
    dataset = open_encoded(
        sources,
        tokenizer,
        toys.encoding_options(supervise_last_turn_only=True),
        toys.image_options(mean=tuple(CLIP_MEAN)),
        PreflightOptions(cache_dir=str(folder / "own")),
    )
    return [dataset[i] for i in range(len(dataset))]


def scheduled(optimizer, number: int, num_steps: int) -> Iterator[list[int]]:
    """The pairs of every step, while the optimizer's rates follow the schedule."""
    peak = [group["lr"] for group in optimizer.param_groups]
    per_epoch, steps = math.ceil(number / BATCH), []
    for epoch in range(math.ceil(num_steps / per_epoch)):
        of_epoch = SampleOrder(number, BATCH, seed=42).epoch(epoch)
        steps += [of_epoch[i : i + BATCH] for i in range(0, len(of_epoch), BATCH)]
    warm_up = math.ceil(0.1 * num_steps)
    for step, indices in enumerate(steps[:num_steps]):
        progress = (step - warm_up) / (num_steps - warm_up)
        factor = step / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * progress))
        for group, rate in zip(optimizer.param_groups, peak):
            group["lr"] = rate * factor
        yield indices


def padded(batch: list) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Labels, and what transformers' model takes."""
    longest = max(len(sample.input_ids) for sample in batch)
    ids, labels = torch.zeros(len(batch), longest, dtype=torch.int64), torch.full((len(batch), longest), -100)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(batch):
        length = len(sample.input_ids)
        ids[row, :length] = sample.input_ids.masked_fill(sample.input_ids < 0, IMAGE_ID)
        labels[row, :length], mask[row, :length] = sample.labels, 1
    tiles = [tile for sample in batch for one, _ in sample.media for tile in one]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    pixels = {"pixel_values": torch.stack([(tile.float() / 255 - mean) / std for tile in tiles])} if tiles else {}
    return labels, {"input_ids": ids, "attention_mask": mask, **pixels}
