"""The last line of a dry run: whether the run can start, how many steps it takes, and whether it fits."""

import dataclasses
import json

import pytest

from llava_ds.extensions.planning.dry_run import conclusion, measured_step_s
from llava_ds.extensions.planning.fit import GB, Run
from llava_ds.extensions.planning.memory import Setup, ZeroPlacement
from llava_ds.extensions.planning.shapes import shape_of_count

RUN = Run(shape_of_count(1_000_000_000), ZeroPlacement(3), Setup(2, gpus_per_node=2), None)
NEEDED = RUN.estimate().total


def line(
    run: Run = RUN, gpu: float | None = None, host: float = 1e12, steps=(0, 40), step_s: float | None = None
) -> str:
    return conclusion(run, gpu, host, steps, 16, step_s)


def test_on_a_cpu_the_ranks_share_the_machines_memory():
    assert line().startswith("dry run: ready. 40 optimizer steps of 16 samples on 2 ranks. Memory: ")
    assert line().endswith(f"{2 * NEEDED / GB:.3g} GB of 1 TB free on this machine: fits")
    assert line(host=2 * NEEDED + 1).startswith("dry run: may run out of memory.")
    assert line(host=1.9 * NEEDED).startswith("dry run: would run out of memory.")


def test_on_gpus_both_memories_count():
    ready = line(gpu=2 * NEEDED)
    assert ready.startswith("dry run: ready.") and "on 2 GPUs needs" in ready and "this machine" not in ready
    small = line(gpu=0.6 * NEEDED)
    assert small.startswith("dry run: would run out of memory.") and "the smallest change that fits: " in small
    offloaded = dataclasses.replace(RUN, placement=ZeroPlacement(3, "cpu"))
    on_host = offloaded.estimate().cpu
    assert line(offloaded, gpu=2 * NEEDED, host=2 * on_host).startswith("dry run: ready.")
    assert line(offloaded, gpu=2 * NEEDED, host=0.5 * on_host).startswith("dry run: would run out of memory.")


def test_time_is_said_only_where_it_was_measured(tmp_path):
    assert measured_step_s(tmp_path, 0) is None and measured_step_s(tmp_path, 5) is None
    rows = [{"step": n, "step_time_s": seconds} for n, seconds in ((1, 60.0), (2, 30.0), (3, 30.0), (4, 900.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measured_step_s(tmp_path, 3) == 30.0  # what lies behind the checkpoint is done again
    assert "30 of 40 optimizer steps left, of 16 samples on 2 ranks, about 15 min at the 30 s measured. " in line(
        steps=(10, 40), step_s=30.0
    )
    assert "about" not in line()
    assert line(steps=(40, 40)) == "dry run: nothing to do, 40 of 40 optimizer steps are done"


@pytest.mark.parametrize("steps", [(0, 1), (39, 40)])
def test_it_is_one_line(steps):
    assert "\n" not in line(steps=steps, step_s=2.0)
