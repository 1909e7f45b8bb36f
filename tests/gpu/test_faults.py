"""Running out of memory, and a rank that falls asleep, on a GPU."""

import re
import shutil

import pytest
from extension_there import if_there
from gpu_lane import OUTPUT, REHEARSED, ROOT, train
from launching import ds_config

from llava_ds.constants import EXIT_RANK_LOST

pytestmark = pytest.mark.gpu

RECIPE = ROOT / "run" / "recipes" / "tiny-finetune.yaml"


def flags_of(name: str, **more: object) -> dict[str, object]:
    shutil.rmtree(OUTPUT / name, ignore_errors=True)
    short = {"max_steps": 20, **if_there("samples", sample_steps=0), "eval_fraction": 0, "save_strategy": "no"}
    return {"deepspeed_config": ds_config(0), "recipe": RECIPE, "output_dir": OUTPUT / name, **short, **more}


def test_running_out_of_memory_is_one_message(record_property):
    """The tiny model on micro-batches that no share of a GPU of 3 % holds."""
    many = 4096 if REHEARSED else 65536
    more = {"train_batch_size": many, "per_device_train_batch_size": many, "max_steps": 2}
    done = train(flags_of("out-of-memory", **more), how=("limited",))
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "Traceback" not in output, output[-5000:]
    (line,) = re.findall(r".*out of memory on rank 0 .*", output)
    record_property("message", line.strip()[:200])
    assert "samples (" in line


def test_a_rank_that_sleeps_in_its_loader_is_named(record_property):
    limits = {"watchdog_start_s": 120, "watchdog_step_s": 20, "watchdog_save_s": 60}
    more = {"dataloader_num_workers": 0, "train_batch_size": 8, "per_device_train_batch_size": 4}
    done = train(flags_of("asleep", **limits, **more), num_ranks=2, how=("asleep",))
    output = done.stdout + done.stderr
    assert done.returncode == EXIT_RANK_LOST, output[-5000:]
    (line,) = re.findall(r".*the run hangs.*", output)
    record_property("message", line.strip()[:300])
    assert "rank 1 " in line and "Traceback" not in output
