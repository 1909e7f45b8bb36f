"""Epochs, in optimizer steps, as Hugging Face's strategies mean them."""

import pytest

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.data.step_plan import with_steps_of_epochs


@pytest.mark.parametrize(
    ("flags", "save_steps", "eval_steps"),
    [
        ({}, 500, None),
        ({"save_strategy": "epoch", "save_steps": 3}, 7, None),
        ({"eval_steps": 4}, 500, 4),
        ({"eval_strategy": "no", "eval_steps": 4}, 500, None),
        ({"eval_strategy": "steps", "eval_steps": 4}, 500, 4),
        ({"eval_strategy": "steps", "logging_steps": 10}, 500, 10),
        ({"eval_strategy": "epoch", "eval_steps": 4}, 500, 7),
    ],
)
def test_strategies_are_steps(flags, save_steps, eval_steps):
    args = Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()).replaced(**flags)
    training = with_steps_of_epochs(args, 7).training
    assert (training.save_steps, training.eval_steps) == (save_steps, eval_steps)
