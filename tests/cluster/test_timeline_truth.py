"""The timeline of a run whose truth is known: from the injector's journal, and from watching."""

from __future__ import annotations

import getpass
import math
import sys
import threading
import time
from pathlib import Path

import pytest

from slurmspot.cluster import command, sacct, submit
from slurmspot.cluster.spec import Spec
from slurmspot.cluster.watch import follow
from slurmspot.cost.usage import TERMS, usages
from slurmspot.errors import NotFoundError, SlurmspotError
from slurmspot.events import read_events
from slurmspot.faults.injector import Injector
from slurmspot.faults.machines import SandboxMachines
from slurmspot.job.rank import RankCommand
from slurmspot.report import history
from slurmspot.runfolder import RunFolder
from slurmspot.timeline.attempts import read_timeline
from slurmspot.timeline.clocks import differences
from slurmspot.timeline.records import FIELDS

pytestmark = pytest.mark.cluster

POLL_S = 0.2
DEADLINE_S = 120

TRAINING = """
import time, slurmspot, torch
torch.distributed.init_process_group("gloo")
with slurmspot.Run.from_env() as run:
    for step, _ in run.steps(range(200)):
        time.sleep(0.05)
        run.log(loss=1 / step)
"""


class Watched(threading.Thread):
    """Follows a job, lifts its backoff, and notes between which times it came into each state."""

    def __init__(self, job_id):
        super().__init__(daemon=True)
        self.job_id, self.came = job_id, {}
        self.asked = self.answered = 0.0

    def run(self):
        before = 0.0
        for sighting in follow(self.job_id, interval_s=POLL_S, runner=self.ask):
            if sighting.job is not None:
                key = sighting.job.state, sighting.job.restarts
                self.came.setdefault(key, (before, self.answered))
            before = self.asked

    def ask(self, argv, *, stdin=None):
        if "show" not in argv:
            return command.run(argv, stdin=stdin)
        self.asked = time.time()
        output = command.run(argv, stdin=stdin)
        self.answered = time.time()
        return output


@pytest.fixture(scope="module")
def watched(sandbox, tmp_path_factory):
    """A run on two nodes: killed, robbed of a node, and preempted. Its folder and its watcher."""
    script = tmp_path_factory.mktemp("truth") / "train.py"
    script.write_text(TRAINING)
    folder = RunFolder(script.with_name("run"))
    spec = Spec(command=(sys.executable, str(script)), nodes="2", period_steps=10)
    job_id = submit.submit(spec, folder, submit.check(spec), RankCommand.of(spec))
    watcher = Watched(job_id)
    watcher.start()
    injector = Injector(folder, machines=SandboxMachines(sandbox))
    try:
        injector.wait_for_step(15, deadline_s=DEADLINE_S)
    except SlurmspotError:
        pytest.fail("\n".join(log.read_text() for log in folder.logs.glob("*_log.out")))
    injector.kill()
    injector.wait_for_step(45, deadline_s=DEADLINE_S)
    injector.node_down()
    injector.wait_for_step(75, deadline_s=DEADLINE_S)
    injector.preempt(hold_s=1)
    watcher.join(DEADLINE_S)
    logs = [log.read_text() for log in folder.logs.glob("*_log.out")]
    assert folder.finished.exists(), logs
    return folder, watcher


def in_seconds(event):
    return event.t_ns / 1e9


def is_within(time, since, until):
    """Whether sacct, which leaves out the fraction of a second, can mean a moment in between."""
    return math.floor(since) <= time.timestamp() <= until


