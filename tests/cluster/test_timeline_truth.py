"""The timeline of a run whose truth is known: from the injector's journal, and from watching."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from slurmspot.cluster import submit
from slurmspot.cluster.spec import Spec
from slurmspot.cluster.watch import follow
from slurmspot.cost.usage import TERMS, usages
from slurmspot.errors import SlurmspotError
from slurmspot.events import read_events
from slurmspot.faults.injector import Injector
from slurmspot.job.rank import RankCommand
from slurmspot.report import history
from slurmspot.runfolder import RunFolder
from slurmspot.timeline.clocks import differences
from slurmspot.timeline.recovery import interruptions

pytestmark = pytest.mark.cluster

POLL_S = 0.2
RESOLUTION_S = 1.0  # of sacct
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
    """Follows a job, lifts its backoff, and notes when it was first seen in each state."""

    def __init__(self, job_id):
        super().__init__(daemon=True)
        self.job_id, self.seen = job_id, {}

    def run(self):
        for sighting in follow(self.job_id, interval_s=POLL_S):
            if sighting.job is not None:
                key = sighting.job.state, sighting.job.restarts
                self.seen.setdefault(key, time.time())


@pytest.fixture(scope="module")
def watched(sandbox, tmp_path_factory):
    """A run on two nodes that is killed once and preempted once; its folder and its watcher."""
    script = tmp_path_factory.mktemp("truth") / "train.py"
    script.write_text(TRAINING)
    folder = RunFolder(script.with_name("run"))
    spec = Spec(command=(sys.executable, str(script)), nodes="2", period_steps=10)
    job_id = submit.submit(spec, folder, submit.check(spec), RankCommand.of(spec))
    watcher = Watched(job_id)
    watcher.start()
    injector = Injector(folder)
    try:
        injector.wait_for_step(15, deadline_s=DEADLINE_S)
    except SlurmspotError:
        pytest.fail("\n".join(log.read_text() for log in folder.logs.glob("*_log.out")))
    injector.kill()
    injector.wait_for_step(45, deadline_s=DEADLINE_S)
    injector.preempt(hold_s=1)
    watcher.join(DEADLINE_S)
    logs = [log.read_text() for log in folder.logs.glob("*_log.out")]
    assert folder.finished.exists(), logs
    return folder, watcher


def test_every_phase_is_where_it_was(watched):
    folder, watcher = watched
    found = history.of_run(folder)
    (job,) = found.timeline.jobs
    events = read_events(folder.events)
    hits = [event for event in events if event.event == "inject"]
    seen = [event for event in events if event.event == "inject_observed"]
    killed, preempted, completed = job.attempts
    assert completed.kind == "completed"

    # What sacct tells, against what was seen from outside.
    for restart, attempt in enumerate(job.attempts):
        started = watcher.seen["RUNNING", restart]
        assert abs(attempt.start.timestamp() - started) <= RESOLUTION_S + 2 * POLL_S
    for hit, effect, attempt in zip(hits, seen, (killed, preempted), strict=True):
        gone = attempt.process_exit.timestamp()
        assert hit.t_ns / 1e9 - RESOLUTION_S <= gone
        assert attempt.end.timestamp() <= effect.t_ns / 1e9 + RESOLUTION_S
    for before, after in zip(job.attempts, job.attempts[1:], strict=False):
        assert after.submit >= before.process_exit

    # What the event log tells, to a tenth of a second.
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
    noticed = min(e.t_ns for e in events if e.event == "notice") / 1e9
    (notice,) = [p for p in preempted.phases if p.name == "notice"]
    assert notice.start.timestamp() == pytest.approx(noticed, abs=0.1)
    assert 0 <= noticed - hits[1].t_ns / 1e9 <= 5


def test_interruptions_are_those_that_were_injected(watched):
    folder, _ = watched
    found = history.of_run(folder)
    killed, warned = interruptions(found.timeline.jobs, found.events)
    assert [one.inject.data["kind"] for one in (killed, warned)] == ["kill", "preempt"]
    assert (killed.kind, killed.notice, warned.kind, warned.notice) == (
        *("killed", False), *("preemption", True),
    )  # fmt: skip
    assert 0 < killed.steps_lost <= 10
    assert (warned.steps_lost, warned.recovered, killed.recovered) == (0, True, True)
    assert killed.at_step >= 15
    assert warned.at_step >= 45
    assert not any(one.certain for one in differences(found.events))  # one host, one clock


def test_every_second_is_paid_for_once(watched):
    folder, _ = watched
    found = history.of_run(folder)
    used = usages(found.timeline.jobs, found.events)
    for attempt, one in zip(found.timeline.jobs[0].attempts, used, strict=True):
        whole_s = (attempt.process_exit - attempt.submit).total_seconds()
        assert sum(one.seconds.values()) == pytest.approx(whole_s)
        assert set(one.seconds) == set(TERMS)
    assert sum(one.seconds["repeated"] for one in used) > 0
    assert sum(one.seconds["useful"] for one in used) == pytest.approx(200 * 0.05, rel=0.5)


def test_the_words_of_the_command_line(watched, capsys):
    from slurmspot.cli import main

    folder, _ = watched
    with pytest.raises(SystemExit) as caught:
        main(["timeline", str(folder.path), "--ranks", "--cost"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    for words in ("repeat", "notice", "LAST STEP", "What these figures assume"):
        assert words in out
    assert Path(folder.path).name == "run"
