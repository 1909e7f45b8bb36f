"""A run that goes on with other ranks, at another ZeRO stage, or both: the same samples in the same order, the same
model but for rounding, every group's rates, and frozen weights as they were."""

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import toys
from checkpoints import assembled, break_off, trained_shapes
from known_flags import known
from launching import ds_config, run_many

STEPS, SAVED = 6, 3
STAGES, SIZES = (0, 1, 2, 3), (1, 2, 4)
# Every ordered pair of sizes from every stage to another; at two ranks every ordered pair of stages.
ACROSS = [(size, stage, other, (stage + 1) % 4) for size, other in itertools.permutations(SIZES, 2) for stage in STAGES]
STAGE_PAIRS = [(2, stage, 2, after) for stage, after in itertools.permutations(STAGES, 2)]
FROM_TWO = [(2, stage, 1, 3 - stage) for stage in STAGES]
KINDS = {
    "fp32": ({}, [*ACROSS, *STAGE_PAIRS]),
    "bf16": ({"bf16": True}, [*(move for move in ACROSS if 4 not in move), *STAGE_PAIRS]),
    "lora": ({"lora_enable": True, "lora_dropout": 0.0}, FROM_TWO),
    "projector": ({"tune_mm_mlp_adapter": True, "mm_projector_lr": 2e-3}, FROM_TWO),
}
KINDS = {kind: case for kind, case in KINDS.items() if known(case[0])}
# Of the loss: of its value. Of the weights: the norm of a tensor's difference, of the tensor's; and the largest of one
# number, where float32's last digit above 1.0 is 1.2e-7.
LIMITS = {"loss": 1e-7, "weight": 1e-7, "one weight": 1.2e-7, "moment": 1e-7}
LIMITS_BF16 = dict.fromkeys(LIMITS, 2e-2)
CASES = [(kind, move) for kind, (_, moves) in KINDS.items() for move in moves]
pytestmark = pytest.mark.faults


def name_of(move) -> str:
    size, stage, other, after = move
    return f"{size}-zero{stage}-to-{other}-zero{after}"


def case_name(case) -> str:
    return f"{case[0]}-{name_of(case[1])}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    base = toys.write_base(folder / "base")
    data = toys.write_data(folder / "data", "iitiitittiitiitii")
    flags = {
        **base,
        **data,
        "cache_dir": folder / "cache",
        "model_max_length": 512,
        "learning_rate": 2e-3,
        "mm_projector_lr": 1e-3,
        "weight_decay": 0.1,
        "warmup_ratio": 0.3,
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "save_steps": SAVED,
    }

    def begin(size: int) -> None:
        begun = sorted({(kind, move[1]) for kind, move in CASES if move[0] == size})
        runs = [
            {
                **flags,
                **KINDS[kind][0],
                "per_device_train_batch_size": 4 // size,
                "gradient_accumulation_steps": 2,
                "deepspeed_config": ds_config(stage),
                "output_dir": folder / kind / f"{size}-zero{stage}",
            }
            for kind, stage in begun
        ]
        run_many(size, folder / f"launch-{size}", runs, timeout_s=3600, finished=False)

    def go_on(size: int) -> None:
        runs = [
            {
                **flags,
                **KINDS[kind][0],
                "per_device_train_batch_size": 8,  # on other ranks accumulation is what is left
                **({"train_batch_size": 8} if move[0] == size else {}),
                "deepspeed_config": ds_config(move[3]),
                "output_dir": break_off(
                    folder / kind / f"{move[0]}-zero{move[1]}", folder / kind / name_of(move), SAVED
                ),
            }
            for kind, move in CASES
            if move[2] == size
        ]
        said = run_many(size, folder / f"launch-to-{size}", runs, timeout_s=3600, finished=False)
        assert said.count(f"resumed at step {SAVED}") == len(runs)

    # Beside each other, for half the time goes into starting.
    with ThreadPoolExecutor(len(SIZES)) as pool:
        for work in (begin, go_on):
            list(pool.map(work, SIZES))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(("kind", "move"), CASES, ids=[case_name(case) for case in CASES])
def test_the_run_goes_on_as_if_nothing_had_changed(folder, record_property, kind, move):
    whole, moved = (folder / kind / name for name in (f"{move[0]}-zero{move[1]}", name_of(move)))
    before, after = (
        [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
        for path in (whole, moved)
    )
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    for name in ("lr", "samples", "tokens", "supervised_tokens"):
        assert [row[name] for row in after] == [row[name] for row in before]
    assert kind == "projector" or len(set(before[-1]["lr"])) > 1  # groups with rates of their own
    paths = [path / f"checkpoint-{STEPS}" for path in (whole, moved)]
    shapes = next(trained_shapes(path) for path, stage in zip(paths, (move[1], move[3])) if stage)
    expected, found = (assembled(path, size, shapes) for path, size in zip(paths, (move[0], move[2])))
    loss = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(before, after))
    tensors = {
        key: [(expected[key][name].detach().double(), found[key][name].double()) for name in shapes] for key in expected
    }
    largest = {key: max(float((a - b).abs().max()) for a, b in pairs) for key, pairs in tensors.items()}
    weight = max(float((a - b).norm() / a.norm()) for a, b in tensors["weight"])
    moment = max(value for key, value in largest.items() if key != "weight")
    differences = {"loss": loss, "weight": weight, "one weight": largest["weight"], "moment": moment}
    for name, value in differences.items():
        record_property(name, value)
    limits = LIMITS_BF16 if kind == "bf16" else LIMITS
    assert all(value <= limits[name] for name, value in differences.items()), differences
