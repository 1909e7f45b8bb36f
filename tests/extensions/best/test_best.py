"""The best evaluation, and the end for want of a better one, are those of transformers' Trainer."""

import itertools
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import toys
from extension_there import needs_extension
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError, DataError
from llava_ds.extensions.base import EvalMeasure
from llava_ds.extensions.best.extension import Best, complete
from llava_ds.extensions.best.rule import BestRule, best_rule


def rows_of(values: list[float], name: str = "loss") -> list[dict]:
    return [{"step": 10 * i, "samples": 3, "seconds": 0.5, name: value} for i, value in enumerate(values, 1)]


def by_transformers(values: list[float], greater: bool, patience: int, threshold: float) -> tuple[int, int | None]:
    """The step of the best evaluation, and the one at which training is stopped."""
    args = SimpleNamespace(
        metric_for_best_model="eval_loss", greater_is_better=greater, save_strategy="steps", load_best_model_at_end=True
    )
    trainer = SimpleNamespace(args=args, state=TrainerState(), _get_output_dir=lambda trial: "")
    callback, ended = EarlyStoppingCallback(patience, threshold), None
    for row in rows_of(values):
        trainer.state.global_step = row["step"]
        metrics, control = {"eval_loss": row["loss"]}, TrainerControl()
        callback.on_evaluate(args, trainer.state, control, metrics)
        Trainer._determine_best_metric(trainer, metrics, None)
        if control.should_training_stop and ended is None:
            ended = row["step"]
    return trainer.state.best_global_step, ended


@pytest.mark.parametrize(("greater", "threshold"), list(itertools.product([False, True], [0.0, 0.3])))
def test_it_judges_as_transformers_does(greater, threshold):
    rng = random.Random(4)
    for patience in (1, 2, 3):
        for _ in range(30):
            values = [round(rng.random(), 1) for _ in range(12)]
            rule = BestRule("eval_loss", greater, patience, threshold)
            rows = rows_of(values)
            over = (row["step"] for i, row in enumerate(rows, 1) if rule.evaluations_without(rows[:i]) >= patience)
            assert (rule.best(rows)["step"], next(over, None)) == by_transformers(values, greater, patience, threshold)


def test_what_is_no_number_is_never_the_best():
    rule = BestRule("loss", False, 2, 0.0)
    assert rule.best(rows_of([math.nan, 0.5, math.nan]))["step"] == 20
    assert rule.best(rows_of([math.nan])) is None
    assert rule.evaluations_without(rows_of([math.nan, math.nan])) == 2


def test_a_source_or_a_metric_of_the_objective_can_be_meant():
    row = {**rows_of([0.5])[0], "rewards/accuracies": 0.75, "source_losses": {"ocr": 0.125}}
    for name, value in (("eval_rewards/accuracies", 0.75), ("eval_loss/ocr", 0.125), ("loss", 0.5)):
        assert BestRule(name, False, None, 0.0).value(row) == value
    with pytest.raises(DataError, match=r"eval_f1 is not measured: .* 10 has loss, loss/ocr, rewards/accuracies\."):
        BestRule("eval_f1", True, None, 0.0).value(row)
    with pytest.raises(DataError, match="is not measured"):
        Best(BestRule("samples", True, None, 0.0), Path(), [row]).why_over()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"load_best_model_at_end": True}, BestRule("eval_loss", False, None, 0.0)),
        ({"early_stopping_patience": 3, "early_stopping_threshold": 0.1}, BestRule("eval_loss", False, 3, 0.1)),
        ({"metric_for_best_model": "eval_rewards/accuracies"}, BestRule("eval_rewards/accuracies", True, None, 0.0)),
        ({"metric_for_best_model": "eval_loss/a"}, BestRule("eval_loss/a", False, None, 0.0)),
        ({"metric_for_best_model": "x", "greater_is_better": False}, BestRule("x", False, None, 0.0)),
    ],
)
def test_the_flags_make_the_rule(flags, expected):
    assert best_rule(flags) == expected


def test_evaluations_of_an_earlier_start_that_measured_something_else_are_passed_over():
    rows = [*rows_of([0.1, 0.2]), *({"step": 10 * i, "pope": value} for i, value in ((3, 0.5), (4, 0.7), (5, 0.6)))]
    best = Best(BestRule("pope", True, 2, 0.0), Path(), rows)
    assert best.rule.best(rows)["step"] == 40 and best.rule.evaluations_without(rows) == 1 and best.why_over() is None
    with pytest.raises(DataError, match="pope is not measured: the evaluation at step 20 has loss"):
        Best(best.rule, Path(), rows[:2]).why_over()


