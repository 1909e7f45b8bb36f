"""The warm-up changes no number at any stage, and running out of memory on one rank ends all with one message.

"off" checkpoints no layer and, on a CPU, warms nothing up; "auto" measures, chooses and warms up.
"""

import pytest
import torch
import toys
from known_flags import known_cases
from launching import ROOT, command_line, ds_config, launch, run_many, toy_run
from safetensors.torch import load_file

from llava_ds.files.jsonl import read_metrics

pytestmark = pytest.mark.long

OFF, AUTO = {}, {"gradient_checkpointing": "auto", "activation_memory_gb": 0.0005}
KINDS = {
    **{f"zero{stage}": (stage, {}) for stage in (0, 1, 2, 3)},
    **{f"zero{stage}-bf16": (stage, {"bf16": True}) for stage in (0, 1, 2, 3)},
    **{f"zero{stage}-accumulated": (stage, {"per_device_train_batch_size": 1}) for stage in (0, 1, 2, 3)},
    "zero3-tower": (3, {"unfreeze_mm_vision_tower": True}),
    "zero1-compiled": (1, {"torch_compile": True, "torch_compile_backend": "eager"}),
}
KINDS = known_cases(KINDS)
WORKER = ROOT / "tests" / "workers" / "runs_out.py"


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("warm_up")
    return {**toys.write_base(folder / "base", attention_dropout=0.1), **toys.write_data(folder / "data", "ittiti" * 3)}


@pytest.fixture(scope="module")
def runs(given, tmp_path_factory):
    """Output folders of every kind, off and auto."""
    folder, todo, outputs = tmp_path_factory.mktemp("runs"), [], {}
    for name, (stage, more) in KINDS.items():
        for how, flags in (("off", OFF), ("auto", AUTO)):
            out = outputs[name, how] = folder / f"{name}-{how}"
            todo.append(toy_run(given, out, ds_config(stage), max_steps=4, max_grad_norm=1.0, **more, **flags))
    output = run_many(2, folder / "launch", todo, timeout_s=900)
    assert output.count("2 of 2 layers of the language model are checkpointed") == len(KINDS)
    return outputs


@pytest.mark.parametrize("name", KINDS)
def test_a_run_is_bit_equal_with_and_without_it(runs, name):
    off, auto = runs[name, "off"], runs[name, "auto"]
    fields = ("loss", "grad_norm", "lr", "skipped_steps")
    rows = [
        [[row[name] for name in fields] for row in read_metrics(out / "run" / "metrics.jsonl")] for out in (off, auto)
    ]
    assert rows[0] == rows[1]
    expected, found = (load_file(out / "model.safetensors") for out in (off, auto))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize(("rank", "stage"), [(0, 3), (1, 1)])
def test_one_message_and_exit_code_2_while_the_other_rank_is_in_a_collective(given, tmp_path, rank, stage):
    flags = toy_run(given, tmp_path / "out", ds_config(stage), max_steps=4)
    done = launch(2, WORKER, str(rank), *command_line(flags))
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert said.count("run/train.py: error") == 1 and "Traceback" not in said, said
    assert f"out of memory on rank {rank} (cpu) in step 3, micro-batch 1 of 1: " in said
    assert "--gradient_checkpointing auto" in said and "samples (s" in said
