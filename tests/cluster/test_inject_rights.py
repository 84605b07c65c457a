"""What a drill may take, and from whom, where others than the operator may ask the cluster."""

import os
import pwd
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from drilling import ROOT, Sleeper, inject

from slurmspot.sandbox import Sandbox

pytestmark = pytest.mark.cluster

SAVING = "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=36000\n"
# This Python and this checkout may be out of the stranger's reach: import first, then become it.
STRANGER = """
import os, pathlib, sys
from slurmspot.errors import SlurmspotError
from slurmspot.faults.fault import Fault
from slurmspot.faults.injector import Injector
from slurmspot.runfolder import RunFolder
os.chdir("/")
os.setgroups([]); os.setgid({gid}); os.setuid({uid})
folder = RunFolder(pathlib.Path({folder!r}))
folder.create().jobs.write_text('{{"job_id": "{job_id}"}}')
for profile, any_job in (("requeue", False), ("requeue", True), ("node-down", True)):
    try:
        Injector(folder, any_job=any_job).inject(Fault.of({{"profile": profile}}))
    except SlurmspotError as error:
        print(error, end="\\n\\n")
"""


@pytest.fixture(scope="module")
def public(sandbox):
    """A cluster that every user of this machine may ask, and that saves power; and its folder."""
    with TemporaryDirectory(prefix="slurmspot-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o777)
        with Sandbox.up("public", nodes=2, gpus_per_node=1, folder=folder / "c") as cluster:
            layout = cluster.layout
            for path in (layout.path, layout.etc, layout.run(""), layout.run("munged")):
                path.chmod(0o755)
            layout.conf.chmod(0o644)
            with layout.conf.open("a") as conf:
                conf.write(SAVING)
            cluster.restart_controller()
            for key, value in cluster.env.items():
                patch.setenv(key, value)
            yield folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_stranger_takes_nothing_and_is_told_what_an_operator_would_run(public):
    sleeper, user = Sleeper(), pwd.getpwnam("daemon")
    code = STRANGER.format(
        uid=user.pw_uid, gid=user.pw_gid, folder=str(public / "run"), job_id=sleeper.job_id
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    own, requeue, down = done.stdout.strip().split("\n\n")
    assert f"job {sleeper.job_id} belongs to root, not to daemon" in own
    assert "--any-job" in own
    assert f"scontrol requeue {sleeper.job_id}" in requeue
    assert f"you may not set node {sleeper.node} to DOWN" in down
    assert f"scontrol update NodeName={sleeper.node} State=DOWN" in down
    assert (sleeper.state, sleeper.restarts) == ("RUNNING", 0)
    assert sleeper.node_state() == "MIXED"


def test_a_node_is_powered_down_under_its_job(public, tmp_path):
    sleeper = Sleeper()
    argv = ("node-down", sleeper.job_id, "--any-job", "--state", "POWER_DOWN_FORCE")
    done = inject(*argv, "--terminate-command", "true {node}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sleeper.restarts == 1
    states = set(sleeper.node_state().split("+"))
    assert states & {"POWER_DOWN", "POWERING_DOWN"}
    assert not states & {"DOWN", "DRAIN"}
