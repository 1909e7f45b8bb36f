"""A run of thousands of steps holds no more memory, files, threads or processes at its end than near its beginning.

STEPS in the environment says how many; the figures are printed with -s.
"""

import json
import os

import pytest
import toys
from launching import ROOT, command_line, ds_config, launch, toy_run

pytestmark = pytest.mark.faults

NUM_STEPS = int(os.environ.get("STEPS", "3000"))
# Of memory that is in use, in bytes a step: a tensor, dict or list that is kept at every one of them is more. What is
# resident goes by that, and by what malloc keeps for later: it is only printed.
MOST_GROWTH = 100
KINDS = {
    "zero2": (2, {}),
    "zero3-async": (3, {"async_save": True, "bf16": True, "tokens_per_micro_batch": 400}),
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
    worker = ROOT / "tests" / "workers" / "soaking.py"
    done = launch(2, worker, *command_line(flags), str(tmp_path), timeout_s=600 + NUM_STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        looks = json.loads((tmp_path / f"soak-{rank}.json").read_text())
        part = len(looks) // 4
        assert part >= 5, "the run was too short to be looked at"
        # Until the first loss.png is drawn, after a minute, a run still grows.
        before, late = (
            {key: min(look[key] for look in some) for key in looks[0]}
            for some in (looks[2 * part : 3 * part], looks[-part:])
        )
        print(f"\n{kind} rank {rank}: {before} to {late} in the last {NUM_STEPS // 4} of {NUM_STEPS} steps")
        assert late["in use"] - before["in use"] < MOST_GROWTH * NUM_STEPS / 4
        assert all(late[key] <= before[key] for key in ("files", "threads", "children"))
