"""Runs that share images' tokens train as runs that don't: ZeRO 2 and 3, with LoRA, and on ranks sharing tokens."""

import pytest
import toys
from known_flags import known
from launching import ds_config, run_many, toy_run
from test_image_prefix import write_questions

from llava_ds.files.jsonl import read_metrics

STEPS = 3
LORA = {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0}
# Ranks, ZeRO stage and further flags.
QUICK = {"by ZeRO-2": (2, 2, {}), "on shared tokens, evaluated": (2, 3, {"sequence_parallel_size": 2, "eval_steps": 2})}
SLOW = {
    "by ZeRO-3": (2, 3, {}),
    "with LoRA": (2, 2, LORA),
    "alone": (1, 2, {}),
    "alone, recomputed": (1, 0, {"gradient_checkpointing": "all"}),
    "on a pipeline": (2, 1, {"pipeline_parallel_size": 2}),
    "on shared matrices": (2, 1, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.long)], ids=["quick", "slow"])
def test_losses_and_gradients_are_the_same(tmp_path, cases):
    cases = {name: case for name, case in cases.items() if known(case[2])}
    given = {**toys.write_base(tmp_path / "base"), **write_questions(tmp_path / "data")}
    for ranks in {ranks for ranks, *_ in cases.values()}:
        todo = [
            toy_run(
                given, tmp_path / f"{name} {shares}", ds_config(stage), train_batch_size=10, max_steps=STEPS,
                tokens_per_micro_batch=500, learning_rate=1e-3, adam_epsilon=1e-3, share_image_prefix=shares,
                eval_fraction=0.25, **more,
            )
            for name, (wanted, stage, more) in cases.items() if wanted == ranks
            for shares in (True, False)
        ]  # fmt: skip
        output = run_many(ranks, tmp_path / f"launch-{ranks}", todo, finished=False)
        assert output.count("records of one image share") == len(todo) // 2
    for name in cases:
        shared, plain = (
            read_metrics(tmp_path / f"{name} {shares}" / "run" / "metrics.jsonl") for shares in (True, False)
        )
        assert len(shared) == len(plain) >= STEPS
        for row, other in zip(shared, plain):
            assert row.get("tokens", 0) < other.get("tokens", 1)
            for number in {"loss", "grad_norm", "eval_loss"} & row.keys():
                assert row[number] == pytest.approx(other[number], rel=1e-5), (name, row["step"], number)
