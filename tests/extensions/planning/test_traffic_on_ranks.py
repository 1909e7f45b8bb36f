"""The collectives' bytes that the estimate of speed counts, against those of real ranks."""

import json
from pathlib import Path

import pytest
import toys
from launching import command_line, ds_config, launch, tight_config

from llava_ds.config.parsing import parse_arguments
from llava_ds.engine.ds_config.resolve import read_ds_config, resolve_ds_config
from llava_ds.extensions.planning.auto import Data, Devices, planned_run
from llava_ds.extensions.planning.shapes import shape_of_folders
from llava_ds.extensions.planning.traffic import step_traffic

COUNTING = Path(__file__).with_name("counting.py")
RANKS = 2
# DeepSpeed JSON, what trains, micro-batches of a step. zero3 keeps what such a small model needs again, tight nothing.
CASES = [
    (config, trains, micro_steps)
    for config in ("zero0", "zero1", "zero2", "tight")
    for trains, micro_steps in (("all", 1), ("all", 3), ("projector", 2))
]
CASES += [("zero3", "all", 2)]
# What a rank of a ring sends, in parts of the whole.
SENDS = {"all_reduce": 2, "all_gather_into_tensor": 1, "all_gather": 1, "reduce_scatter_tensor": 1, "reduce_scatter": 1}


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[tuple, tuple[float, float]]:
    """Bytes that a rank sent in a step, and those of the estimate, for every case, all in one launch."""
    folder = tmp_path_factory.mktemp("traffic")
    base = toys.write_base(folder / "base", hidden_size=128, intermediate_size=320, num_hidden_layers=4)
    data = toys.write_data(folder / "data", "itit" * 8)
    cases, flags = [], {}
    for case in CASES:
        config, trains, micro_steps = case
        name = f"{config}-{trains}-{micro_steps}"
        flags[case] = command_line(
            {
                **base,
                **data,
                "deepspeed_config": tight_config(folder) if config == "tight" else ds_config(int(config[-1])),
                "output_dir": folder / name,
                "cache_dir": folder / "cache",
                "model_max_length": 512,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": micro_steps,
                "bf16": True,
                "tune_mm_mlp_adapter": trains == "projector",
                "save_strategy": "no",
                "resume": "never",
            }
        )
        cases.append({"flags": flags[case], "out": str(folder / f"{name}.json")})
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    done = launch(RANKS, COUNTING, str(listed))
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        case: (sent(json.loads(Path(each["out"]).read_text())), estimated(flags[case], case[2]))
        for case, each in zip(CASES, cases)
    }


def sent(counted: dict[str, int]) -> float:
    print(counted)
    part = (RANKS - 1) / RANKS
    return part * sum(SENDS[name] * size for name, size in counted.items() if name in SENDS)


def estimated(flags: list[str], micro_steps: int) -> float:
    args, _ = parse_arguments(flags)
    shape = shape_of_folders(args)
    raw = read_ds_config(args.training.deepspeed_config)
    resolved = resolve_ds_config(raw, args, dp=RANKS, hidden_size=shape.text.hidden)
    run = planned_run(shape, resolved, Data(512, 0.25, share=512), Devices(RANKS, 8))
    return step_traffic(shape, run.placement, run.setup, micro_steps).total


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bytes_are_those_that_deepspeed_sends(counted, case):
    found, expected = counted[case]
    assert found == pytest.approx(expected, rel=0.01)
