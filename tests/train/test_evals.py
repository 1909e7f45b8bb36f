"""Steps between evaluations."""

import pytest

from llava_ds.data.step_plan import steps_between


@pytest.mark.parametrize(
    ("every", "num_steps", "expected"),
    [(None, 100, None), (0, 100, None), (7, 100, 7), (0.1, 100, 10), (0.1, 225, 23), (0.1, 3, 1), (0.999, 5, 5)],
)
def test_a_part_of_all_steps_is_rounded_up(every, num_steps, expected):
    """As transformers' Trainer counts --eval_steps below 1."""
    assert steps_between(every, num_steps) == expected
