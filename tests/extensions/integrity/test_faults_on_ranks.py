"""Injected faults of every kind are named with rank and step, on two ranks at ZeRO 0, 2 and 3; nothing else is."""

import json
import re
from pathlib import Path

import pytest
import toys
from launching import command_line, ds_config, launch, toy_run

pytestmark = pytest.mark.long

WORDS = {
    "weight": "a weight changed",
    "gradient": "a gradient changed",
    "state": "an optimizer state changed",
    "stale": "stale",
    "twice": "were repeated",
    "missed": "other samples than planned",
    "slow": "is slow",
}
STAGES = {"zero0": (0, False), "zero2-bf16": (2, True), "zero3": (3, False)}
NUMBER, FIRST, EVERY, SLOW = 4, 12, 3, 20  # faults of a kind, the first one's step, steps for one, for a slow rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("integrity")
    given = toys.write_base(folder / "base") | toys.write_data(folder / "data", "ittiitti" * 8)
    sizes = {"train_batch_size": 8, "per_device_train_batch_size": 2, "check_integrity_steps": 1}
    sizes["max_steps"] = FIRST + NUMBER * (EVERY * (len(WORDS) - 1) + SLOW) + 2
    runs = []
    for name, (stage, bf16) in STAGES.items():
        flags = toy_run(given, folder / name, ds_config(stage), bf16=bf16, **sizes)
        plan = {"every": EVERY, "kinds": list(WORDS), "number": NUMBER, "seed": stage}
        runs.append((command_line(flags), plan, str(folder / f"{name}.json")))
    listed = folder / "runs.json"
    listed.write_text(json.dumps(runs))
    done = launch(2, Path(__file__).parent / "corrupted.py", str(listed), timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", STAGES)
def test_a_fault_is_named_with_rank_and_step(folder, name):
    found = json.loads((folder / f"{name}.json").read_text())
    said, allowed, missed = {int(step): text for step, text in found["said"].items()}, set(), []
    for step, rank, kind, variant in found["faults"]:
        span = range(step, step + SLOW) if kind == "slow" else [step]
        allowed |= {*span, step + 1} if kind == "missed" else {*span}  # the samples of two steps are exchanged
        texts = [said.get(each, "") for each in span]
        named = [text for text in texts if set(re.findall(r"rank (\d)", text)) == {str(rank)}]
        if not any(WORDS[kind] in text for text in named):
            missed.append((step, rank, kind, variant, texts))
    assert len(missed) <= 0.05 * len(found["faults"]), missed
    assert not said.keys() - allowed