def test_what_sacct_tells_is_where_it_was(watched):
    folder, watcher = watched
    found = history.of_run(folder)
    (job,) = found.timeline.jobs
    events = read_events(folder.events)
    hits = [in_seconds(event) for event in events if event.event == "inject"]
    seen = [in_seconds(event) for event in events if event.event == "inject_observed"]
    (lost,) = [in_seconds(e) for e in events if e.event == "promise" and e.data["what"] == "node"]
    asked = [in_seconds(event) for event in events if event.event == "requeue_asked"]
    killed, robbed, preempted, completed = job.attempts
    assert [attempt.kind for attempt in job.attempts] == [
        *("requeued", "node_fail", "requeued", "completed"),
    ]

    for restart, attempt in enumerate(job.attempts):
        assert is_within(attempt.start, *watcher.came["RUNNING", restart])
    for restart, attempt in enumerate(job.attempts[1:], start=1):
        since, until = watcher.came["PENDING", restart]
        assert is_within(attempt.submit, since, until)
        assert job.attempts[restart - 1].released == attempt.submit
        # Ended by the injector, or by the job itself once it had been hit.
        ended = job.attempts[restart - 1]
        if ended is not robbed:  # a lost node is not waited for
            assert is_within(ended.process_exit, hits[restart - 1], until)
            assert ended.process_exit <= attempt.submit
    assert is_within(killed.end, asked[0], watcher.came["PENDING", 1][1])
    assert is_within(robbed.end, lost, seen[1])
    assert is_within(preempted.end, asked[1], watcher.came["PENDING", 3][1])
    assert is_within(completed.end, *watcher.came["COMPLETED", 3])

    moments = [one.moments for one in found.interruptions]
    assert ["node_gone" in passed for passed in moments] == [False, True, False]
    assert is_within(moments[1]["node_gone"], lost, seen[1])
    for passed, attempt, after in zip(moments, job.attempts, job.attempts[1:], strict=False):
        assert passed["requeued"] == after.submit
        assert passed["started"] == after.start
        assert 0 <= (passed["processes_gone"] - attempt.process_exit).total_seconds() < 1


def test_what_the_event_log_tells_is_where_it_was(watched):
    folder, _ = watched
    found = history.of_run(folder)
    (job,) = found.timeline.jobs
    events = read_events(folder.events)
    preempted = job.attempts[2]
    for restart, attempt in enumerate(job.attempts):
        own = [e for e in events if e.attempt == f"{job.job_id}-{restart}"]
        lead = {e.event: e.t_ns / 1e9 for e in reversed(own) if e.rank == "0"}
        begins = {phase.name: phase.start.timestamp() for phase in attempt.phases}
        first = min(e.t_ns for e in own if e.event == "attempt_start") / 1e9
        assert begins["imports"] == pytest.approx(max(first, attempt.start.timestamp()), abs=0.1)
        if "restore" in begins:
            assert begins["restore"] == pytest.approx(lead["restore_begin"], abs=0.1)
        assert begins["train"] == pytest.approx(
            lead["first_step" if "repeat" in begins else "restore_end"], abs=0.1
        )
        for phase, after in zip(attempt.phases, attempt.phases[1:], strict=False):
            assert phase.end == after.start

    own = [e for e in events if e.attempt == f"{job.job_id}-2"]
    (last_notice,) = [e for e in own if e.event == "notice" and e.rank == "0"]
    first = {e.event: in_seconds(e) for e in reversed(own)}
    last = {e.event: in_seconds(e) for e in own}
    assert first["notice"] <= in_seconds(last_notice)
    phases = {phase.name: phase for phase in preempted.phases}
    for name, moment in {
        "notice": first["notice"],
        "snapshot": last["agreed"],
        "save": last["snapshot_end"],
        "exit": last["commit"],
    }.items():
        assert phases[name].start.timestamp() == pytest.approx(moment, abs=0.1)
    passed = {name: time.timestamp() for name, time in found.interruptions[2].moments.items()}
    for name, moment in {
        "notice": first["notice"],
        "agreed": last["agreed"],
        "snapshot": last["snapshot_end"],
        "durable": last["commit"],
    }.items():
        assert passed[name] == pytest.approx(moment, abs=0.1)
    hit = [in_seconds(event) for event in events if event.event == "inject"][2]
    assert 0 <= first["notice"] - hit <= 5


