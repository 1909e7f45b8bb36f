"""Write records and images of generated scenes: the three splits of the default data, or questions of given kinds."""

import json
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from llava_ds.data.file_slices import write_errors
from llava_ds.tiny.questions import CAPTION_REQUESTS, KINDS, Balance, all_questions, caption, conversation
from llava_ds.tiny.scenes import draw_scene, sample_scene

TEXT_ONLY_SHARE = 0.1
MIN_TURNS, MAX_TURNS = 4, 8
DESCRIBE = "describe"  # an additional kind: describe the whole image


def write_splits(folder, seed, num_pretrain, num_finetune, num_heldout):
    """Write the three splits. Two processes draw a split's images while the records of the next split are generated."""
    splits = {
        "pretrain": (pretrain_records, num_pretrain),
        "heldout": (heldout_records, num_heldout),
        "finetune": (finetune_records, num_finetune),
    }
    with _drawing_processes() as pool:
        drawing = []
        for stream, (name, (make, count)) in enumerate(splits.items()):
            (folder / name).mkdir()
            records, pictures = [], []
            for index, (record, scene) in enumerate(make(np.random.default_rng([seed, stream]), count)):
                record = {"id": f"{name}-{index:06d}"} | record
                if scene is not None:
                    record["image"] = f"{name}/{index:06d}.png"
                    pictures.append((scene, folder / record["image"]))
                records.append(record)
            drawing.append(pool.map(_save_picture, *zip(*pictures), chunksize=100))
            (folder / f"{name}.json").write_text(json.dumps(records, indent=1))
        for job in drawing:
            list(job)  # raises the errors of the processes


def write_questions(folder, seed, splits):
    """Write single questions, each about a new scene, as <name>.json and an image folder <name> per split.

    splits: maps a split's name to (kinds of its questions in order, True for held-out scenes).
    """
    folder = Path(folder)
    with write_errors(folder, "the questions"), _drawing_processes() as pool:
        for stream, (name, (kinds, heldout)) in enumerate(splits.items()):
            (folder / name).mkdir(parents=True, exist_ok=True)
            records, pictures = [], []
            pairs = question_records(np.random.default_rng([seed, stream]), kinds, heldout)
            for index, (record, scene) in enumerate(pairs):
                picture = f"{name}/{index:06d}.png"
                pictures.append((scene, folder / picture))
                records.append({"id": f"{name}-{index:06d}", **record, "image": picture})
            list(pool.map(_save_picture, *zip(*pictures), chunksize=100))
            (folder / f"{name}.json").write_text(json.dumps(records, indent=1))


def _drawing_processes():
    """Start two processes that draw images. They are forked, because spawned ones would import torch and deepspeed."""
    return ProcessPoolExecutor(2, get_context("fork"))


def pretrain_records(rng, count):
    """Return `count` pairs (record without id and image, scene): one caption per image."""
    pairs = []
    for _ in range(count):
        scene = sample_scene(rng)
        request = CAPTION_REQUESTS[int(rng.integers(len(CAPTION_REQUESTS)))]
        question = f"<image>\n{request}" if request else "<image>"
        pairs.append(({"conversations": _turns([(question, caption(scene, rng))])}, scene))
    return pairs


def finetune_records(rng, count):
    """Return `count` pairs (record, scene) of several turns; scene is None for conversations about a text."""
    balance = Balance(form_slack=2, kind_slack=math.inf)
    pairs = []
    while len(pairs) < count:
        scene = sample_scene(rng)
        wanted = int(rng.integers(MIN_TURNS, MAX_TURNS + 1))
        talk = [(q.text(rng), q.answer) for q in conversation(scene, wanted, balance, rng)]
        if len(talk) < MIN_TURNS:
            continue
        text_only = rng.random() < TEXT_ONLY_SHARE
        opening = f"This is what a picture shows: {caption(scene, rng)}" if text_only else "<image>"
        talk[0] = (f"{opening}\n{talk[0][0]}", talk[0][1])
        pairs.append(({"conversations": _turns(talk)}, None if text_only else scene))
    return pairs


def heldout_records(rng, count):
    """Return at least `count` pairs (record with its kind, scene), with equally many questions of every kind."""
    return question_records(rng, [KINDS[i % len(KINDS)] for i in range(-(-count // len(KINDS)) * len(KINDS))], True)


def question_records(rng, kinds, heldout):
    """Return a pair (record with its kind, scene) per question. kinds: kinds of the questions in order, each from KINDS
    or DESCRIBE."""
    balance = Balance(form_slack=2, kind_slack=2)
    pairs = []
    for kind in kinds:
        question = None
        while question is None:
            scene = sample_scene(rng, heldout=heldout)
            if kind == DESCRIBE:
                question, answer = CAPTION_REQUESTS[0], caption(scene, rng)
            elif chosen := balance.choose(all_questions(scene, kind), rng):
                question, answer = chosen.text(rng), chosen.answer
        pairs.append(({"kind": kind, "conversations": _turns([(f"<image>\n{question}", answer)])}, scene))
    return pairs


def _turns(talk):
    """Convert pairs (question, answer) to LLaVA's list of messages."""
    return [{"from": who, "value": text} for pair in talk for who, text in zip(("human", "gpt"), pair, strict=True)]


def _save_picture(scene, path):
    draw_scene(scene).save(path, compress_level=1)
