"""A run with --stream is killed at five moments, resumed each time, and ends with the losses and books of one that
nobody disturbed."""

import importlib.util
import signal
import sys
from pathlib import Path

import psutil
import pytest
from launching import DEEPSPEED, losses
from signalled import Started

from llava_ds.runtime.launchers import free_port

pytestmark = pytest.mark.faults

SPEC = importlib.util.spec_from_file_location("stream_runs", Path(__file__).parent / "test_stream_on_ranks.py")
runs = sys.modules.setdefault(SPEC.name, importlib.util.module_from_spec(SPEC))
SPEC.loader.exec_module(runs)

NUM_SHARDS = 8


def started(gate: Path, flags: dict[str, object]) -> Started:
    where = ["--num_accelerators", "2", "--master_port", str(free_port())]
    return Started(2, flags, command=[*DEEPSPEED, *where, str(runs.WORKER), str(runs.SHARD), str(gate)])


def kill(run: Started, victim: str) -> None:
    """Kill a process of the run, or all of them. Nothing may be left."""
    if victim == "all":
        for process in run.processes():
            process.kill()
    else:
        run.send(victim, signal.SIGKILL)
    run.wait_for_end()
    psutil.wait_procs(run.processes(), timeout=10)
    assert not run.processes()


def test_a_stream_that_is_killed_at_five_moments_ends_like_one_that_is_not(tmp_path):
    given = runs.write_given(tmp_path, NUM_SHARDS * runs.SHARD)
    more = {
        "num_train_epochs": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 2,
        "eval_fraction": 0.1,
    }
    reference, out, gate = tmp_path / "reference", tmp_path / "out", tmp_path / "gate"
    with started(gate, runs.stream_run(given, reference, **more, cache_dir=tmp_path / "other-cache")) as run:
        assert run.wait_for_end(240) == 0, run.log.read_text()
    flags = runs.stream_run(given, out, **more)
    encoded = tmp_path / "cache" / "encoded"

    def rows() -> int:
        return len(list(encoded.glob("*/*/rows-*")))

    moments = {
        "before the first shard": ("-1", "all", lambda: any(encoded.glob("*/1.work/records-*"))),
        "during the encoding": ("1", "all", lambda: rows() == 1),
        "in training while encoding goes on": ("4", "rank-1", lambda: len(losses_of(out)) >= 5 and rows() == 4),
        "after the encoding ended": ("99", "rank-0", lambda: any(encoded.glob("*/1")) and len(losses_of(out)) > 20),
        "in a save": ("99", "all", lambda: any(out.glob("checkpoint-*.tmp"))),
    }
    for moment, (allowed, victim, has_come) in moments.items():
        gate.write_text(allowed)
        with started(gate, flags) as run:
            run.wait_until(has_come)
            kill(run, victim)
        is_whole = any(encoded.glob("*/1"))
        assert is_whole == (moment in ("after the encoding ended", "in a save")), moment
        assert len(losses_of(out)) < len(losses(reference)), moment
    with started(gate, flags) as run:
        assert run.wait_for_end(240) == 0, run.log.read_text()
    assert losses(out) == losses(reference) and len(losses(out)) == 4 * 15
    assert runs.books(out) == runs.books(reference)


def losses_of(out: Path) -> list[float]:
    return losses(out) if (out / "run" / "metrics.jsonl").exists() else []
