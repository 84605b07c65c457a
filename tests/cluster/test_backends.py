"""Both backends do the same on a real cluster; pyslurm's only where one that fits is installed."""

from importlib.util import find_spec

import pytest
from drilling import await_

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import checked, run
from slurmspot.errors import NotFoundError, SlurmError, UsageError
from slurmspot.faults import pyslurm
from slurmspot.faults.backend import Scontrol, resume
from slurmspot.hostlist import expand

pytestmark = pytest.mark.cluster

BACKENDS = {"scontrol": Scontrol, "pyslurm": pyslurm.load}
INSTALLED = [name for name in BACKENDS if name == "scontrol" or find_spec(name)]


def submitted(*options, script="sleep 600"):
    argv = ["sbatch", "--parsable", "--requeue", "--output=/dev/null", "--exclusive", *options]
    job_id = checked(run, [*argv, f"--wrap={script}"]).strip()
    return f"{job_id}_0" if "--array=0" in options else job_id


def field(job_id, name):
    return scontrol.fields(checked(run, ["scontrol", "--oneliner", "show", "job", job_id]))[name]


def running(job_id):
    return await_(lambda: (job := scontrol.show_job(job_id)).state == "RUNNING" and job)


@pytest.mark.parametrize("name", INSTALLED)
def test_what_a_backend_does_to_a_cluster(sandbox, tmp_path, name):
    backend, signalled = BACKENDS[name](), tmp_path / "signalled"
    catching = f"srun sh -c 'trap \"touch {signalled}\" USR1; while :; do sleep 0.2; done'"
    held, task = submitted(script=catching), submitted("--array=0")
    preempted = submitted("--signal=USR1@5")
    jobs = {job_id: running(job_id) for job_id in (held, task, preempted)}

    for job_id, job in jobs.items():
        assert backend.job(job_id) == job
    assert backend.partitions() == scontrol.partitions()
    assert backend.node_state(jobs[held].nodes) == scontrol.node_states()[jobs[held].nodes]

    def told():
        backend.signal_ranks(held, "USR1")
        return signalled.exists()

    await_(told)
    backend.requeue(held, hold=True)
    await_(lambda: backend.job(held).reason.startswith("job_requeued_in_held_state"))
    backend.release(held)
    await_(lambda: backend.job(held).reason == "BeginTime")
    backend.exclude(held, ["node0", "node1"])
    assert expand(field(held, "ExcNodeList")) == ("node0", "node1")

    backend.requeue(task)
    await_(lambda: backend.job(task).restarts == 1)

    preemptor = backend.preempt("ondemand", [jobs[preempted].nodes], 1)
    await_(lambda: field(preempted, "PreemptTime") != "None")
    assert backend.job(preemptor).partition == "ondemand"
    backend.cancel(preemptor)
    await_(lambda: backend.job(preemptor).state == "CANCELLED")

    backend.set_nodes(["node3"], "DRAIN", reason="drill")
    assert "DRAIN" in backend.node_state("node3")
    resume(backend, "node3")
    await_(lambda: backend.node_state("node3") == "IDLE")
    resume(backend, "node3")  # refused, but there is nothing left to do

    with pytest.raises(NotFoundError, match="Slurm knows no job 999999"):
        backend.job("999999")
    with pytest.raises(SlurmError):
        backend.set_nodes(["node99"], "DOWN", reason="drill")


@pytest.mark.skipif(find_spec("pyslurm") is not None, reason="pyslurm is installed")
def test_without_pyslurm_its_backend_says_so_and_which_is_needed(sandbox):
    with pytest.raises(UsageError, match="pyslurm cannot be loaded") as missing:
        pyslurm.load()
    year, month = pyslurm.release_of(scontrol.version())
    assert f"install pyslurm {year}.{month}" in str(missing.value)
