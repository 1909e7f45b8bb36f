"""Measure the ranks' processor time per step, with packs balanced by tokens and their squares, or by all their work."""

import json
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch
from bench import SMOLVLM
from benchmark import training, workload
from PIL import Image

from llava_ds.data.dataset import ALONE
from llava_ds.data.loader import micro_batches
from llava_ds.data.step_plan import Packing, sample_order
from llava_ds.engine.construct import build_model
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.model.heads import SummedLoss
from llava_ds.model.llava import LlavaModel
from llava_ds.tracking.flops import model_flops

SIDES = ((64, 64), (80, 300), (150, 160), (213, 160), (160, 213), (288, 288), (100, 288))  # 1 to 17 tiles
REPEATS = 3  # runs of a pack; the fastest counts
BOUND = 6  # tokens per pack, as a multiple of the longest sample's length


def spread(text: float = 0.3, ranks: int = 2, steps: int = 6, samples: int = 8, frozen: bool = False) -> None:
    """Print the slowest rank's processor time over the mean rank's, per step and over all steps.

    A SmolVLM of 2 layers over a tower of 2, on one thread, one rank after the other; images have 1 to 17 tiles. text:
    share of records without an image; samples: per rank and step; --frozen: a frozen tower.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        flags = _write(folder, text, ranks * samples * steps) | {
            "cache_dir": folder / "cache", "deepspeed_config": "ds_configs/zero2.json", "learning_rate": 1e-4,
            "per_device_train_batch_size": samples, "max_steps": steps, "unfreeze_mm_vision_tower": not frozen,
        }  # fmt: skip
        args, plan, dataset = training.opened(
            [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        )
        model = build_model(plan, args.model, {"zero_optimization": {}}, torch.float32, 0, ALONE).train()
        choose_trainable(model, args)
        flops = model_flops(plan.text_config, plan.tower, args.model)
        plain = Packing(ranks, samples, 1, BOUND * int(dataset.lengths.max()), pair_cost=flops.pair_cost)
        ways = {"tokens": plain, "all work": replace(plain, other_costs=flops.other_costs)}
        order = sample_order(args, dataset, ranks)
        layouts = {way: list(zip(range(steps), each.steps(order, dataset, 0))) for way, each in ways.items()}
        batches = partial(micro_batches, dataset, num_workers=0, device=ALONE.device, mesh=SimpleNamespace(shared=1))
        found: dict[str, list[list[float]]] = {way: [] for way in ways}
        for i in range(steps):
            for way in list(ways)[:: 1 if i % 2 else -1]:
                of_ranks = layouts[way][i][1].of_ranks
                found[way].append([sum(_seconds(model, each.batch) for each in batches(rank)) for rank in of_ranks])
    for way, seconds in found.items():
        ratios = [max(each) / statistics.mean(each) for each in seconds]
        slowest, mean = (sum(map(part, seconds)) for part in (max, statistics.mean))
        print(
            f"balanced by {way}: slowest over mean rank {statistics.median(ratios):.3f} at the median, "
            f"{max(ratios):.3f} at most; the slowest ranks take {slowest:.2f} s, {slowest / mean:.3f} times the mean"
        )


def _write(folder: Path, text: float, number: int) -> dict[str, Path]:
    """Write model and data, and return the flags that name them."""
    rng, pixels = random.Random(0), np.random.default_rng(0)
    (folder / "model").mkdir()
    (folder / "images").mkdir()
    workload.write_model(folder / "model", replace(SMOLVLM, layers=2, tower_layers=2))
    for i, (width, height) in enumerate(SIDES):
        image = Image.fromarray(pixels.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.save(folder / "images" / f"{i}.png")
    records = []
    for i in range(number):
        is_text = rng.random() < text
        words = [
            int(rng.lognormvariate(*size)) for size in (((3, 0.8), (4.5, 0.8)) if is_text else ((2.5, 0.6), (3, 1)))
        ]
        human, gpt = (" ".join(rng.choices(workload.WORDS, k=min(300, each + 1))) for each in words)
        record: dict[str, object] = {"id": f"s{i}"} | ({} if is_text else {"image": f"{rng.randrange(len(SIDES))}.png"})
        turns = {"human": human if is_text else f"<image>\n{human}", "gpt": gpt}
        records.append(record | {"conversations": [{"from": name, "value": value} for name, value in turns.items()]})
    (folder / "data.json").write_text(json.dumps(records))
    return {
        "model_name_or_path": folder / "model", "data_path": folder / "data.json", "image_folder": folder / "images"
    }  # fmt: skip


def _seconds(model: LlavaModel, batch: object) -> float:
    """Return the processor time of forward and backward, the minimum of REPEATS runs."""
    found = []
    for _ in range(REPEATS):
        model.zero_grad()
        began = time.process_time()
        model(batch, SummedLoss()).backward()
        found.append(time.process_time() - began)
    return min(found)