@pytest.mark.parametrize(
    ("flags", "sources", "tasks", "known"),
    [
        ({"metric_for_best_model": "poppe"}, None, ("pope", "mine"), "pope, mine"),
        ({"load_best_model_at_end": True}, None, ("pope",), "pope"),
        ({"metric_for_best_model": "rewards/margins"}, ["a"], (), "loss"),
        ({"metric_for_best_model": "eval_loss/c"}, ["a", "b"], (), "loss, loss/a, loss/b"),
    ],
)
def test_a_number_that_no_evaluation_has_is_refused_before_the_run(tmp_path, flags, sources, tasks, known):
    args = arguments(tmp_path, eval_fraction=0.3, eval_steps=2, **flags)
    assert refused(args, sources, tasks).endswith(f"is not measured by this run: give one of {known}")
    assert not refused(args.replaced(metric_for_best_model=f"eval_{known.split(', ')[-1]}"), sources, tasks)


@needs_extension("preference")
@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_every_number_of_pairs_can_be_the_one(tmp_path, objective):
    args = arguments(tmp_path, eval_fraction=0.3, eval_steps=2, objective=objective)
    for name in args.traits.metrics:
        assert not refused(args.replaced(metric_for_best_model=name))
    assert "is not measured by this run" in refused(args.replaced(metric_for_best_model="rewards/all"))


def test_only_checkpoints_that_are_there_can_be_the_best(tmp_path):
    best = Best(BestRule("eval_loss", False, None, 0.0), tmp_path, rows_of([0.3, 0.1, 0.2]))
    assert best.checkpoint() is None
    for step in (10, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "manifest.json").touch()
    assert (best.checkpoint().path.name, best.checkpoint().value) == ("checkpoint-30", 0.2)


def arguments(tmp_path, **flags):
    given = toys.write_base(tmp_path / "base") | toys.write_data(tmp_path / "data", "it")
    wanted = {**given, "deepspeed_config": "zero2", "output_dir": tmp_path / "out", **flags}
    return parse_arguments([token for name, value in wanted.items() for token in (f"--{name}", str(value))])[0]


def refused(args, sources=("a",), tasks=()) -> str:
    """What is said against a run of 100 steps."""
    evals = SimpleNamespace(eval_set=sources and SimpleNamespace(sources=sources))
    own = {"benchmarks": EvalMeasure(None, tasks)}
    try:
        complete(SimpleNamespace(args=args, evals=evals, steps=SimpleNamespace(num_steps=100), own=own), None)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_checkpoint_without_an_evaluation_could_not_be_the_best(tmp_path):
    evals = {"eval_fraction": 0.3, "load_best_model_at_end": True}
    args = arguments(tmp_path, **evals, save_steps=50, eval_steps=20)
    needed = r"the 50 steps between checkpoints are not a multiple of the 20 .* give --save_steps 60"
    assert re.search(needed, refused(args))
    by_epoch = args.replaced(save_strategy="epoch", eval_steps=30)
    assert "give --eval_strategy epoch" in refused(by_epoch)
    assert "this run has only one, at the end: give --eval_steps" in refused(args.replaced(eval_steps=None))
    assert not refused(args.replaced(eval_steps=25))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"load_best_model_at_end": True}, "--load_best_model_at_end True needs eval samples"),
        ({"early_stopping_patience": 2}, "--early_stopping_patience 2 needs eval samples"),
        ({"metric_for_best_model": "loss"}, "--metric_for_best_model loss needs eval samples"),
        (
            {"load_best_model_at_end": True, "eval_fraction": 0.2, "save_strategy": "no"},
            "loads a checkpoint, but --save_strategy no saves none",
        ),
        (
            {"load_best_model_at_end": True, "eval_fraction": 0.2, "save_only_model": True},
            "loads a checkpoint, but --save_only_model True saves none",
        ),
        ({"greater_is_better": True}, "--greater_is_better has no effect without --load_best_model_at_end"),
        ({"early_stopping_threshold": 0.1}, "--early_stopping_threshold has no effect without"),
        (
            {"early_stopping_threshold": 0.1, "load_best_model_at_end": True, "eval_fraction": 0.2},
            "--early_stopping_threshold has no effect without --early_stopping_patience",
        ),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, flags, said):
    with pytest.raises(ConfigError, match=said):
        arguments(tmp_path, **flags)
