"""Rewards judge answers as their docstrings say, and a file's function is run and checked."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llava_ds.constants import IGNORE_INDEX, ConfigError, DataError
from llava_ds.data.collate import LoadedSample
from llava_ds.extensions.rl.policy_batches import Group, StepTotals, metrics_of
from llava_ds.extensions.rl.rewards import Completion, Reward, model_rewards, open_rewards, try_rewards
from llava_ds.runtime.mesh import Mesh
from llava_ds.train.evaluating.sampling import Answer


def reward(name: str, text: str, reference: str = "", tokens: int = 1, **more) -> float:
    [opened] = open_rewards(name, None)
    [value] = opened.of_all([Completion("?", text, reference, "r", tokens, 10, **more)])
    return value


@pytest.mark.parametrize(
    ("name", "text", "reference", "wanted"),
    [
        ("exact", "Two.", "two", 1),
        ("exact", " two  cats", "Two cats", 1),
        ("exact", "two", "three", 0),
        ("exact", "<think>3?</think><answer>two</answer>", "two", 1),
        ("exact", "", "two", 0),
        ("numeric", "There are 12 of them.", "12", 1),
        ("numeric", "1,200.50", "1200.5", 1),
        ("numeric", "3 and 4", "3", 0),
        ("numeric", "I see two", "2", 1),
        ("numeric", "-5", "5", 0),
        ("numeric", "many", "5", 0),
        ("choice", "(B)", "B", 1),
        ("choice", "The answer is C.", "C. a cat", 1),
        ("choice", "Cats", "C", 0),
        ("choice", "no idea", "A", 0),
        ("iou", "[0, 0, 2, 2]", "[1, 1, 3, 3]", 1 / 7),
        ("iou", "it is at (2, 2, 0, 0)", "[0,0,2,2]", 1),
        ("iou", "[0, 0, 1]", "[0, 0, 1, 1]", 0),
        ("iou", "[0, 0, 0, 0]", "[0, 0, 0, 0]", 0),
        ("format", "<think>a\nb</think>\n<answer>c</answer>", "", 1),
        ("format", "<answer>c</answer>", "", 0),
        ("format", "<think>a</think><answer>b</answer> c", "", 0),
        ("format", "<think>a</think><think>b</think><answer>c</answer>", "", 0),
    ],
)
def test_rewards_by_name(name, text, reference, wanted):
    assert reward(name, text, reference) == pytest.approx(wanted)


@pytest.mark.parametrize(("tokens", "wanted"), [(1, 0), (8, 0), (9, -0.5), (10, -1)])
def test_long_answers_lose(tokens, wanted):
    assert reward("length", "x", tokens=tokens) == pytest.approx(wanted)


@pytest.mark.parametrize("punished", [1, 4, 10])
@pytest.mark.parametrize("tokens", [1, 6, 7, 9, 10])
def test_the_length_that_costs_is_dapos(punished, tokens):
    """As TRL's get_soft_overlong_punishment(10, punished)."""
    wanted = 0.0 if tokens <= 10 - punished else (10 - punished - tokens) / punished
    assert reward("length", "x", tokens=tokens, punished=punished) == pytest.approx(wanted, abs=1e-12)


def test_a_function_of_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def same(prompts, completions, references, ids):\n"
        "    return [0.5 * (c == r) + (i == 'b') for c, r, i in zip(completions, references, ids)]\n"
    )
    [one, other] = open_rewards(f"exact,{tmp_path}/mine.py:same", "1,-2")
    answers = [Completion("?", "x", "x", "a", 1, 9), Completion("?", "y", "x", "b", 1, 9)]
    assert (one.name, one.weight, one.of_all(answers)) == ("exact", 1.0, [1.0, 0.0])
    assert (other.name, other.weight, other.of_all(answers)) == ("same", -2.0, [0.5, 1.0])


def test_a_reward_model_comes_last_with_the_last_weight():
    [one, model] = open_rewards("exact", "1,-2", has_model=True)
    assert (one.name, one.weight) == ("exact", 1.0)
    assert (model.name, model.weight, model.of_all) == ("reward_model", -2.0, None)
    assert [each.name for each in open_rewards(None, None, has_model=True)] == ["reward_model"]
    with pytest.raises(ConfigError, match="1 numbers for 2 rewards"):
        open_rewards("exact", "1", has_model=True)


