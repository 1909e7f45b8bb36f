"""The scheduler block and the schedule's flags: filled, or refused before a model is built; and the rates they give."""

import json

import pytest
import torch
from ds_json import arguments, refused, resolve
from transformers import get_scheduler

from llava_ds.engine.ds_config.scheduler import DEEPSPEED, describe_schedule, scheduler_factory, warmup_steps
from llava_ds.engine.ds_config.scheduler_block import TORCH

# What a class needs beside the rate that comes from --learning_rate.
LEAST = {
    "OneCycle": {"cycle_min_lr": 1e-5},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 1e-5, "cycle_momentum": False},
    "ExponentialLR": {"gamma": 0.9},
    "MultiStepLR": {"milestones": [2, 4]},
    "OneCycleLR": {"total_steps": 20},
    "StepLR": {"step_size": 2},
}


def block(name: str, **params: object) -> dict:
    return {"scheduler": {"type": name, "params": params}}


def resolved_of(raw: dict, num_steps: int | None = 100, **flags: object):
    return resolve(raw, num_steps=num_steps, **flags)


def rates(resolved, num_steps: int, *shares: float) -> list[list[float]]:
    """Each step's rate in groups that have these shares of --learning_rate."""
    training = resolved.args.training
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": training.learning_rate * s} for s in shares]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate)
    scheduler = scheduler_factory(training, num_steps, resolved.config.get("scheduler"))(optimizer)
    seen = []
    for _ in range(num_steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def test_auto_is_filled_as_hugging_face_does():
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    resolved = resolved_of(block("WarmupDecayLR", **dict.fromkeys(keys, "auto")), learning_rate=3e-4, warmup_ratio=0.03)
    params = {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 3, "total_num_steps": 100}
    assert resolved.config["scheduler"]["params"] == params
    none = resolved_of(block("WarmupLR", warmup_num_steps="auto")).config["scheduler"]["params"]
    assert none["warmup_num_steps"] == 1  # DeepSpeed takes no 0


def test_what_deepspeed_would_take_its_own_numbers_for_comes_from_the_flags():
    params = resolved_of(block("WarmupDecayLR"), learning_rate=3e-4, warmup_steps=7).config["scheduler"]["params"]
    assert params == {"warmup_max_lr": 3e-4, "warmup_num_steps": 7, "total_num_steps": 100}


def test_what_depends_on_the_number_of_steps_waits_for_it():
    resolved = resolved_of(block("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto"), num_steps=None)
    assert resolved.config["scheduler"]["params"]["total_num_steps"] == "auto"


def test_the_json_replaces_the_flag_and_says_so():
    resolved = resolved_of(block("WarmupLR", warmup_max_lr=1e-3))
    assert resolved.reasons["scheduler.type"] == "from the JSON, instead of cosine"
    assert resolved.args.training.learning_rate == 1e-3
    assert describe_schedule(resolved.args.training, 100, resolved.config["scheduler"]) == (
        "schedule WarmupLR from the DeepSpeed JSON"
    )
    note = resolved_of(block("WarmupCosineLR", total_num_steps=50)).reasons["scheduler.params.total_num_steps"]
    assert note == "from the JSON; this run has 100 steps"


WRONG = [
    (
        block("WarmupLR"),
        {"lr_scheduler_type": "linear"},
        "--lr_scheduler_type linear and scheduler WarmupLR in the DeepSpeed JSON are two schedules: leave one of them",
    ),
    (block("WarmupLr"), {}, 'scheduler.type "WarmupLr" in the DeepSpeed JSON is unknown: did you mean WarmupLR'),
    (block("xyz"), {}, 'scheduler.type "xyz" in the DeepSpeed JSON is unknown: give one of ConstantLR'),
    (
        block("ReduceLROnPlateau"),
        {},
        'scheduler.type "ReduceLROnPlateau" in the DeepSpeed JSON can\'t be used here, because it needs an eval',
    ),
    (
        block("LambdaLR"),
        {},
        'scheduler.type "LambdaLR" in the DeepSpeed JSON can\'t be used here, because it takes a fun',
    ),
    (
        block("SequentialLR"),
        {},
        'scheduler.type "SequentialLR" in the DeepSpeed JSON can\'t be used here, because it takes',
    ),
    (
        block("WarmupLR", warmup_steps=3),
        {},
        "scheduler.params.warmup_steps in the DeepSpeed JSON is unknown to WarmupLR: did you mean warmup_num_steps",
    ),
    (
        block("StepLR", step_size=1, xyz=1),
        {},
        "scheduler.params.xyz in the DeepSpeed JSON is unknown to StepLR: it takes step_size, gamma",
    ),
    (
        block("OneCycle"),
        {},
        "scheduler.params in the DeepSpeed JSON: OneCycle rejects them (OneCycle.__init__() missing 1",
    ),
    (
        block("WarmupLR", warmup_max_lr=1e-3),
        {"learning_rate": 2e-3},
        "scheduler.params.warmup_max_lr is 0.001 in the DeepSpeed JSON but --learning_rate is 0.002: make them equal",
    ),
    (
        block("WarmupLR", warmup_num_steps=5),
        {"warmup_ratio": 0.1},
        "scheduler.params.warmup_num_steps is 5 in the DeepSpeed JSON but --warmup_ratio is 0.1 (10 of 100 "
        'steps): make them equal, or write "auto"',
    ),
    (
        block("WarmupLR", warmup_num_steps=5),
        {"warmup_steps": 6},
        "scheduler.params.warmup_num_steps is 5 in the DeepSpeed JSON but --warmup_steps is 6: make them equal",
    ),
    (
        block("WarmupDecayLR", warmup_num_steps=50, total_num_steps=20),
        {},
        "scheduler.params.warmup_num_steps is 50 in the DeepSpeed JSON, total_num_steps is 20: the rate would never",
    ),
    (
        block("WarmupLR", warmup_num_steps=2.5),
        {},
        "scheduler.params.warmup_num_steps is 2.5 in the DeepSpeed JSON: write a whole number from 1",
    ),
    (
        block("WarmupLR", warmup_type="cosine"),
        {},
        'scheduler.params.warmup_type is "cosine" in the DeepSpeed JSON: write log or linear',
    ),
    (
        block("WarmupCosineLR", cos_min_ratio=2),
        {},
        "scheduler.params.cos_min_ratio is 2 in the DeepSpeed JSON: write a number from 0 to 1",
    ),
    (
        block("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=1e-4),
        {},
        "scheduler.params.cycle_min_lr is 0.001 in the DeepSpeed JSON, above cycle_max_lr 0.0001: swap them",
    ),
    (
        block("OneCycle", cycle_min_lr=1e-6),
        {"adam_beta1": 0.8},
        "OneCycle would overwrite --adam_beta1: it cycles beta 1 and sets beta 2 to 0.99: leave the flag out",
    ),
    (block("WarmupLR"), {"learning_rate": 0}, "--learning_rate is 0, and WarmupLR scales every group's rate by it"),
    (
        block("CosineAnnealingWarmRestarts", T_0=-1),
        {},
        "scheduler.params in the DeepSpeed JSON: CosineAnnealingWarmRestarts rejects them (Expected positive",
    ),
    (
        {},
        {"lr_scheduler_kwargs": "num_cycles"},
        "--lr_scheduler_kwargs num_cycles can't be read as a JSON object (Expecting value",
    ),
    (
        {},
        {"lr_scheduler_kwargs": '{"power": 2}'},
        '--lr_scheduler_type cosine can\'t take --lr_scheduler_kwargs {"power": 2} (',
    ),
    (
        {},
        {"lr_scheduler_type": "warmup_stable_decay"},
        "--lr_scheduler_type warmup_stable_decay needs --lr_scheduler_kwargs (get_wsd_schedule() missing",
    ),
    (
        {},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        "--lr_scheduler_type cosine_with_min_lr needs --lr_scheduler_kwargs (One of min_lr or",
    ),
]


@pytest.mark.parametrize(("raw", "flags", "expected"), WRONG, ids=range(len(WRONG)))
def test_what_makes_no_schedule_is_refused(raw, flags, expected):
    lines = refused(raw, num_steps=100, **flags)
    assert any(line.startswith(expected) for line in lines), lines


@pytest.mark.parametrize(
    ("steps", "remedy"),
    [(-1, "0 or more"), (2.5, "a whole number, or their part of all steps"), (float("nan"), "0 or more")],
)
def test_warmup_steps_that_are_none_are_refused(steps, remedy):
    with pytest.raises(ValueError, match=rf"--warmup_steps is .*: give {remedy}"):
        arguments(warmup_steps=steps)


def test_warmup_steps_win_over_the_ratio_and_may_be_a_part():
    for flags, expected in (
        ({"warmup_ratio": 0.1}, 10),
        ({"warmup_ratio": 0.1, "warmup_steps": 7}, 7),
        ({"warmup_ratio": 0.1, "warmup_steps": 0.031}, 4),
        ({}, 0),
    ):
        assert warmup_steps(arguments(**flags).training, 100) == expected


@pytest.mark.parametrize(("name", "key"), [("WarmupLR", "last_batch_iteration"), ("StepLR", "last_epoch")])
def test_the_step_that_a_schedule_begins_at_may_be_written_as_the_default(name, key):
    params = {"step_size": 3} if name == "StepLR" else {}
    for value in (-1, "auto", None):
        resolved = resolve({"scheduler": {"type": name, "params": {**params, key: value}}}).config["scheduler"]
        assert key not in resolved["params"]
    for value in (0, 100, True, "x"):
        (line,) = refused({"scheduler": {"type": name, "params": {**params, key: value}}})
        assert line.startswith(f"scheduler.params.{key} is ") and "remove it, or write -1; a resumed run" in line


@pytest.mark.parametrize("name", [*DEEPSPEED, *TORCH])
def test_every_schedule_keeps_the_groups_proportion(name):
    resolved = resolved_of(block(name, **LEAST.get(name, {})), num_steps=20, learning_rate=1e-3, warmup_steps=3)
    seen = rates(resolved, 20, 1.0, 0.25)
    if not name.startswith("CosineAnnealing"):
        assert len({tuple(both) for both in seen}) > 1
    for whole, quarter in seen:
        assert quarter == pytest.approx(whole / 4, rel=1e-9)


def test_a_range_test_starts_where_it_says_in_the_groups_proportion():
    resolved = resolved_of(block("LRRangeTest", lr_range_test_min_lr=1e-5), num_steps=20, learning_rate=1e-3)
    assert resolved.args.training.learning_rate == 1e-3
    assert rates(resolved, 1, 1.0, 0.1)[0] == pytest.approx([1e-5, 1e-6])


def test_warm_up_by_deepspeed_begins_with_two_steps_at_the_minimum():
    resolved = resolved_of(block("WarmupLR", warmup_type="linear", warmup_num_steps=4), learning_rate=1.0)
    assert [both[0] for both in rates(resolved, 7, 1.0)] == [0, 0, 0.25, 0.5, 0.75, 1, 1]


NAMES = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 3},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": 10},
    "warmup_stable_decay": {"num_decay_steps": 5},
}


@pytest.mark.parametrize("name", NAMES)
def test_hugging_faces_names_give_their_rates(name):
    flags = {"lr_scheduler_kwargs": json.dumps(NAMES[name])} if NAMES[name] else {}
    resolved = resolve({}, lr_scheduler_type=name, learning_rate=1e-3, warmup_steps=3, **flags)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler = get_scheduler(name, optimizer, 3, 20, NAMES[name])
    for whole, quarter in rates(resolved, 20, 1.0, 0.25):
        assert whole == optimizer.param_groups[0]["lr"] and quarter == pytest.approx(whole / 4)
        optimizer.step()
        scheduler.step()
