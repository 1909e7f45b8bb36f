"""Pairs that share their prompt train as pairs that don't: any ZeRO stage, with LoRA, and on ranks sharing tokens."""

import pytest
import toys
from known_flags import known
from launching import ds_config, run_many, toy_run
from textbook_pairs import write_pairs

from llava_ds.files.jsonl import read_metrics

STEPS = 3
LORA = {"lora_enable": True, "lora_r": 4, "lora_dropout": 0.0}
WIDE = {"sequence_parallel_size": 2}
# Ranks, ZeRO stage and further flags.
QUICK = {"dpo": (2, 2, {}), "dpo on shared tokens": (2, 3, WIDE)}
SLOW = {
    **{f"dpo by ZeRO-{stage}": (2, stage, {}) for stage in (0, 1, 3)},
    "reward by ZeRO-3": (2, 3, {"objective": "reward"}),
    "reward of tokens": (2, 2, {"objective": "reward", "reward_loss": "tokens"}),
    "dpo with LoRA": (2, 2, LORA),
    "dpo with LoRA on shared tokens": (2, 2, {**LORA, **WIDE}),
    "dpo on a pipeline": (2, 1, {"pipeline_parallel_size": 2}),
    "dpo on shared matrices": (2, 1, {"tensor_parallel_size": 2}),
    "cpo": (2, 2, {"loss_type": "cpo"}),
    "orpo": (2, 3, {"loss_type": "orpo"}),
    "kto": (2, 2, {"objective": "kto"}),
    "kto on shared tokens": (2, 3, {"objective": "kto", **WIDE}),
    "kto on shared matrices": (2, 1, {"objective": "kto", "tensor_parallel_size": 2}),
    "dpo alone": (1, 2, {}),
    "dpo alone, recomputed": (1, 0, {"gradient_checkpointing": "all"}),
}


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.long)], ids=["quick", "slow"])
def test_losses_and_gradients_are_the_same(tmp_path, cases):
    cases = {name: case for name, case in cases.items() if known(case[2])}
    given = {**toys.write_base(tmp_path / "base"), **write_pairs(tmp_path / "data", 12)}
    for ranks in {ranks for ranks, *_ in cases.values()}:
        todo = [
            toy_run(
                given, tmp_path / f"{name} {shares}", ds_config(stage), train_batch_size=4, max_steps=STEPS,
                tokens_per_micro_batch=200, learning_rate=1e-3, adam_epsilon=1e-3, share_prompts=shares,
                **{"objective": "dpo", **more},
            )
            for name, (wanted, stage, more) in cases.items() if wanted == ranks
            for shares in (True, False)
        ]  # fmt: skip
        output = run_many(ranks, tmp_path / f"launch-{ranks}", todo, finished=False)
        assert "computed once per answer" not in output
    for name in cases:
        shared, plain = (
            read_metrics(tmp_path / f"{name} {shares}" / "run" / "metrics.jsonl") for shares in (True, False)
        )
        assert len(shared) == STEPS
        for row, other in zip(shared, plain):
            assert row["tokens"] < other["tokens"]
            for number in ("loss", "grad_norm"):
                assert row[number] == pytest.approx(other[number], rel=1e-5), (name, row["step"], number)
