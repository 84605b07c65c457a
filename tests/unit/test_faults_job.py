"""What a job does so that it can be hit exactly, and does not hang: holds and the watchdog."""

import json
import os
import time

import pytest
import torch
from torch import nn

from slurmspot.cluster.command import Output
from slurmspot.events import EventWriter, read_events
from slurmspot.job import hold, requeue, watchdog
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment


class Held:
    """A rank that may be held; the test decides how long."""

    def __init__(self, folder):
        self.folder = RunFolder(folder).create()
        self.waits = 0
        self.writer = hold.HoldingWriter(
            self.folder.events, "1-0", 0, request=self.folder.hold, wait=self._wait
        )

    def _wait(self, _):
        self.waits += 1
        if self.waits == 3:
            self.folder.hold.unlink()

    def ask(self, phase, step=None):
        self.waits = 0
        hold.ask(self.folder.hold, phase, step)

    def log(self):
        return [
            (e.event, e.data.get("phase"), e.step)
            for e in read_events(self.folder.events)
            if e.event in {"held", "released"}
        ]


@pytest.mark.parametrize(
    ("event", "phase"),
    [
        ("restore_begin", "restore"),
        ("snapshot_begin", "snapshot"),
        ("snapshot_end", "persist"),
        ("persist_end", "commit"),
        ("agreed", "drain"),
        ("finished", "after-finish"),
    ],
)
def test_a_rank_stands_in_the_phase_that_was_asked_for(tmp_path, event, phase):
    rank = Held(tmp_path)
    rank.writer.write(event)
    assert rank.log() == []
    rank.ask("forward")
    rank.writer.write(event)
    assert rank.waits == 0
    rank.ask(phase)
    rank.writer.write(event)
    assert rank.waits == 3
    assert rank.log() == [("held", phase, 0), ("released", phase, 0)]


def test_a_rank_stands_in_forward_optimizer_and_evaluation(tmp_path):
    rank = Held(tmp_path)
    model, optimizer = nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank.writer.hook({"model": model, "optimizer": optimizer, "sampler": object()})
    data = torch.ones(1, 2)
    for phase, act in (
        ("warmup", lambda: model(data)),
        ("optimizer", optimizer.step),
        ("evaluation", lambda: model.eval()(data)),
    ):
        rank.ask(phase)
        act()
        assert rank.waits == 3, phase
    rank.writer.beat(7)
    rank.ask("forward", step=8)
    model.train()(data)
    assert rank.waits == 0
    rank.writer.beat(8)
    model(data)
    assert rank.waits == 3
    assert rank.log()[-1] == ("released", "forward", 8)


def test_a_request_that_was_left_behind_goes_stale(tmp_path):
    rank = Held(tmp_path)
    rank.ask("drain")
    old = time.time() - hold.STALE_S - 1
    os.utime(rank.folder.hold, (old, old))
    rank.writer.write("agreed")
    assert rank.waits == 0
    rank.folder.hold.write_text("{torn")
    rank.writer.write("agreed")
    assert rank.waits == 0


def test_a_rank_that_may_be_held_says_so(tmp_path):
    rank = Held(tmp_path)
    rank.writer.write("attempt_start", job_id="1")
    (started,) = read_events(rank.folder.events)
    assert started.data == {"job_id": "1", "holds": True}


def test_without_leave_nobody_can_be_held(tmp_path):
    writer = hold.writer(tmp_path, "1-0", 0, None, request=None, objects={})
    assert type(writer) is EventWriter


class Step:
    """A job under the watchdog; its ranks' beats move or stand still."""

    def __init__(self, folder, beats):
        self.folder = RunFolder(folder).create()
        self.job = JobEnvironment(run=folder, job_id="7", restart=1, hang_s=10)
        self.logs = [EventWriter(self.folder.events, "7-1", rank) for rank in range(2)]
        self.beats, self.looks, self.commands = iter(beats), 0, []

    def wait(self, seconds):
        assert seconds == 1
        self.looks += 1
        for rank, log in enumerate(self.logs):
            if rank in next(self.beats, ()):
                log.beat(self.looks)
                path = self.folder.events / "7-1" / f"{rank}.beat"
                os.utime(path, ns=(self.looks, self.looks))

    def run(self, argv, stdin=None):
        self.commands.append(list(argv))
        return Output(stdout="", stderr="", returncode=0)

    def watch(self, **more):
        return watchdog.watch(self.job, self.folder, runner=self.run, wait=self.wait, **more)


