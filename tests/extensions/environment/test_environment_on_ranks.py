"""Episodes on real ranks: any ZeRO stage and number of ranks gives one run, and a resumed run is the whole one."""

import json
import shutil
from pathlib import Path

import pytest
import toys
from drawing_runs import RULES, TIMES, flags_of, read_rollouts
from episodes_toy import GAME, end_often
from launching import ROOT, command_line, launch, run_many

from llava_ds.config.parsing import parse_arguments
from llava_ds.constants import ConfigError
from llava_ds.files.jsonl import read_metrics

STEPS, SAVED = 3, 2
EPISODES = {"max_completion_length": 160, "max_turn_length": 5, "max_turns": 3, "learning_rate": 2e-4}
EPISODES |= {"adam_epsilon": 1e-3, "max_steps": STEPS}
KINDS = {
    "crops": {},
    "opens": {"beta": 0.1, "num_iterations": 2, "importance_sampling_level": "sequence"},
    "critic": {"objective": "ppo"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("environment")


@pytest.fixture(scope="module")
def given(folder) -> dict[str, str]:
    (folder / "rules.py").write_text(RULES)
    (folder / "game.py").write_text(GAME)
    flags = {**toys.write_base(folder / "base"), **toys.write_data(folder / "data", "iitit")}
    end_often(folder / "base" / "llama")
    return flags


def run_of(folder: Path, given: dict, name: str, stage: int, kind: str = "crops", **more: object) -> dict:
    """Flags of a run whose only reward is the environment's."""
    name_of_class = "Opens" if kind == "opens" else "Crops"
    more = {"environment": f"{folder}/game.py:{name_of_class}", **EPISODES, **KINDS[kind], **more}
    flags = flags_of(folder, given, name, stage, **more)
    return {name: value for name, value in flags.items() if name not in ("reward_funcs", "reward_weights")}


def rows_of(folder: Path) -> list[dict]:
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def assert_same(rows: list[dict], others: list[dict], but: tuple[str, ...] = ()) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"lr", *but}:
            assert row[name] == pytest.approx(other[name], abs=1e-6, rel=1e-5), (row["step"], name)


def test_a_resumed_run_is_bit_equal_and_turns_are_logged(folder, given):
    """On two ranks; with --share_prompts False and in packs of another size, the loss is the same."""
    saves = {"save_strategy": "steps", "save_steps": SAVED}
    alone = {"share_prompts": False, "tokens_per_micro_batch": 600}
    todo = [run_of(folder, given, "whole", 2, **saves), run_of(folder, given, "alone", 3, **alone)]
    run_many(2, folder / "launch", todo, finished=False)
    (folder / "resumed" / "run").mkdir(parents=True)
    shutil.copytree(folder / "whole" / f"checkpoint-{SAVED}", folder / "resumed" / f"checkpoint-{SAVED}")
    shutil.copy(folder / "whole" / "run" / "metrics.jsonl", folder / "resumed" / "run")
    run_many(2, folder / "again", [run_of(folder, given, "resumed", 2, **saves)], finished=False)
    rows = rows_of(folder / "whole")
    assert rows_of(folder / "resumed") == rows
    assert read_rollouts(folder / "resumed") == read_rollouts(folder / "whole")[SAVED:]
    end = f"checkpoint-{STEPS}"
    hashes = [json.loads((folder / name / end / "manifest.json").read_text())["files"] for name in ("whole", "resumed")]
    states = [{k: v for k, v in each.items() if k.endswith(".pt")} for each in hashes]
    assert states[0] and states[0] == states[1]
    assert_same(rows, rows_of(folder / "alone"), ("tokens", "samples", "num_micro_batches"))
    for row in rows:
        assert 1 < row["episodes/turns"] < 3
        assert row["clip_ratio/region_mean"] == 0 and 0 < row["sampling_gap"] < 1e-5
        assert row["reward"] == row["rewards/environment/mean"] > 0
    assert 0 < sum(row["episodes/bound_ratio"] for row in rows) < STEPS
    texts = [answer["text"] for row in read_rollouts(folder / "whole") for answer in row["answers"]]
    assert any("[<image> What is it?" in text for text in texts)


@pytest.mark.long
def test_ranks_and_stages_give_one_run(folder, given):
    """Also with a reference model and a first question of the environment, and PPO."""
    runs = {(ranks, stage): f"{ranks}-{stage}" for ranks, stage in ((1, 2), (2, 0), (2, 2), (2, 3))}
    for ranks in (1, 2):
        todo = [
            run_of(folder, given, f"{kind}-{name}", stage, kind)
            for (number, stage), name in runs.items() if number == ranks
            for kind in KINDS
        ]  # fmt: skip
        run_many(ranks, folder / f"launch-{ranks}", todo, finished=False)
    for kind in KINDS:
        first, *others = (rows_of(folder / f"{kind}-{name}") for name in runs.values())
        for rows in others:
            assert_same(first, rows)
        assert len(first) == STEPS and all(row["episodes/turns"] > 1 for row in first)
        if kind == "critic":
            assert first[-1]["val/mean"] != 0


BREAKS = """
class Later:
    def reset(self, record, seed):
        self.record = record

    def step(self, answer):
        import os
        if os.path.exists("{there}"):
            raise KeyError("lost")
        return None, float(len(answer)), True
"""


@pytest.mark.long
def test_an_error_ends_the_run_on_every_rank_and_it_goes_on_from_its_checkpoint(folder, given):
    there = folder / "output" / "checkpoint-1"
    (folder / "breaks.py").write_text(BREAKS.format(there=there))
    flags = run_of(folder, given, "output", 3, save_strategy="steps", save_steps=1, train_batch_size=2)
    flags["environment"] = f"{folder}/breaks.py:Later"
    done = launch(2, ROOT / "run" / "rl.py", *command_line(flags))
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Later, record 's" in said, said
    assert ", turn 1: step raised KeyError('lost')" in said
    assert there.is_dir() and "Traceback" not in said
    (folder / "breaks.py").write_text(BREAKS.format(there="/nowhere"))
    done = launch(2, ROOT / "run" / "rl.py", *command_line(flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in rows_of(folder / "output")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--max_turns", "3"], "--max_turns has no effect without --environment"),
        (
            ["--environment", "e.py:E"],
            "--environment can't be used with --objective sft, which samples no answers",
        ),
        (
            ["--objective", "grpo", "--environment", "e.py:E", "--vllm_server", "http://127.0.0.1:1"],
            "--vllm_server can't be used with --environment: it samples one turn, from files",
        ),
        (
            ["--objective", "grpo", "--environment", "e.py:E", "--image_aspect_ratio", "anyres"],
            "--image_aspect_ratio anyres can't be used with --environment",
        ),
        (
            ["--objective", "grpo", "--max_tool_calling_iterations", "3"],
            "--max_turns",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, expected):
    with pytest.raises(ConfigError) as refused:
        parse_arguments(["--output_dir", "out", "--deepspeed_config", "zero2", *flags])
    assert expected in str(refused.value)
