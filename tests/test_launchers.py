"""Who a process is, from the variables that each launcher sets: nothing is started here."""

import pytest

from llava_ds.constants import ConfigError
from llava_ds.launchers import expand_counts, expand_nodelist, is_loopback_name, rank_variables

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
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE is 4, but RANK is not set"),
        (MPI, "mpirun -x MASTER_ADDR="),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID and SLURM_LOCALID not: start the script with srun"),
        ({**TASK, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x': expected a whole number"),
        ({**TASK, "SLURM_STEP_NODELIST": "gpu[1-"}, r"the node list 'gpu\[1-' can't be read: export MASTER_ADDR"),
        ({**TASK, "SLURM_STEP_NODELIST": ""}, "neither SLURM_STEP_NODELIST nor MASTER_ADDR"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "4(2)"}, "expected numbers like"),
    ],
)
def test_a_launcher_that_says_too_little_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        rank_variables(environ)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("r[1-2]n[9-10]-ib", ["r1n9-ib", "r1n10-ib", "r2n9-ib", "r2n10-ib"]),
        ("a,b-2.cluster,c[098-101]", ["a", "b-2.cluster", "c098", "c099", "c100", "c101"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "a[", "a]", "a[x-2]", "a[1-2", "a b", "a[]"])
def test_node_lists_that_are_none(text):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        expand_nodelist(text)


def test_tasks_per_node():
    assert expand_counts("4(x2),3") == [4, 4, 3] and expand_counts("8") == [8]


def test_a_name_that_leads_nowhere_else():
    assert is_loopback_name("localhost") and is_loopback_name("127.0.1.1") and is_loopback_name("no.such.host.invalid")
    assert not is_loopback_name("192.0.2.2")
