"""Who a process is, from the variables that each launcher sets: nothing is started here."""

import os

import pytest

from llava_ds.constants import ConfigError
from llava_ds.runtime.launchers import check_variables, is_loopback_name, rank_variables
from llava_ds.runtime.other_launchers import first_node, tasks_on

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_NTASKS": "11",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04],login1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
TORCH = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture(autouse=True)
def scontrol(monkeypatch, tmp_path):
    """A scontrol that knows one node list."""
    script = tmp_path / "scontrol"
    script.write_text(
        f"""#!/bin/sh
[ "$*" = "show hostnames {TASK["SLURM_STEP_NODELIST"]}" ] && printf 'gpu03\\ngpu04\\nlogin1\\n'
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_task_of_srun():
    found, note = rank_variables(TASK)
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "11",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
    }
    assert note is None
    others = [
        rank_variables({**TASK, **change})[0]["MASTER_PORT"]
        for change in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    ]
    assert port not in others[:2] and port == others[2]  # each job step its own, all of its tasks the same
    assert 1024 < int(port) < 32768


def test_what_the_user_set_stays():
    found, _ = rank_variables({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert "MASTER_ADDR" not in found and "MASTER_PORT" not in found and found["RANK"] == "9"


def test_the_variables_of_deepspeed_and_torchrun_win():
    assert rank_variables({**TASK, **MPI, **TORCH}) == ({}, None)


def test_a_process_of_mpirun():
    found, _ = rank_variables({**MPI, "MASTER_ADDR": "gpu03"})
    expected = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    assert found == expected
    on_one_machine = {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}
    assert rank_variables(on_one_machine)[0]["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "noted"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, None),
        # Inside sbatch and salloc, without srun before the command.
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS is 16"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_NNODES": "2"}, "SLURM_NNODES is 2"),
    ],
)
def test_a_process_that_nothing_announces_is_alone(environ, noted):
    found, note = rank_variables(environ)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert note is None if noted is None else noted in note and "srun" in note


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE is 4, but RANK is not set"),
        (MPI, "mpirun -x MASTER_ADDR="),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID and SLURM_LOCALID not: start the script with srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "LOCAL_RANK and OMPI.*_LOCAL_SIZE not: .* mpirun"),
        ({**TASK, "SLURM_STEP_NODELIST": "a[0-2", "SLURM_PROCID": "0"}, "export MASTER_ADDR"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(x99999999999)"}, "expected numbers like"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "0"}, "expected numbers like"),
        ({**TASK, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x': expected a whole number"),
        ({**TASK, "SLURM_STEP_NODELIST": "gpu[1-"}, r"the node list 'gpu\[1-' can't be read .*export MASTER_ADDR"),
        ({**TASK, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST and MASTER_ADDR are not set"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "4(2)"}, "expected numbers like"),
    ],
)
def test_a_launcher_that_says_too_little_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        rank_variables(environ)


STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.1"}
TWO_OF_MPI = {**dict.fromkeys(MPI, "2"), "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({**STEP, "SLURM_PROCID": "5"}, "SLURM_PROCID is 5, but SLURM_STEP_NUM_TASKS is 2: expected 0 to 1"),
        ({**STEP, "SLURM_PROCID": "x", "SLURM_LOCALID": "y"}, "SLURM_PROCID is 'x': expected a whole number from 0"),
        ({**STEP, "SLURM_LOCALID": "7"}, "SLURM_LOCALID is 7, but SLURM_STEP_NUM_TASKS is 2"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "9" * 5000}, "SLURM_STEP_NUM_TASKS is '999"),
        ({**STEP, "WORLD_SIZE": "1"}, "SLURM_PROCID is 1, but WORLD_SIZE is 1"),  # left over, and it would win
        ({**TWO_OF_MPI, "OMPI_COMM_WORLD_RANK": "7"}, "OMPI_COMM_WORLD_RANK is 7, but OMPI_COMM_WORLD_SIZE is 2"),
        ({**TWO_OF_MPI, "OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK is 'x': expected a whole number from 0"),
        ({**TWO_OF_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is 2, but OMPI_COMM_WORLD_LOC"),
        ({"RANK": "9" * 5000}, "RANK is '999"),
    ],
)
def test_what_srun_and_mpirun_cannot_have_said_is_refused(environ, line):
    with pytest.raises(ConfigError, match=f"^{line}") as error:
        check_variables(environ)
    assert len(str(error.value)) < 500


def test_what_they_can_have_said_is_not():
    for environ in (TASK, MPI, STEP, TWO_OF_MPI, {**TASK, **TWO_OF_MPI, **TORCH, "WORLD_SIZE": "4"}):
        check_variables(environ)
    check_variables({"SLURM_NTASKS": "16", "SLURM_PROCID": "x"})  # without srun it is no task


def test_node_lists():
    assert first_node("gpu1") == "gpu1" and first_node(TASK["SLURM_STEP_NODELIST"]) == "gpu03"


@pytest.mark.parametrize("text", ["", "a,,b", "a[", "a[1-2", "a b"])
def test_node_lists_that_scontrol_refuses(text):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        first_node(text)


def test_node_lists_without_scontrol(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_node("gpu1") == "gpu1"
    with pytest.raises(ConfigError, match=r"'gpu\[1-2\]' can't be read .*export MASTER_ADDR"):
        first_node("gpu[1-2]")


def test_tasks_per_node():
    assert [tasks_on(node, "4(x2),3") for node in range(4)] == [4, 4, 3, 3] and tasks_on(0, "8") == 8
    assert tasks_on(10**8, "2(x999999999),1") == 2


def test_a_name_that_leads_nowhere_else():
    assert is_loopback_name("localhost") and is_loopback_name("127.0.1.1") and is_loopback_name("no.such.host.invalid")
    assert not is_loopback_name("192.0.2.2")
