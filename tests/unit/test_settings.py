"""Environment variables, and the folders and lists they name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmspot.errors import NotFoundError, UsageError
from slurmspot.hostlist import expand, first
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment, slurm_job_id


def test_outside_slurm_everything_has_a_default():
    job = JobEnvironment.read({})
    assert (job.attempt, job.rank, job.world_size, job.run) == ("local-0", 0, 1, None)


def test_inside_a_step():
    job = JobEnvironment.read(
        {
            "SLURM_JOB_ID": "12",
            "SLURM_RESTART_COUNT": "2",
            "SLURM_PROCID": "3",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "1",
            "SLURMD_NODENAME": "gpu07",
            "SLURMSPOT_RUN": "/shared/run",
            "SLURMSPOT_PERIOD_S": "2.5",
            "SLURMSPOT_PERIOD_STEPS": "10",
            "SLURMSPOT_KEEP": "5",
            "SLURMSPOT_WINDOW_S": "15",
            "SLURMSPOT_KILL_WAIT_S": "5",
        }
    )
    assert job == JobEnvironment(
        run=Path("/shared/run"),
        job_id="12",
        restart=2,
        rank=3,
        world_size=4,
        local_rank=1,
        host="gpu07",
        period_s=2.5,
        period_steps=10,
        keep=5,
        window_s=15,
        kill_wait_s=5,
    )
    assert job.attempt == "12-2"


def test_torchrun_s_own_rank_wins():
    job = JobEnvironment.read({"SLURM_PROCID": "0", "RANK": "5", "WORLD_SIZE": "8"})
    assert (job.rank, job.world_size) == (5, 8)


def test_the_job_id_is_the_one_sacct_prints():
    assert slurm_job_id({}) is None
    assert slurm_job_id({"SLURM_JOB_ID": "17"}) == "17"
    array = {"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"}
    assert slurm_job_id(array) == "17_1"
    het = {"SLURM_JOB_ID": "34", "SLURM_HET_JOB_ID": "33", "SLURM_HET_JOB_COMPONENT": "1"}
    assert slurm_job_id(het) == "33+1"


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_variable_that_is_no_sensible_number_is_named(value):
    with pytest.raises(UsageError, match="SLURMSPOT_PERIOD_S"):
        JobEnvironment.read({"SLURMSPOT_PERIOD_S": value})


def test_host_lists():
    assert expand("") == ()
    assert expand("login1") == ("login1",)
    assert expand("a[1-2,07],b-x,c[1-2]n[8-9]") == (
        *("a1", "a2", "a07", "b-x"),
        *("c1n8", "c1n9", "c2n8", "c2n9"),
    )
    assert expand("n[098-101]") == ("n098", "n099", "n100", "n101")
    assert first("gpu[07-09,12],x") == "gpu07"


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20, unique=True))
def test_any_list_of_numbers_comes_back(numbers):
    text = f"n[{','.join(str(n).zfill(4) for n in numbers)}]"
    assert expand(text) == tuple(f"n{n:04}" for n in numbers)


def test_a_run_folder_is_private(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run").create()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert RunFolder.open(folder.path) == folder


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(NotFoundError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make") as caught:
        RunFolder(tmp_path / "file" / "run").create()
    assert caught.value.exit_code == 2


def test_the_local_folder_is_that_of_the_node():
    env = {"SLURMSPOT_LOCAL": "/nvme/{node}/spot", "SLURMD_NODENAME": "n7"}
    assert JobEnvironment.read(env).local_folder == Path("/nvme/n7/spot")
    assert JobEnvironment.read({}).local_folder is None
    with pytest.raises(UsageError, match="not an absolute path"):
        JobEnvironment.read({"SLURMSPOT_LOCAL": "nvme"})