@pytest.mark.parametrize(
    ("names", "weights", "words"),
    [
        ("exakt", None, "did you mean exact"),
        ("exact,exact", None, "none twice"),
        ("exact,format", "1", "1 numbers for 2 rewards"),
        ("exact", "nan", "finite"),
        ("exact", "one", "expected numbers"),
        ("none.py:f", None, "no Python file"),
        ("{}/mine.py:g", None, "has no function g"),
        ("{}/broken.py:f", None, "can't be run"),
    ],
)
def test_what_is_refused(tmp_path, names, weights, words):
    (tmp_path / "mine.py").write_text("def f(**_): return []\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=words):
        open_rewards(names.format(tmp_path), weights)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[]", r"gave \[\], a list of 0: return a list with .* for each of the 1 answers"),
        ("[1, 2]", r"gave \[1, 2\], a list of 2"),
        ("[float('nan')]", "gave nan for the answer 'x'"),
        ("['x']", "gave 'x' for the answer 'x'"),
        ("torch.tensor([[1, 2]])", r"gave tensor\(\[1, 2\]\) for the answer 'x'"),
        ("torch.tensor(1)", r"gave tensor\(1\), which is not a list"),
        ("None", "gave None, which is not a list"),
        ("'1'", "gave '1', which is not a list"),
        ("{0.5: 1}", r"gave \{0.5: 1\}, which is not a list"),
        (
            "1 / 0",
            r"failed at .*mine\.py:2: ZeroDivisionError.*\n  the answer: 'x'\n  to the prompt: '\?', of record r",
        ),
        ("(1 / 0 for _ in [1])", r"failed at .*mine\.py:2: ZeroDivisionError"),
    ],
)
def test_a_function_that_gives_no_number_for_an_answer_ends_the_run(tmp_path, body, words):
    (tmp_path / "mine.py").write_text(f"import torch\ndef f(**_): return {body}\n")
    with pytest.raises(DataError, match=rf"mine\.py:f {words}"):
        reward(f"{tmp_path}/mine.py:f", "x")


def test_none_says_that_a_reward_does_not_apply(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(completions, **_): return [None if c == 'x' else 2 for c in completions]\n"
    )
    [opened] = open_rewards(f"{tmp_path}/mine.py:f", None)
    found = opened.of_all([Completion("?", text, "", "a", 1, 9) for text in "xy"])
    assert np.isnan(found[0]) and found[1] == 2.0
    with pytest.raises(DataError, match="or None where it does not apply"):
        (tmp_path / "mine.py").write_text("def f(completions, **_): return ['x', None]\n")
        [opened] = open_rewards(f"{tmp_path}/mine.py:f", None)
        opened.of_all([Completion("?", text, "", "a", 1, 9) for text in "xy"])


@pytest.mark.parametrize(
    "header",
    ["completions, solution, **_", "solution, completions", "completions, solution, level=None, *, ids, other=5"],
)
def test_a_function_gets_the_columns_that_it_names(tmp_path, header):
    (tmp_path / "mine.py").write_text(
        f"def f({header}):\n    return [c == str(s) for c, s in zip(completions, solution, strict=True)]\n"
        "def every(**lists): return [len(lists)] * 3\n"
    )
    columns = [{"solution": 3, "level": "easy"}, {"solution": "4"}, {}]
    answers = [Completion("?", "3", "x", "a", 1, 9, columns=each) for each in columns]
    [mine, every] = open_rewards(f"{tmp_path}/mine.py:f,{tmp_path}/mine.py:every", None)
    assert mine.of_all(answers) == [1, 0, 0]  # None where a record lacks the column
    assert every.of_all(answers) == [6, 6, 6]
    with pytest.raises(DataError, match=r"has the parameter 'solution', but no list or column.*, ids"):
        mine.of_all([Completion("?", "3", "x", "a", 1, 9)] * 2)


def test_functions_of_the_user_are_tried_on_made_up_answers(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, references, **_): return [float(c) for c in completions]\n")
    opened = open_rewards(f"exact,{tmp_path}/mine.py:f", None)
    one = Completion("How many?", "3", "3", "a", 1, 9)
    with pytest.raises(DataError, match=r"mine\.py:f failed at .*mine\.py:1: ValueError.*\n  the answer: ''\n"):
        try_rewards(opened, one)  # the second answer is empty
    try_rewards(opened[:1], one)


def test_equal_answers_are_judged_once():
    samples = [LoadedSample(torch.tensor([n, 1]), torch.tensor([IGNORE_INDEX, 1]), []) for n in range(3)]
    seen = []

    def scores(some: list[LoadedSample]) -> list[float]:
        seen.extend(some)
        return [float(one.input_ids[0]) for one in some]

    answers = [Completion("", "", "", "", 1, 9, samples[i]) for i in (0, 1, 0, 2, 1)]
    assert model_rewards(SimpleNamespace(scores=scores), answers) == [0.0, 1.0, 0.0, 2.0, 1.0] and len(seen) == 3


def test_the_mean_of_a_reward_is_over_the_prompts_that_it_applies_to(monkeypatch):
    monkeypatch.setattr("llava_ds.extensions.rl.policy_batches.sum_over", lambda group, values: values)
    answer = Answer((1, 2), (-1.0, -1.0), 0.5, True)
    rows = ([np.nan, np.nan], [1.0, np.nan], [4.0, 2.0])
    groups = [Group(None, [answer] * 2, np.array([row]), np.nan_to_num(row)) for row in rows]
    totals, mesh = StepTotals(3, 6, 12, 1.0), Mesh(dp=1, dp_rank=0)
    for of_user, wanted in ((True, 2.0), (False, 4 / 3)):
        rewards = [Reward("mine", 1.0, None, of_user)]
        sums = metrics_of(groups, rewards, totals, mesh, torch.device("cpu"))
        assert sums["rewards/mine/mean"].item() / totals.prompts == pytest.approx(wanted)
        assert sums["reward"].item() / totals.prompts == pytest.approx((0 + 0.5 + 3) / 3)
