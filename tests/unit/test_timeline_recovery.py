"""Phases and interruptions of hand-made event logs whose truth is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from slurmspot.events import Event
from slurmspot.timeline.attempts import Attempt, Job, Phase
from slurmspot.timeline.lives import by_attempt, chains, complete, lives, witnessed
from slurmspot.timeline.moments import MOMENTS, since_first
from slurmspot.timeline.outages import Outage, read_outages
from slurmspot.timeline.phases import divided
from slurmspot.timeline.recovery import (
    breakdown,
    ended_as,
    false_starts,
    finished,
    interruptions,
)

T0 = datetime(2026, 1, 1, tzinfo=UTC)
NS = 1_000_000_000


def at(seconds):
    return T0 + timedelta(seconds=seconds)


def event(attempt, seconds, name, step=None, *, rank="0", skew=0.0, **data):
    """``seconds`` after T0 in truth; the host's wall clock is off by ``skew``."""
    return Event(
        t_ns=int((T0.timestamp() + seconds + skew) * NS),
        mono_ns=int((1000 * int(rank) + seconds) * NS) if rank.isdecimal() else int(seconds * NS),
        event=name,
        step=step,
        attempt=attempt,
        rank=rank,
        data=data,
    )


def attempt(index, kind, submit, start, end, *, gone=None, gpus=4):
    gone = end if gone is None else gone
    over = end is not None
    phases = [
        Phase.between("backoff", at(submit), at(submit), "sacct"),
        Phase.between("queue", at(submit), at(start), "sacct"),
        Phase.between("run", at(start), at(end) if over else None, "sacct"),
    ]
    return Attempt(
        index=index,
        kind=kind,
        submit=at(submit),
        eligible=at(submit),
        start=at(start),
        end=at(end) if over else None,
        process_exit=at(gone) if over else None,
        nodes=("n0", "n1"),
        gpus=gpus,
        parts=tuple(phases),
    )


def opening(name, start, restored, *, rank="0", skew=0.0):
    """Start, imports (2 s), restore (1 s)."""
    return [
        event(name, start, "attempt_start", rank=rank, skew=skew, host=f"n{rank}"),
        event(name, start + 2, "imports_done", rank=rank, skew=skew),
        event(name, start + 3, "restore_begin", rank=rank, skew=skew),
        event(name, start + 4, "restore_end", restored, rank=rank, skew=skew),
    ]


# One step a second. Attempt 0 runs steps 1..50 and is warned; saves at 50. Attempt 1 goes on from
# 50 to 80 and is killed with its last checkpoint at 70. Attempt 2 repeats 71..80 and finishes 100.
JOB = Job(
    job_id="17",
    name="train",
    attempts=(
        attempt(0, "requeued", 0, 10, 69, gone=70),
        attempt(1, "node_fail", 70, 100, 135, gone=140),
        attempt(2, "completed", 140, 150, 186),
    ),
)
EVENTS = [
    *opening("17-0", 11, None),
    *opening("17-0", 11, None, rank="1", skew=30.0),
    event("17-0", 16, "first_step", 1),
    *[event("17-0", 15 + step, "step", step) for step in range(10, 51, 10)],
    event("17-0", 64.0, "notice", 49, source="SIGUSR1", window_s=15),
    event("17-0", 63.5, "notice", 48, source="SIGUSR1", window_s=15, rank="1", skew=0.0),
    event("17-0", 65.5, "agreed", 50),
    event("17-0", 65.6, "snapshot_begin", 50, trigger="notice"),
    event("17-0", 65.75, "snapshot_end", 50, stall_s=0.1, rank="1"),
    event("17-0", 66.0, "snapshot_end", 50, stall_s=0.1),
    event("17-0", 67.0, "commit", 50, tier="remote", trigger="notice"),
    event("17-0", 68.0, "exit", 50, code=75),
    event("17-0", 68.5, "exit", 50, code=75, rank="1", skew=0.0),
    event("17-0", 68.9, "requeue_asked", rank="batch", exit_code=75),
    *opening("17-1", 101, 50),
    event("17-1", 106, "first_step", 51),
    *[event("17-1", 55 + step, "step", step) for step in (60, 70, 80)],
    event("17-1", 126, "commit", 70, tier="remote", trigger="period"),
    event("injector", 134.5, "inject", kind="node-down", nodes=["n1"], notice=False, rank="0"),
    *opening("17-2", 151, 70),
    *[event("17-2", 85 + step, "step", step) for step in (75, 80)],
    event("17-2", 166, "first_step", 81),
    event("17-2", 185, "step", 100),
    event("17-2", 185.5, "finished", 100, digest="d", loss=0.1),
    event("17-2", 186, "exit", 100, code=0),
]


