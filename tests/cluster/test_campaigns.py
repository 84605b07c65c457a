"""Campaigns in several runs at once, all while the accounting is down for a minute."""

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from drilling import DEADLINE_S, EVALUATING, ROOT, Trial, await_

from slurmspot.faults.campaign import Campaign
from slurmspot.faults.keeper import Keeper
from slurmspot.study.soak import Drill

pytestmark = pytest.mark.cluster

OUTAGE_S = 60
POISSON = """
schedule = "poisson"
mean_s = 1
count = 2
seed = 3
[[fault]]
profile = "slurm"
hold_s = 1
[[fault]]
profile = "kill"
[[fault]]
profile = "kill-rank"
"""
TRACE = """
schedule = "trace"
trace = "moves.csv"
scale = 0.02
[[fault]]
profile = "forced"
detect_s = 1
"""


class Conducted:
    """``slurmspot inject campaign`` on some runs."""

    def __init__(self, folder, text, trials):
        folder.mkdir()
        (folder / "campaign.toml").write_text(text)
        shutil.copy(ROOT / "tests" / "data" / "traces" / "moves.csv", folder)
        self.runs = [str(trial.folder.path) for trial in trials]
        self.folder, self.ends = folder, []
        self.begin()

    def begin(self):
        argv = ["inject", "campaign", "campaign.toml", *self.runs]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slurmspot", *argv],
            cwd=self.folder,
            stderr=subprocess.PIPE,
            text=True,
        )

    def outcomes(self):
        journal = self.folder / "campaign.jsonl"
        lines = journal.read_text().split("\n") if journal.exists() else []
        return [json.loads(line) for line in lines if '"asked"' in line and line.endswith("}")]

    def done(self, run):
        return [one for one in self.outcomes() if one["run"] == run and not one["problem"]]

    def wait(self):
        said = self.process.communicate(timeout=DEADLINE_S)[1]
        self.ends.append((self.process.returncode, said))


@pytest.fixture(scope="module")
def conducted(sandbox, port, baselines, tmp_path_factory):
    """Two runs under a Poisson campaign that is interrupted once, and one under a trace."""
    path = tmp_path_factory.mktemp("campaigns")
    one = Drill(steps=150, nodes=1, metadata_port=port)
    two = Drill(steps=150, metadata_port=port, command=EVALUATING)
    nodes = sandbox.spec.node_names
    places = ((one, nodes[0]), (one, nodes[1]), (two, ",".join(nodes[2:4])))
    sandbox.stop_accounting()
    began = time.monotonic()
    digests = {drill: baselines(drill) for drill in (one, two)}
    with ExitStack() as stack:
        trials = [
            Trial(sandbox, drill, path / str(number), nodelist=nodelist)
            for number, (drill, nodelist) in enumerate(places)
        ]
        keepers = [stack.enter_context(Keeper(trial.job_id)) for trial in trials]
        poisson = Conducted(path / "poisson", POISSON, trials[:2])
        trace = Conducted(path / "trace", TRACE, trials[2:])
        await_(poisson.outcomes)
        poisson.process.send_signal(signal.SIGINT)
        poisson.wait()
        poisson.begin()
        poisson.wait()
        trace.wait()
        for trial, keeper in zip(trials, keepers, strict=True):
            assert trial.finish(keeper)["digest"] == digests[trial.drill]
    await_(lambda: time.monotonic() - began >= OUTAGE_S)
    sandbox.restart_accounting()
    return trials, poisson, trace


def test_drawn_moments_and_ctrl_c_and_the_same_command_again(conducted):
    trials, poisson, _ = conducted
    (stopped, _), (code, said) = poisson.ends
    assert (stopped, code) == (130, 0), said
    for number, trial in enumerate(trials[:2]):
        run = str(trial.folder.path)
        done, plan = poisson.done(run), Campaign.read(poisson.folder / "campaign.toml").plan(number)
        assert [one["index"] for one in done] == [0, 1]
        assert [one["asked"]["profile"] for one in done] == [fault.profile for fault in plan]
        assert f"{run}: injection 2" in said


def test_a_trace_takes_as_many_nodes_as_were_taken(conducted):
    trials, _, trace = conducted
    assert trace.ends[0][0] == 0, trace.ends
    nodes = [one["seen"]["nodes"] for one in trace.done(str(trials[2].folder.path))]
    assert nodes == [["node3"], ["node2", "node3"]]


def test_the_timeline_is_complete_though_the_accounting_was_down_for_a_minute(conducted):
    for trial in conducted[0]:
        await_(lambda trial=trial: trial.attempts()[-1:] == ["completed"], told=trial.attempts)
        suffered = trial.interruptions()
        assert 2 <= len(suffered) <= len(trial.events("inject"))  # Ctrl-C may leave one without
        assert len(trial.attempts()) == len(suffered) + 1
        assert all(one.recovered and one.requeue_wait_s is not None for one in suffered)
