"""What doctor says of a real cluster, of one whose settings are spoilt, and of half a one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import await_

from slurmspot.cluster.fitness import examine
from slurmspot.findings import Level

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def found(sandbox, partition="spot"):
    """Level of everything that was looked at in the cluster."""
    examination = examine(partition, runner=sandbox.run)
    return {one.subject: one.level for one in examination.findings}


def test_the_sandbox_is_fit(sandbox, tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "slurmspot", "doctor", "--json", "--run", str(tmp_path)),
            *("--local", str(sandbox.local("node0"))),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["fit"]
    assert {one["level"] for one in document["slurm"]} == {"ok"}, document["slurm"]
    assert document["storage"][-1]["subject"] == "local tier: speed"
    assert sandbox.run(["squeue", "--noheader"]).stdout == ""  # nothing was submitted


def test_a_partition_that_is_set_otherwise(sandbox):
    """The same, as an administrator might change it at run time."""
    spoilt = ("GraceTime=0", "PreemptMode=OFF", "State=DOWN", "PriorityTier=10")
    before = ("GraceTime=15", "PreemptMode=REQUEUE", "State=UP", "PriorityTier=1")
    update = ("scontrol", "update", "PartitionName=spot")
    assert sandbox.run([*update, *spoilt]).returncode == 0
    try:
        levels = found(sandbox)
    finally:
        assert sandbox.run([*update, *before]).returncode == 0
    assert levels["GraceTime of spot"] == Level.PROBLEM
    assert levels["PreemptMode of spot"] == Level.PROBLEM
    assert levels["partition spot"] == Level.PROBLEM
    assert levels["preemptor of spot"] == Level.WARNING
    assert set(found(sandbox).values()) == {Level.OK}


def test_what_sbatch_would_refuse_is_told(sandbox):
    update = ("scontrol", "update", "PartitionName=spot")
    assert sandbox.run([*update, "MinNodes=3"]).returncode == 0
    try:
        assert found(sandbox)["submission to spot"] == Level.WARNING
    finally:
        assert sandbox.run([*update, "MinNodes=0"]).returncode == 0
    assert found(sandbox, "nope")["partition nope"] == Level.PROBLEM


def test_accounting_that_is_dead(sandbox):
    sandbox.stop_accounting()
    try:
        levels = found(sandbox)
    finally:
        sandbox.restart_accounting()
    assert levels.pop("accounting") == Level.PROBLEM
    assert set(levels.values()) == {Level.OK}
    await_(lambda: found(sandbox)["accounting"] == Level.OK)


def test_a_controller_that_is_dead(sandbox):
    sandbox.stop_controller()
    try:
        examination = examine("spot", runner=sandbox.run)
    finally:
        sandbox.restart_controller()
    assert examination.cluster is None
    assert [one.subject for one in examination.findings] == ["commands", "Slurm"]
