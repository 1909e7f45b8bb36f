"""The start's lines about steps: how many samples one has, and a warning where they are too few to learn from."""

from types import SimpleNamespace

import pytest

from llava_ds.data.step_plan import Packing, StepPlan
from llava_ds.train.plan import Plan


def steps_of(num_samples: int, batch_size: int, across_epochs: bool = False) -> StepPlan:
    packing = Packing(1, batch_size, 1, None, across_epochs)
    return StepPlan(range(num_samples), None, packing, 4)


@pytest.mark.parametrize(("num_samples", "size"), [(36, 36), (48, 48), (500, 48)])
def test_a_step_has_no_more_samples_than_an_epoch(num_samples, size):
    assert steps_of(num_samples, 48).samples_per_step == size


@pytest.mark.parametrize(
    ("num_steps", "max_steps", "warned"), [(4, -1, True), (39, -1, True), (40, -1, False), (4, 4, False)]
)
def test_too_few_steps_are_warned_of_unless_asked_for(num_steps, max_steps, warned):
    steps = SimpleNamespace(num_steps=num_steps, steps_per_epoch=2, batch_size=48)
    plan = SimpleNamespace(args=SimpleNamespace(training=SimpleNamespace(max_steps=max_steps)), steps=steps)
    lines = Plan._few_steps(plan)
    assert bool(lines) == warned
    assert all("--num_train_epochs 20" in line and "--train_batch_size below 48" in line for line in lines)