def test_a_warned_and_an_unwarned_interruption():
    warned, killed = interruptions([JOB], EVENTS)
    assert (warned.kind, warned.attempt, warned.at_step, warned.notice) == (
        "preemption", 0, 50, True,
    )  # fmt: skip
    assert (warned.recovered, warned.steps_lost, warned.rpo_s) == (True, 0, 0.0)
    assert warned.rto_s == pytest.approx(106 - 65)
    assert warned.notice_to_durable_s == pytest.approx(3.5)
    assert warned.notice_to_exit_s == pytest.approx(5.0)
    assert warned.requeue_wait_s == pytest.approx(30)
    assert warned.inject is None

    assert (killed.kind, killed.attempt, killed.at_step, killed.notice) == (
        "node_fail", 1, 80, False,
    )  # fmt: skip
    assert (killed.recovered, killed.steps_lost) == (True, 10)
    assert killed.rpo_s == pytest.approx(10)
    assert killed.rto_s == pytest.approx(166 - 135)
    assert (killed.notice_to_durable_s, killed.notice_to_exit_s) == (None, None)
    assert killed.requeue_wait_s == pytest.approx(10)
    assert killed.inject is not None
    assert killed.inject.data["kind"] == "node-down"
    assert finished([JOB], EVENTS)


def test_an_injection_belongs_to_the_attempt_it_hit():
    job = Job(
        job_id="5",
        name="",
        attempts=(attempt(0, "preempted", 0, 0, 60), attempt(1, "preempted", 60, 62, 90)),
    )
    hits = [
        event("injector", 63, "inject", kind="early"),
        event("injector", 70, "inject", kind="kill"),
        event("injector", 92, "inject", kind="late"),
    ]
    first, second = interruptions([job], hits)
    assert first.inject is None
    assert second.inject.data["kind"] == "late"
    assert interruptions([job], hits[:2])[1].inject.data["kind"] == "kill"


def test_phases_divide_the_run_without_gaps():
    (job,) = divided([JOB], EVENTS)
    lengths = [
        {phase.name: phase.seconds for phase in attempt.phases if phase.source == "events"}
        for attempt in job.attempts
    ]
    assert lengths[0] == {
        "startup": 1, "imports": 2, "setup": 1, "restore": 1, "train": 48.5,
        "notice": 2, "snapshot": 0.5, "save": 1, "exit": 2,
    }  # fmt: skip
    assert lengths[1] == {
        "startup": 1, "imports": 2, "setup": 1, "restore": 1, "train": 30,
    }  # fmt: skip
    assert lengths[2]["repeat"] == 11
    for attempt in job.attempts:
        for before, after in zip(attempt.phases, attempt.phases[1:], strict=False):
            assert before.end == after.start
        assert attempt.phases[-1].end == attempt.process_exit


def test_clocks_that_disagree_never_give_negative_lengths():
    skewed = [
        event(e.attempt, (e.t_ns / NS - T0.timestamp()), e.event, e.step, rank=e.rank,
              skew=-500.0 if e.rank == "1" else 90.0, **e.data)
        for e in EVENTS
    ]  # fmt: skip
    for found in interruptions([JOB], skewed):
        figures = (
            found.rpo_s, found.rto_s, found.notice_to_durable_s, found.notice_to_exit_s,
            found.requeue_wait_s, found.steps_lost,
        )  # fmt: skip
        assert all(figure is None or figure >= 0 for figure in figures)
    for attempt in divided([JOB], skewed)[0].attempts:
        assert all(phase.seconds >= 0 for phase in attempt.phases)