def test_interruptions_are_those_that_were_injected(watched):
    folder, _ = watched
    found = history.of_run(folder)
    killed, robbed, warned = found.interruptions
    assert [one.inject.data["kind"] for one in (killed, robbed, warned)] == [
        *("kill", "node-down", "preempt"),
    ]
    assert [(one.kind, one.notice) for one in (killed, robbed, warned)] == [
        *(("killed", False), ("node_fail", False), ("preemption", True)),
    ]
    for one in (killed, robbed):
        told = [e for e in read_events(folder.events) if e.attempt.startswith(f"{one.job_id}-")]
        before = [e for e in told if int(e.attempt.split("-")[1]) == one.attempt]
        after = [e for e in told if int(e.attempt.split("-")[1]) > one.attempt]
        kept = max(e.step for e in before if e.event == "commit")
        reached = max(e.step for e in before if e.event == "step")
        restored = next(e.step for e in after if e.event == "restore_end")
        assert one.at_step == reached
        assert kept <= restored <= reached  # the last commit may not have been told of any more
        assert one.steps_lost == reached - restored
        assert 0 < one.steps_lost < 20  # two periods: a save may have been under way
    assert warned.steps_lost == 0
    assert killed.recovered
    assert robbed.recovered
    assert warned.recovered
    assert killed.at_step >= 15
    assert robbed.at_step >= 45
    assert warned.at_step >= 75
    assert not any(one.certain for one in differences(found.events))  # one host, one clock


def test_every_second_is_paid_for_once(watched):
    folder, _ = watched
    found = history.of_run(folder)
    used = usages(found.timeline.jobs, found.events)
    for attempt, one in zip(found.timeline.jobs[0].attempts, used, strict=True):
        over = max(attempt.process_exit, attempt.released or attempt.process_exit)
        whole_s = (over - attempt.submit).total_seconds()
        assert sum(one.seconds.values()) == pytest.approx(whole_s)
        assert set(one.seconds) == set(TERMS)
    assert sum(one.seconds["repeated"] for one in used) > 0
    assert sum(one.seconds["useful"] for one in used) == pytest.approx(200 * 0.05, rel=0.5)


def test_accounts_asked_for_in_pages_tell_the_same(watched):
    """The run stands on several pages, and its running attempts on two."""
    folder, _ = watched
    (job,) = history.of_run(folder).timeline.jobs
    begin, end = job.attempts[0].submit, job.attempts[-1].end
    page = (end - begin) / 4
    asked = []

    def runner(argv, *, stdin=None):
        asked.append(argv)
        return command.run(argv, stdin=stdin)

    about = {"fields": FIELDS, "since": begin - page, "until": end + page, "page": page}
    texts = list(sacct.pages(runner, user=getpass.getuser(), partition="spot", **about, wait=id))
    assert len(texts) == len(asked) - 1 >= 6
    assert sum(job.job_id in text for text in texts) > 2
    found = {one.job_id: one for one in read_timeline("".join(texts)).jobs}
    assert [one._replace(parts=()) for one in job.attempts] == list(found[job.job_id].attempts)
    elsewhere = sacct.pages(runner, user=None, partition="ondemand", **about, wait=id)
    others = read_timeline("".join(elsewhere)).jobs
    assert {one.name for one in others} == {"slurmspot-preemptor"}  # an earlier test's may end late
    with pytest.raises(NotFoundError, match="no job of nobody"):
        history.of_account(user="nobody", partition=None, since=begin, until=end)


def test_the_words_of_the_command_line(watched, capsys):
    from slurmspot.cli import main

    folder, _ = watched
    with pytest.raises(SystemExit) as caught:
        main(["timeline", str(folder.path), "--ranks", "--cost"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    for words in ("repeat", "notice", "node gone", "LAST STEP", "What these figures assume"):
        assert words in out
    assert Path(folder.path).name == "run"
