"""A run whose output nobody reads any more goes on to its end."""

import subprocess

import pytest
import toys
from launching import DEEPSPEED, TRAIN, command_line, ds_config, environment, losses, toy_run

from llava_ds.runtime.launchers import free_port

pytestmark = pytest.mark.faults


def test_a_run_goes_on_without_a_reader_of_its_output(tmp_path):
    """As of `deepspeed run/train.py ... 2>&1 | head -2`, on two ranks."""
    given = toys.write_base(tmp_path / "base") | toys.write_data(tmp_path / "data", "ittiitti")
    flags = toy_run(given, tmp_path / "run", ds_config(2), max_steps=12, save_strategy="steps", save_steps=6)
    command = [*DEEPSPEED, "--num_accelerators", "2", "--master_port", str(free_port()), str(TRAIN)]
    with subprocess.Popen(
        [*command, *command_line(flags)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        first = process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=600) == 0
    assert "DeepSpeed" not in first and "Traceback" not in first, first
    assert len(losses(tmp_path / "run")) == 12
    assert (tmp_path / "run" / "checkpoint-12").is_dir() and (tmp_path / "run" / "config.json").is_file()