def test_killed_twice_in_a_row_before_anything_new():
    job = Job(
        job_id="5",
        name="",
        attempts=(
            attempt(0, "node_fail", 0, 0, 60),
            attempt(1, "requeued", 60, 70, 80),
            attempt(2, "requeued", 80, 90, 100),
            attempt(3, "completed", 100, 110, 200),
        ),
    )
    events = [
        *opening("5-0", 0, None),
        event("5-0", 5, "first_step", 1),
        event("5-0", 54, "step", 50),
        *opening("5-1", 70, 40),  # repeats 41..45, killed
        event("5-1", 79, "step", 45),
        event("5-1", 79.5, "requeue_asked", rank="batch", exit_code=137),
        event("5-2", 91, "attempt_start"),  # killed before it restored
        event("5-2", 92, "requeue_asked", rank="batch", exit_code=137),
        *opening("5-3", 110, 30),  # 40 did not verify any more
        event("5-3", 134, "step", 50),
        event("5-3", 135, "first_step", 51),
        event("5-3", 136, "finished", 51),
    ]
    first, second, third = interruptions([job], events)
    assert [found.kind for found in (first, second, third)] == ["node_fail", "killed", "killed"]
    assert [found.at_step for found in (first, second, third)] == [50, 45, 45]
    assert all(found.recovered for found in (first, second, third))
    assert (first.steps_lost, second.steps_lost, third.steps_lost) == (10, 15, 0)
    assert first.rpo_s == pytest.approx(10)
    # 41..45 took attempt 1 one second each, 31..40 took attempt 0 as long
    assert second.rpo_s == pytest.approx(15)
    assert first.rto_s == pytest.approx(135 - 54)
    assert second.rto_s == pytest.approx(135 - 79)


def test_not_recovered_while_only_old_steps_are_run():
    job = Job(
        job_id="5",
        name="",
        attempts=(attempt(0, "preempted", 0, 0, 60), attempt(1, "running", 60, 70, None)),
    )
    events = [
        *opening("5-0", 0, None),
        event("5-0", 54, "step", 50),
        *opening("5-1", 70, 40),
        event("5-1", 79, "step", 45),
    ]
    (only,) = interruptions([job], events)
    assert (only.recovered, only.rto_s, only.steps_lost) == (False, None, 10)
    assert not finished([job], events)
    phases = divided([job], events)[0].attempts[1].phases
    assert (phases[-1].name, phases[-1].end) == ("repeat", None)


def test_no_interruption_and_none_after_the_finish():
    events = [*opening("5-0", 0, None), event("5-0", 5, "finished", 1)]
    once = Job(job_id="5", name="", attempts=(attempt(0, "completed", 0, 0, 9),))
    assert interruptions([once], events) == []
    again = Job(
        job_id="5",
        name="",
        attempts=(attempt(0, "preempted", 0, 0, 9), attempt(1, "completed", 9, 10, 12)),
    )
    answered = [*events, event("5-1", 10, "attempt_start"), event("5-1", 11, "exit", code=0)]
    assert interruptions([again], answered) == []


def test_ending_well_without_having_finished_is_an_interruption():
    job = Job(job_id="5", name="", attempts=(attempt(0, "completed", 0, 0, 9),))
    events = [*opening("5-0", 0, None), event("5-0", 5, "step", 1)]
    (only,) = interruptions([job], events)
    assert (only.kind, only.recovered, only.steps_lost) == ("exited", False, None)


def test_a_failed_import_interrupts_nothing():
    job = Job(
        job_id="5",
        name="",
        attempts=(
            attempt(0, "preempted", 0, 0, 60),
            attempt(1, "requeued", 60, 70, 75),
            attempt(2, "failed", 75, 80, 85),
        ),
    )
    events = [
        *opening("5-0", 0, None),
        event("5-0", 54, "step", 50),
        event("5-1", 71, "launched"),
        event("5-1", 74, "requeue_asked", rank="batch", exit_code=1),
        event("5-2", 81, "launched"),
    ]
    (only,) = interruptions([job], events)
    assert (only.kind, only.at_step, only.recovered) == ("preemption", 50, False)
    assert false_starts([job], events) == 2
    crashed = [*events, *opening("5-2", 81, 40), event("5-2", 84, "exit", 41, code=1)]
    assert false_starts([job], crashed) == 2
    working = [*crashed, event("5-2", 83.5, "step", 41)]
    assert [one.kind for one in interruptions([job], working)] == ["preemption", "failed"]
    lost = [*events[:3], event("5-1", 71, "launched"), event("5-1", 74, "requeue_asked",
            rank="batch", exit_code=137)]  # fmt: skip
    assert [one.kind for one in interruptions([job], lost)][:2] == ["preemption", "killed"]