def test_a_job_without_steps_for_long_is_killed(tmp_path):
    both = [(0,), (1,)]
    step = Step(tmp_path, [*both * 5])
    assert step.watch()
    assert step.commands == [["scancel", "--signal=KILL", "7.0"]]
    assert step.looks == 5 + 10
    assert [e.event for e in read_events(step.folder.events, steps=False)] == ["hang"]


def test_one_rank_that_stands_is_enough(tmp_path):
    step = Step(tmp_path, [(0,), (1,)] + [(0,), ()] * 40)
    assert step.watch()
    assert step.looks == 1 + 10


def test_nothing_is_expected_before_the_first_step_and_the_end_is_seen(tmp_path):
    step = Step(tmp_path, [])
    assert not step.watch(orphaned=lambda: step.looks > 50)
    assert step.commands == []


def test_the_watchdog_refuses_to_watch_nothing(monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as left:
        watchdog.main()
    assert left.value.code == 2


class Cluster:
    """A controller with one running job on node0 and node1, and four nodes in the partition."""

    def __init__(self, nodes="node[0-3]", silent=0):
        self.nodes, self.silent, self.done = nodes, silent, []

    def __call__(self, argv, stdin=None):
        if self.silent:
            self.silent -= 1
            return Output(stdout="", stderr="Unable to contact slurm controller", returncode=1)
        text = ""
        if "job" in argv:
            text = "JobId=7 JobState=RUNNING NodeList=node[0-1] Partition=spot\n"
        elif "partition" in argv:
            text = f"PartitionName=spot Nodes={self.nodes} TotalNodes=4\n"
        else:
            self.done.append(list(argv[1:]))
        return Output(stdout=text, stderr="", returncode=0)


@pytest.fixture
def doomed(tmp_path, monkeypatch):
    """A run one of whose ranks was told that its machine goes away."""
    monkeypatch.setattr(requeue, "_wait_for_takedown", lambda code: code)
    monkeypatch.setattr(requeue, "_POLL_S", 0.0)
    for rank, host in enumerate(("node0", "node1")):
        log = EventWriter(tmp_path / "events", "7-0", rank)
        log.write("attempt_start", host=host)
        more = {"machine": True} if rank else {}
        log.write("notice", source="aws" if rank else "SIGUSR1", window_s=9, **more)
        log.write("exit", code=75)
        log.close()
    return JobEnvironment(run=tmp_path, job_id="7")


def test_after_a_cloud_notice_the_job_keeps_off_the_doomed_node(doomed, capsys):
    cluster = Cluster()
    assert requeue.finish(75, doomed, runner=cluster) == 75
    assert cluster.done == [["requeue", "7"], ["update", "JobId=7", "ExcNodeList=node1"]]
    assert "keeping off node1" in capsys.readouterr().err
    asked = [e for e in read_events(doomed.run / "events") if e.event == "requeue_asked"]
    assert asked[0].data["avoiding"] == ["node1"]


def test_what_the_user_excluded_stays_excluded(doomed):
    spec = {"schema_version": 1, "command": ["true"], "exclude": "node2"}
    (doomed.run / "run.json").write_text(json.dumps(spec))
    cluster = Cluster()
    requeue.finish(75, doomed, runner=cluster)
    assert cluster.done[1] == ["update", "JobId=7", "ExcNodeList=node2,node1"]


def test_with_nowhere_else_to_go_nothing_is_excluded(doomed, capsys):
    cluster = Cluster(nodes="node[0-1]")
    requeue.finish(75, doomed, runner=cluster)
    assert cluster.done[1] == ["update", "JobId=7", "ExcNodeList="]
    assert "no other node" in capsys.readouterr().err


def test_the_next_requeue_without_a_notice_lifts_it_again(doomed):
    requeue.finish(75, doomed, runner=Cluster())
    cluster = Cluster()
    requeue.finish(137, JobEnvironment(run=doomed.run, job_id="7", restart=1), runner=cluster)
    assert cluster.done[1] == ["update", "JobId=7", "ExcNodeList="]


def test_a_controller_that_is_away_is_waited_for(doomed):
    cluster = Cluster(silent=5)
    assert requeue.finish(75, doomed, runner=cluster) == 75
    assert cluster.done[0] == ["requeue", "7"]


def test_a_step_that_never_started_is_the_clusters_fault(tmp_path):
    assert not requeue.decide(1, finished=False, failed=None, crashes=0).requeue
    decision = requeue.decide(1, finished=False, failed=None, crashes=0, began=False)
    assert decision.requeue
    assert not requeue.decide(1, finished=False, failed=None, crashes=3, began=False).requeue
