"""Writes generated scenes to disk as LLaVA JSON and PNG files, atomically."""

import contextlib
import fcntl
import glob
import json
import math
import multiprocessing
import shutil
import tempfile
from pathlib import Path

import numpy as np

from llava_ds.constants import DataError
from llava_ds.data.file_slices import write_errors
from llava_ds.files.reading import read_json
from llava_ds.tiny.questions import CAPTION_REQUESTS, KINDS, Balance, all_questions, caption, conversation
from llava_ds.tiny.scenes import draw_scene, sample_scene

GENERATOR_VERSION = 1  # raise it when the same seed gives other data: folders of older versions are then rewritten
RECORD_FILE = "dataset.json"
TEXT_ONLY_SHARE = 0.1
MIN_TURNS, MAX_TURNS = 4, 8
DESCRIBE = "describe"  # a kind beside those of questions: say all that the picture shows


def write_dataset(folder, *, seed=0, num_pretrain=5760, num_finetune=7200, num_heldout=1200):
    """Write pretrain.json, finetune.json, heldout.json and their pictures into a folder.

    Counts are records; num_heldout is rounded up to the same number of each kind of question. A folder that holds a
    complete data set of the same parameters and generator version is left alone, an older one is replaced; the folder
    appears by one rename, so it is never seen half written. Processes that call this at once wait for the first.
    Raises DataError for a folder that holds something else, ConfigError where there is no room.
    """
    folder = Path(folder)
    made_from = {
        "generator_version": GENERATOR_VERSION,
        "seed": seed,
        "num_pretrain": num_pretrain,
        "num_finetune": num_finetune,
        "num_heldout": num_heldout,
    }
    with write_errors(folder.parent, "the generated scenes"):
        _write_once(folder, made_from)


def _write_once(folder, made_from):
    """write_dataset, its parameters as they are noted beside the data."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.parent.glob(f".{glob.escape(folder.name)}-*"):
            shutil.rmtree(left)  # by a kill; nobody else builds here meanwhile
        with contextlib.suppress(FileNotFoundError, DataError):  # missing or damaged
            if read_json(folder / RECORD_FILE, dict) == made_from:
                return
        if folder.exists() and any(folder.iterdir()) and not (folder / RECORD_FILE).is_file():
            raise DataError(f"{folder} holds something other than generated scenes: name a new or empty folder")
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        building = scratch / "new"
        building.mkdir()  # unlike what mkdtemp makes, not private
        try:
            counts = {name: made_from[name] for name in ("num_pretrain", "num_finetune", "num_heldout")}
            _write_splits(building, made_from["seed"], **counts)
            (building / RECORD_FILE).write_text(json.dumps(made_from, indent=1))
            if folder.exists():
                folder.rename(scratch / "old")  # deleted where it stands, a kill would leave a part of it
            building.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _write_splits(folder, seed, num_pretrain, num_finetune, num_heldout):
    """Write the three splits; two processes draw the pictures of one while the records of the next are made."""
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
            drawing.append(pool.starmap_async(_save_picture, pictures, chunksize=100))
            (folder / f"{name}.json").write_text(json.dumps(records, indent=1))
        for job in drawing:
            job.get()


def write_questions(folder, seed, splits):
    """Write single questions about scenes of their own, as <name>.json and pictures beside it.

    splits: name to (kinds of the questions in their order, whether the scenes are of the held-out ones).
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
            pool.starmap(_save_picture, pictures, chunksize=100)
            (folder / f"{name}.json").write_text(json.dumps(records, indent=1))


def _drawing_processes():
    """Two processes that draw pictures.

    Forked, not spawned: a spawned child first imports the caller's script, and with it torch and deepspeed.
    """
    return multiprocessing.get_context("fork").Pool(2)


def pretrain_records(rng, count):
    """Return `count` pairs (record without id and image, scene): one caption per picture."""
    pairs = []
    for _ in range(count):
        scene = sample_scene(rng)
        request = CAPTION_REQUESTS[int(rng.integers(len(CAPTION_REQUESTS)))]
        question = f"<image>\n{request}" if request else "<image>"
        pairs.append(({"conversations": _turns([(question, caption(scene, rng))])}, scene))
    return pairs


def finetune_records(rng, count):
    """Return `count` pairs (record, scene) of several turns; scene is None where the talk is about a text."""
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
    """Return at least `count` pairs (record with its kind, scene), every kind of question equally often."""
    return question_records(rng, [KINDS[i % len(KINDS)] for i in range(-(-count // len(KINDS)) * len(KINDS))], True)


def question_records(rng, kinds, heldout):
    """Return pairs (record with its kind, scene) of one question each, of these kinds in turn: KINDS, or DESCRIBE."""
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
    """Return LLaVA's list of messages for pairs (question, answer)."""
    return [{"from": who, "value": text} for pair in talk for who, text in zip(("human", "gpt"), pair, strict=True)]


def _save_picture(scene, path):
    draw_scene(scene).save(path, compress_level=1)
