"""A run that is broken off and gone on with is bit for bit the run that was not: at every ZeRO stage, in both
precisions, with and without workers, accumulation and packing, on two ranks."""

import itertools
import shutil

import pytest
import toys
from checkpoints import break_off, differences
from launching import ds_config, losses, run_many

STEPS, SAVED = 4, 2
CASES = list(itertools.product((0, 1, 2, 3), (False, True), (0, 2), (1, 4), (None, 300)))
pytestmark = pytest.mark.faults


def name_of(case) -> str:
    stage, bf16, workers, accumulation, packed = case
    return (
        f"zero{stage}{'-bf16' if bf16 else ''}-workers{workers}-accumulation{accumulation}{'-packed' if packed else ''}"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    base = toys.write_base(folder / "base", attention_dropout=0.1)  # so that random states matter
    data = toys.write_data(folder / "data", "iitiitittiiti")  # an epoch ends within the run where accumulation is 4
    runs = {}
    for case in CASES:
        stage, bf16, workers, accumulation, packed = case
        flags = {"tokens_per_micro_batch": packed} if packed else {}
        runs[name_of(case)] = {
            **base,
            **data,
            **flags,
            "cache_dir": folder / "cache",
            "model_max_length": 512,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": accumulation,
            "bf16": bf16,
            "dataloader_num_workers": workers,
            "learning_rate": 2e-3,
            "mm_projector_lr": 1e-3,
            "weight_decay": 0.1,
            "warmup_ratio": 0.3,
            "max_grad_norm": 1.0,
            "max_steps": STEPS,
            "save_steps": SAVED,
            "deepspeed_config": ds_config(stage),
        }
    wholes = [{**flags, "output_dir": folder / "whole" / name} for name, flags in runs.items()]
    run_many(2, folder / "launch-1", wholes, timeout_s=3600, finished=False)
    resumed = []
    for name, flags in runs.items():
        broken = break_off(folder / "whole" / name, folder / "resumed" / name, SAVED)
        resumed.append({**flags, "output_dir": broken})
    said = run_many(2, folder / "launch-2", resumed, timeout_s=3600, finished=False)
    assert said.count(f"resumed at step {SAVED}, with bit-identical") == len(CASES)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_resumed_run_is_bit_equal(folder, case):
    whole, resumed = (folder / side / name_of(case) for side in ("whole", "resumed"))
    assert losses(whole) == losses(resumed) and len(losses(whole)) == STEPS
    assert differences(whole / f"checkpoint-{STEPS}", resumed / f"checkpoint-{STEPS}") == []
