"""A run of thousands of steps holds no more memory, files, threads or processes at its end than near its beginning.

STEPS in the environment says how many; the figures are printed with -s.
"""

import contextlib
import os
import statistics
import time

import psutil
import pytest
import toys
from launching import ds_config, toy_run
from signalled import Started

pytestmark = pytest.mark.faults

NUM_STEPS = int(os.environ.get("STEPS", "3000"))
MOST_GROWTH = 4e6  # bytes, of a rank of some 300 MB
KINDS = {
    "zero2": (2, {}),
    "zero3-async": (3, {"async_save": True, "bf16": True, "tokens_per_micro_batch": 400}),
}


def counts(process: psutil.Process) -> dict[str, int]:
    memory = process.memory_full_info()
    return {
        "bytes": memory.uss,  # its own, without pages of files that it maps
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(tmp_path, kind):
    stage, more = KINDS[kind]
    given = toys.write_base(tmp_path / "base") | toys.write_data(tmp_path / "data", "ittiitti" * 8)
    flags = toy_run(
        given,
        tmp_path / "run",
        ds_config(stage),
        **{"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 100, "save_total_limit": 2},
        **{"dataloader_num_workers": 1, "check_divergence_steps": 500, "max_run_time": "2h", **more},
    )
    found: dict[str, list[dict[str, int]]] = {"rank-0": [], "rank-1": []}
    with Started(2, flags) as run:
        run.wait_for_step(NUM_STEPS // 10)
        processes = {name: psutil.Process(run.process(name)) for name in found}
        with contextlib.suppress(psutil.Error):
            # Its last line is for the export, which is another phase.
            while run.runner.poll() is None and len(run.steps()) < NUM_STEPS:
                for name, process in processes.items():
                    found[name].append(counts(process))
                time.sleep(1)
        assert run.wait_for_end(300) == 0, run.log.read_text()
    for name, seen in found.items():
        part = len(seen) // 4
        assert part >= 5, "the run was too short to be looked at"
        early, late = (
            # Files and threads come and go, as when loss.png is drawn: what is never gone again has grown.
            {key: (statistics.median if key == "bytes" else min)(each[key] for each in some) for key in seen[0]}
            for some in (seen[part : 2 * part], seen[-part:])
        )
        print(f"\n{kind} {name}: {early} to {late} in {NUM_STEPS} steps, {len(seen)} looks")
        assert late["bytes"] - early["bytes"] < MOST_GROWTH
        assert all(late[key] <= early[key] for key in ("files", "threads", "children"))
