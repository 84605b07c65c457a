"""``slurmspot inject`` as an operator meets it: any job, real machines, and an injector that dies.

The jobs only sleep: what a training run makes of its loss is shown in ``test_drills.py``.
"""

import json
import os
import shutil
import signal
import sys
from functools import partial

import drilling
import pytest
from drilling import Sleeper

pytestmark = pytest.mark.cluster


@pytest.fixture
def sleeper(sandbox):
    return Sleeper()


@pytest.fixture
def inject(tmp_path):
    """Runs ``slurmspot inject`` in an empty folder."""
    return partial(drilling.inject, cwd=tmp_path)


def test_any_job_of_ones_own_is_hit_if_that_is_said(inject, sleeper, tmp_path):
    job = sleeper.job_id
    refused = inject("requeue", job)
    assert (refused.returncode, "not a run folder" in refused.stderr) == (3, True)
    shown = inject("requeue", job, "--any-job", "--dry-run")
    assert shown.stdout == f"scontrol requeue {job}\n"
    assert not list(tmp_path.iterdir())
    assert sleeper.restarts == 0

    hit = inject("requeue", job, "--any-job", "--json")
    assert hit.returncode == 0, hit.stderr
    assert json.loads(hit.stdout)["job_id"] == job
    assert sleeper.restarts == 1
    assert "nothing to undo" in inject("undo", f"slurmspot-drill-{job}").stdout
    again = inject("requeue", job, "--any-job")
    assert again.returncode == 2
    assert "is not running but" in again.stderr


def test_a_draining_node_keeps_its_job_and_comes_back(inject, sleeper):
    drained = inject("node-down", sleeper.job_id, "--any-job", "--state", "DRAIN")
    assert drained.returncode == 0, drained.stderr
    assert "DRAIN" not in sleeper.node_state()
    assert (sleeper.state, sleeper.restarts) == ("RUNNING", 0)


def test_a_cluster_without_power_saving_powers_nothing_down(inject, sleeper):
    argv = ("node-down", sleeper.job_id, "--any-job", "--state", "POWER_DOWN_FORCE")
    refused = inject(*argv)
    assert refused.returncode == 1
    assert f"refuses to set {sleeper.node} to POWER_DOWN_FORCE" in refused.stderr
    assert "SuspendProgram" in refused.stderr
    assert (sleeper.state, sleeper.restarts) == ("RUNNING", 0)
    assert "nothing to undo" in inject("undo", f"slurmspot-drill-{sleeper.job_id}").stdout


def test_a_machine_is_ended_by_a_command_of_the_sites_own(sandbox, inject, sleeper, tmp_path):
    ends = tmp_path / "end-machine"
    ends.write_text(
        f"#!{sys.executable}\nimport sys\nfrom slurmspot.sandbox import Sandbox\n"
        f"Sandbox.open({str(sandbox.layout.path)!r}).vanish(sys.argv[2])\n"
    )
    ends.chmod(0o700)
    command = ("--terminate-command", f"{ends} --name {{node}}")
    argv = ("forced", sleeper.job_id, "--any-job", "--detect-s", "1")
    shown = inject(*argv, *command, "--dry-run")
    assert f"{ends} --name {sleeper.node}\n" in shown.stdout
    assert sandbox.status().daemons[sleeper.node]

    done = inject(*argv, *command)
    assert done.returncode == 0, done.stderr
    assert sleeper.restarts == 1
    assert not sandbox.status().daemons[sleeper.node]
    sandbox.revive(sleeper.node)  # as the site replaces it


@pytest.fixture
def signalled(tmp_path):
    """Given a signal's name: a PATH whose scontrol sends it to who has just set a node down."""

    def path(name):
        scontrol = tmp_path / "bin" / "scontrol"
        scontrol.parent.mkdir()
        strike = f'case "$*" in *State=DOWN*) kill -{name} $PPID;; esac'
        scontrol.write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@" || exit\n{strike}\n')
        scontrol.chmod(0o700)
        return f"{scontrol.parent}:{os.environ['PATH']}"

    return path


def test_undo_after_the_injector_was_killed_with_a_node_down(sandbox, inject, sleeper, signalled):
    killed = inject("node-down", sleeper.job_id, "--any-job", PATH=signalled("KILL"))
    assert killed.returncode == -signal.SIGKILL
    assert "DOWN" in sleeper.node_state()
    assert not sandbox.status().daemons[sleeper.node]

    undone = inject("undo", f"slurmspot-drill-{sleeper.job_id}")
    assert undone.stdout == f"node {sleeper.node} is back\n", undone.stderr
    assert sandbox.status().down == []
    assert sleeper.restarts == 1
    assert inject("undo", f"slurmspot-drill-{sleeper.job_id}").stdout == "nothing to undo\n"


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_an_injector_that_is_told_to_end_gives_back_first(
    sandbox, inject, sleeper, signalled, name
):
    told = inject("node-down", sleeper.job_id, "--any-job", PATH=signalled(name))
    assert told.returncode == 128 + getattr(signal, f"SIG{name}")
    assert sandbox.status().down == []
    assert sleeper.restarts == 1
    assert inject("undo", f"slurmspot-drill-{sleeper.job_id}").stdout == "nothing to undo\n"
