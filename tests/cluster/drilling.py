"""A drill that runs on the cluster, is followed, and can be hit: for the modules that drill."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from waiting import await_

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import checked, run
from slurmspot.errors import NotFoundError
from slurmspot.events import read_events
from slurmspot.faults.fault import Aim, Fault, Target
from slurmspot.faults.injector import Injector
from slurmspot.faults.machines import SandboxMachines
from slurmspot.report import history
from slurmspot.runfolder import RunFolder
from slurmspot.study.runs import launch

ROOT = Path(__file__).parents[2]
EVALUATING = (sys.executable, str(ROOT / "tests" / "cluster" / "evaluating.py"))
DEADLINE_S = 180


class Trial:
    """A drill that runs, is followed, and can be hit."""

    def __init__(self, sandbox, drill, path, **spec):
        self.folder, self.drill = RunFolder(path), drill
        self.job_id = launch(replace(drill.spec("drill", "spot"), **spec), self.folder)
        self.machines = SandboxMachines(sandbox)
        self.injector = Injector(self.folder, machines=self.machines)

    def hit(self, profile, target="gang", aim=Aim(), **more):  # noqa: B008 - a frozen value
        fault = Fault(profile=profile, target=Target.parse(target), aim=aim, hold_s=1, **more)
        return self.injector.inject(fault, deadline_s=DEADLINE_S)

    def finish(self, keeper):
        assert keeper.wait(DEADLINE_S), keeper.states[-5:]
        assert self.folder.finished.exists(), self.output()
        return json.loads(self.folder.finished.read_text())

    def output(self):
        logs = [log.read_text() for log in self.folder.logs.glob("*_log.out")]
        return "\n".join([*logs, *map(str, read_events(self.folder.events, steps=False))])

    def events(self, name):
        return [e for e in read_events(self.folder.events, steps=False) if e.event == name]

    def attempts(self):
        """How each attempt ended, as far as the accounting knows of them yet."""
        try:
            jobs = history.of_run(self.folder).timeline.jobs
        except NotFoundError:
            return []
        return [attempt.kind for job in jobs for attempt in job.attempts]

    def interruptions(self):
        return history.of_run(self.folder).interruptions

    def until(self, true):
        return await_(true, told=self.output)


class Sleeper:
    """A job of this user that slurmspot has not launched, on one node."""

    def __init__(self):
        argv = ["sbatch", "--parsable", "--requeue", "--output=/dev/null", "--wrap=sleep 600"]
        self.job_id = checked(run, argv).strip()
        await_(lambda: self.state == "RUNNING")
        self.node = scontrol.show_job(self.job_id).nodes

    @property
    def state(self):
        return scontrol.show_job(self.job_id).state

    @property
    def restarts(self):
        return scontrol.show_job(self.job_id).restarts

    def node_state(self):
        return scontrol.node_states()[self.node]


def inject(*argv, cwd, **env):
    """``slurmspot inject``, as a person calls it."""
    return subprocess.run(
        [sys.executable, "-m", "slurmspot", "inject", *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **env},
        timeout=DEADLINE_S,
    )