def test_how_an_attempt_ended_in_words():
    jobs = divided([JOB], EVENTS)
    found = {one.attempt: one for one in interruptions(jobs, EVENTS)}
    assert [ended_as(one, found.get(one.index)) for one in jobs[0].attempts] == [
        *("preempted, saved", "node fail", "completed"),
    ]
    unsaved = [e for e in EVENTS if e.event != "commit"]
    (warned, _) = interruptions(jobs, unsaved)
    assert ended_as(jobs[0].attempts[0], warned) == "preempted"
    (requeued, _) = interruptions([JOB])
    assert ended_as(JOB.attempts[0], requeued) == "requeued"


def test_without_events_sacct_alone_decides():
    first, second = interruptions([JOB])
    assert [first.kind, second.kind] == ["requeued", "node_fail"]
    assert first.recovered
    assert second.recovered
    assert (first.at_step, first.steps_lost, first.rto_s) == (None, None, None)


def test_a_change_of_size_is_no_restart():
    job = Job(
        job_id="5",
        name="",
        attempts=(
            attempt(0, "resized", 0, 0, 30),
            attempt(1, "preempted", 30, 30, 60),
            attempt(2, "completed", 60, 70, 90),
        ),
    )
    events = [
        *opening("5-0", 0, None),
        event("5-0", 50, "step", 40),
        *opening("5-1", 70, 40),
        event("5-1", 75, "first_step", 41),
        event("5-1", 80, "finished", 50),
    ]
    (only,) = interruptions([job], events)
    assert (only.attempt, only.kind, only.at_step) == (1, "preemption", 40)
    small, large, _ = divided([job], events)[0].attempts
    assert [(p.name, p.seconds) for p in small.phases][-2:] == [("train", 26), ("teardown", 0)]
    assert ("train", 30) in [(p.name, p.seconds) for p in large.phases]


def test_array_tasks_are_lines_of_their_own_and_resubmission_is_not():
    def job(job_id, start):
        return Job(
            job_id=job_id, name="", attempts=(attempt(0, "completed", start, start, start + 5),)
        )

    jobs = [job("9_0", 0), job("9_1", 0), job("12_0", 50), job("33+0", 60), job("33+1", 60)]
    found = [[life.job_id for life in chain] for chain in chains(jobs, [])]
    assert found == [["9_0", "12_0"], ["9_1"], ["33+0"]]


def test_a_run_outside_slurm_is_told_from_its_events():
    events = [
        *opening("local-0", 0, None),
        event("local-0", 10, "exit", 5, code=75),
        *opening("local-1", 20, 5),
        event("local-1", 30, "finished", 9),
    ]
    (job,) = witnessed(events)
    assert [attempt.kind for attempt in job.attempts] == ["requeued", "completed"]
    assert job.attempts[0].nodes == ("n0",)
    assert witnessed(events, known=["local"]) == []


@pytest.mark.parametrize(
    ("source", "warned"), [("SIGTERM", False), ("SIGUSR1", True), ("aws", True)]
)
def test_the_sigterm_that_follows_a_lost_node_is_no_warning(source, warned):
    job = Job(
        job_id="5",
        name="",
        attempts=(attempt(0, "node_fail", 0, 0, 60), attempt(1, "completed", 60, 70, 80)),
    )
    events = [
        *opening("5-0", 0, None),
        event("5-0", 54, "step", 50),
        event("5-0", 60, "notice", 50, rank="1", source=source, window_s=5),
        *opening("5-1", 70, 40),
        event("5-1", 79, "finished", 60),
    ]
    (found,) = interruptions([job], events)
    assert (found.notice, found.steps_lost) == (warned, 10)


