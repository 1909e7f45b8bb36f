"""A run of thousands of steps holds no more memory, files, threads or processes at its end than near its beginning.

STEPS in the environment says how many; the figures are printed with -s.
"""

import json
import os

import numpy as np
import pytest
import toys
from extension_there import if_there
from launching import ROOT, command_line, ds_config, launch, toy_run

pytestmark = pytest.mark.faults

NUM_STEPS = int(os.environ.get("STEPS", "3000"))
# Of memory that is in use, in bytes a step: a tensor, dict or list that is kept at every one of them is more. What is
# resident goes by that, and by what malloc keeps for later: it is only printed.
MOST_GROWTH, MOST_ERROR = 100, 150
KINDS = {
    "zero2": (2, {}),
    "zero3-async": (3, {"async_save": True, "bf16": True, "tokens_per_micro_batch": 400}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_grows(tmp_path, monkeypatch, kind):
    stage, more = KINDS[kind]
    given = toys.write_base(tmp_path / "base") | toys.write_data(tmp_path / "data", "ittiitti" * 8)
    flags = toy_run(
        given,
        tmp_path / "run",
        ds_config(stage),
        **{"max_steps": NUM_STEPS, "save_strategy": "steps", "save_steps": 100, "save_total_limit": 2},
        **{
            "dataloader_num_workers": 1,
            **if_there("replicas", check_divergence_steps=500),
            "max_run_time": "2h",
            **more,
        },
    )
    # On CPUs with bfloat16 oneDNN keeps a thousand compiled products, which come and go with the lengths of the rows.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1")
    worker = ROOT / "tests" / "workers" / "soaking.py"
    done = launch(2, worker, *command_line(flags), str(tmp_path), timeout_s=600 + NUM_STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        looks = json.loads((tmp_path / f"soak-{rank}.json").read_text())
        late = looks[len(looks) // 4 :]
        assert len(late) >= 15, "the run was too short to be looked at"
        used = [look["in use"] for look in late]
        growth, error = trend([look["step"] for look in late], used)
        print(f"\n{kind} rank {rank}: {growth:.0f} ± {error:.0f} bytes a step; {late[0]} to {late[-1]}")
        assert error < MOST_ERROR and growth - 2 * error < MOST_GROWTH
        assert (np.diff(used) > 2**20).sum() <= 2, "memory that is kept now and then, not once"
        half = len(late) // 2
        for key in ("files", "threads", "children"):  # one kept at every save would be half more
            assert min(look[key] for look in late[half:]) < min(look[key] for look in late[:half]) + half / 2, key


def trend(steps: list[int], values: list[float]) -> tuple[float, float]:
    """The median slope between neighbouring values, and its standard error.

    A single jump does not count: the first loss.png, drawn after a minute, loads matplotlib.
    """
    slopes = np.diff(values) / np.diff(steps)
    growth = np.median(slopes)
    return float(growth), float(1.86 * np.median(abs(slopes - growth)) / len(slopes) ** 0.5)
