"""Running out of memory is one message: what was computed and in use, and the flags to change with their values."""

from types import SimpleNamespace

import pytest
import torch
from ds_json import arguments

from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.extensions.active import values_of
from llava_ds.runtime.ranks import Ranks
from llava_ds.tracking.out_of_memory import MemoryWatch
from llava_ds.train.state import TrainState

AUTO = f"--gradient_checkpointing {'auto' if values_of('gradient_checkpointing') else 'all'}"

CPU = torch.device("cpu")
BATCH = SimpleNamespace(input_ids=torch.zeros(1, 300), pixel_values=torch.zeros(4, 1), extra={})


class Engine(torch.nn.Module):
    """Runs out of memory in the forward after this many."""

    def __init__(self, whole: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = whole, error

    def forward(self, batch: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error


def watched(whole: int, error: Exception, stage: int = 1, **flags: object) -> tuple[MemoryWatch, Engine, TrainState]:
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if flags.pop("offloaded", False) else {})}
    resolved = ResolvedConfig({"zero_optimization": zero}, arguments(**flags), {})
    dataset = SimpleNamespace(
        lengths=[40] * 20, rows=range(100, 120), row=lambda row: {"id": f"s{row}"}, wait_for=lambda samples: None
    )
    plans = {4: [[[0]], [[1, 2], [*range(3, 14)]]], 5: [[[14]], [[15]]]}  # by step, rank and micro-batch
    plan = SimpleNamespace(dataset=dataset, of_rank=lambda step, rank: plans[step - 1][rank])
    engine, state = Engine(whole, error), TrainState(4)
    return MemoryWatch(engine, resolved, plan, lambda: state.step, Ranks(1, 1, 2, CPU)), engine, state


def said(watch: MemoryWatch, engine: Engine, batches: int = 1) -> str:
    with pytest.raises(ConfigError) as caught, watch:
        for _ in range(batches):
            engine(BATCH)
    return str(caught.value)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_micro_batch_is_named_with_its_samples():
    watch, engine, _ = watched(1, OOM)
    first, second, *_ = said(watch, engine, 2).splitlines()
    assert first == (
        "out of memory on rank 1 (cpu) in step 5, micro-batch 2 of 2: 300 tokens, 4 image tiles, 11 samples "
        "(s103, s104, s105, s106, s107, s108, s109, s110 and 3 more)"
    )
    assert "GB in use" in second and second.endswith("ZeRO stage 1: CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_next_step_counts_its_own_micro_batches():
    watch, engine, state = watched(2, OOM)
    with watch:
        engine(BATCH)
        engine(BATCH)
        state.step = 5
        with pytest.raises(ConfigError, match=r"in step 6, micro-batch 1 of 1: .* \(s115\)"), watch:
            engine(BATCH)


def test_the_warm_up_is_named():
    watch, engine, _ = watched(0, OOM)
    with pytest.raises(ConfigError) as caught, watch.warm_up(SimpleNamespace(samples=[6, 7])):
        engine(BATCH)
    where = "in the warm-up of the largest micro-batch, before step 5: 300 tokens, 4 image tiles, 2 samples (s106"
    assert where in str(caught.value)


def test_in_eval_and_in_a_hook_no_sample_of_a_step_is_named():
    watch, engine, state = watched(3, OOM)
    with pytest.raises(ConfigError) as caught, watch:
        engine(BATCH)
        state.step = 5
        engine.eval()
        for _ in range(3):  # more than the next step has micro-batches
            engine(BATCH)
    where = "out of memory on rank 1 (cpu) evaluating after step 5: 300 tokens, 4 image tiles"
    assert str(caught.value).splitlines()[0] == where
    watch, engine, state = watched(2, OOM)
    with pytest.raises(ConfigError) as caught, watch:
        engine(BATCH)
        state.step = 5
        raise OOM
    assert str(caught.value).splitlines()[0] == "out of memory on rank 1 (cpu) after step 5"


@pytest.mark.parametrize(
    ("flags", "expected", "absent"),
    [
        (
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
            [
                AUTO,
                "--tokens_per_micro_batch 150:",
                "--per_device_train_batch_size 8 --gradient_accumulation_steps 4:",
                "zero2.json",
                "zero2_offload.json",
            ],
            [],
        ),
        (
            {"gradient_checkpointing": "auto", "per_device_train_batch_size": 4, "train_batch_size": 8, "stage": 3},
            ["--gradient_checkpointing all", "--per_device_train_batch_size 2:", "zero3_offload.json"],
            ["accumulation", "zero4"],
        ),
        (
            {"gradient_checkpointing": "all", "tokens_per_micro_batch": 300, "stage": 3, "offloaded": True},
            ["--tokens_per_micro_batch 150:"],
            ["checkpointing", "per_device", "zero"],
        ),
        (
            # Micro-batches of the longest sample's 40 tokens are no shorter: what is left is to share it.
            {"tokens_per_micro_batch": 40, "batch_tokens": 40},
            [AUTO, "below 40: the"],
            ["--tokens_per_micro_batch", "per_device"],
        ),
        (
            {"loss_reduction": "micro_batch", "per_device_train_batch_size": 4},
            ["--per_device_train_batch_size 2"],
            ["tokens_per_micro_batch"],
        ),
    ],
)
def test_advice_fits_the_flags(monkeypatch, flags, expected, absent):
    flags = dict(flags)
    monkeypatch.setattr(BATCH, "input_ids", torch.zeros(1, flags.pop("batch_tokens", 300)))
    watch, engine, _ = watched(0, OOM, **{"stage": 1, **flags})
    advice = said(watch, engine).split("except --gradient_checkpointing):")[1]
    places = [advice.index(part) for part in expected]
    assert places == sorted(places)
    assert not any(part in advice for part in absent), advice


def test_a_cpus_allocator_counts_and_other_errors_pass_through():
    watch, engine, _ = watched(0, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert said(watch, engine).startswith("out of memory on rank 1")
    watch, engine, _ = watched(0, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"), watch:
        engine(BATCH)
