"""Whichever process of a run is told to stop: a checkpoint of the last step, the exit code, and nobody left behind."""

import signal
from pathlib import Path

import pytest
import toys
from daily import few
from launching import ds_config, toy_run
from signalled import Started

from llava_ds.checkpoint.commit import step_of
from llava_ds.checkpoint.verification import newest_whole
from llava_ds.constants import EXIT_STOPPED

# The runner has no handler, so that it ends at once, and its launcher and the ranks are left without it.
EXPECTED = {"runner": -signal.SIGTERM, "rank-1": EXIT_STOPPED}


def stopped(folder: Path, given: dict[str, str], name: str) -> tuple[int, Path]:
    flags = toy_run(given, folder / name, ds_config(2), max_steps=5000, save_strategy="steps", save_steps=5000)
    with Started(2, {**flags, "dataloader_num_workers": 1}) as run:
        run.wait_for_step(3)
        run.send(name, signal.SIGTERM)
        return run.wait_for_end(), run


@pytest.mark.parametrize("name", few(EXPECTED, ["rank-1"]))
def test_it_saves_its_last_step_and_leaves_with_the_documented_code(tmp_path, name):
    given = toys.write_base(tmp_path / "base") | toys.write_data(tmp_path / "data", "ittiitti")
    code, run = stopped(tmp_path, given, name)
    said = run.log.read_text()
    assert code == EXPECTED[name], said
    path, refused = newest_whole(run.output_dir)
    assert refused == [] and step_of(path) == run.steps()[-1]["step"], said
    assert said.count("stopped after step") == 1 and "Traceback" not in said