def test_rows_that_accounting_has_purged_are_told_from_the_events():
    """The first of three attempts left no row: counted from 0, every event would be misplaced."""
    purged = JOB._replace(attempts=JOB.attempts[1:])
    assert [life.restored for life in lives(purged, by_attempt(EVENTS))] == [50, 70]
    (whole,), (note,) = complete([purged], EVENTS)
    assert "job 17: restart 0 left no row" in note
    assert [(a.index, a.kind) for a in whole.attempts] == [
        (0, "requeued"), (1, "node_fail"), (2, "completed"),
    ]  # fmt: skip
    assert [one.steps_lost for one in interruptions([whole], EVENTS)] == [0, 10]
    assert complete([JOB], EVENTS) == ([JOB], [])


def passed(one):
    return {name: (time - T0).total_seconds() for name, time in one.moments.items()}


def test_the_moments_of_an_interruption():
    warned, killed = interruptions([JOB], EVENTS)
    assert passed(warned) == {
        "last_step": 65, "notice": 63.5, "agreed": 65.5, "snapshot": 66, "durable": 67,
        "processes_gone": 70, "requeued": 70, "eligible": 70, "started": 100,
        "imports_done": 103, "restored": 105, "new_step": 106,
    }  # fmt: skip
    assert passed(killed) == {
        "last_step": 135, "node_gone": 135, "processes_gone": 140, "requeued": 140,
        "eligible": 140, "started": 150, "imports_done": 153, "restored": 155, "new_step": 166,
    }  # fmt: skip
    assert set(warned.moments) | set(killed.moments) == set(MOMENTS)
    ordered = [name for name, _, _ in since_first(warned.moments)]
    assert ordered[:3] == ["notice", "last_step", "agreed"]
    (unknown, lost) = interruptions([JOB])
    assert passed(unknown) == {
        "processes_gone": 70, "requeued": 70, "eligible": 70, "started": 100,
    }  # fmt: skip
    assert passed(lost)["node_gone"] == 135


@pytest.mark.parametrize(
    ("node", "down", "gone"),
    [
        ("n1", 60, 60),
        ("n1", 75, 75),  # within the window of its notice
        ("n1", 90, 90),  # and within a minute after it
        ("n1", 9, None),  # before it
        ("n1", 101, None),  # the next attempt runs there
        ("n7", 60, None),  # of another job
    ],
)
def test_a_node_is_gone_when_slurm_takes_it_for_gone(node, down, gone):
    outage = Outage(node=node, start=at(down), end=None, reason="")
    warned, killed = interruptions([JOB], EVENTS, [outage])
    assert passed(warned).get("node_gone") == gone
    assert passed(killed)["node_gone"] == (101 if (node, down) == ("n1", 101) else 135)


def test_outages_are_read_from_the_events_of_nodes():
    text = (
        "|2026-01-01T00:00:00|Unknown||Cluster Registered TRES\n"
        "n1|2026-01-01T00:02:00|2026-01-01T00:03:00|DOWN*|Not responding|or so\n"
        "n2|2026-01-01T00:01:00|Unknown|POWERED_DOWN|\n"
        "n3|2026-01-01T00:01:00|Unknown|DRAIN|\n"
        "n4|soon|Unknown|DOWN|\nn5|2026\n"
    )
    first, second = read_outages(text, tz=UTC)
    assert (first.node, first.start, first.end) == ("n2", at(60), None)
    assert (second.node, second.end, second.reason) == ("n1", at(180), "Not responding|or so")


def test_the_rto_is_made_of_parts():
    jobs = divided([JOB], EVENTS)
    warned, killed = interruptions(jobs, EVENTS)
    assert breakdown(warned, jobs) == {
        "notice": 0.5, "snapshot": 0.5, "save": 1.0, "exit": 2.0, "teardown": 1.0, "queue": 30.0,
        "startup": 1.0, "imports": 2.0, "setup": 1.0, "restore": 1.0, "train": 1.0,
    }  # fmt: skip
    assert sum(breakdown(warned, jobs).values()) == pytest.approx(warned.rto_s)
    parts = breakdown(killed, jobs)
    assert (parts["teardown"], parts["queue"], parts["repeat"]) == (5, 10, 11)
    assert sum(parts.values()) == pytest.approx(killed.rto_s)
    lost = interruptions([JOB._replace(attempts=JOB.attempts[:1])], EVENTS)[0]
    assert breakdown(lost, jobs) == {}
