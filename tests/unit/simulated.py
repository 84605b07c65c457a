"""A made-up run with its accounts and event log, for tests of the report."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from slurmspot.events import Event
from slurmspot.report.document import RunReport
from slurmspot.timeline.attempts import Attempt, Job, Phase
from slurmspot.timeline.outages import Outage
from slurmspot.timeline.phases import divided

T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
KINDS = {"preempt": "preempted", "node-down": "node_fail", "kill": "requeued"}


class _Log:
    """Collects the events of one rank at a time that the simulation sets."""

    def __init__(self):
        self.now, self.attempt, self.events = 0.0, "", []

    def __call__(self, event, step=None, *, attempt=None, **data):
        self.events.append(
            Event(
                t_ns=int((T0.timestamp() + self.now) * 1e9),
                mono_ns=int(self.now * 1e9),
                event=event,
                step=step,
                attempt=attempt or self.attempt,
                rank="0",
                data=data,
            )
        )


def run(label, hits=(), *, steps=240, step_s=0.5, every=20, baseline=False, stop_at=None, name=""):
    """A run that takes ``step_s`` a step and is hit by (kind, step); only ``preempt`` warns.

    Args:
        stop_at: the step at which the run stands now, instead of having finished.
    """
    log, attempts, outages, furthest, saved = _Log(), [], [], 0, 0
    for index, (kind, goal) in enumerate([*hits, (None, stop_at or steps)]):
        log.attempt, submit = f"17-{index}", log.now
        eligible = submit + (5 if index else 0)
        start = log.now = eligible + (3 if index else 1)
        log.now += 1
        log("attempt_start", host="n0")
        log.now += 3
        log("imports_done")
        log("restore_begin")
        log.now += 1
        log("restore_end", saved or None)
        for done in range(saved + 1, goal + 1):
            log.now += step_s
            if done == furthest + 1:
                log("first_step", done)
            log("step", done, loss=4 * math.exp(-done / 90) + 0.4)
            if done % every == 0:
                saved = done
                log("commit", done, tier="remote", trigger="period")
        furthest = max(furthest, goal)
        log.now += 0.1
        if kind:
            log("inject", attempt="injector", kind=kind, nodes=["n1"], notice=kind == "preempt")
        if kind == "preempt":
            log("notice", goal, source="SIGUSR1", window_s=15)
            log.now += 0.5
            log("agreed", goal)
            log.now += 0.2
            log("snapshot_end", goal, stall_s=0.2)
            log.now += 0.6
            saved = goal
            log("commit", goal, tier="remote", trigger="notice")
            log.now += 0.2
            log("exit", goal, code=75)
        running = kind is None and stop_at is not None
        if kind is None and not running:
            log("finished", goal, digest="abc", loss=0.4)
        if kind == "node-down":
            outages.append(Outage(node="n1", start=_at(log.now), end=None, reason="reclaimed"))
        end, gone = log.now + 0.4, log.now + 3
        log.now = gone
        attempts.append(
            Attempt(
                index=index,
                kind="running" if running else KINDS.get(kind, "completed"),
                submit=_at(submit),
                eligible=_at(eligible),
                start=_at(start),
                end=None if running else _at(end),
                process_exit=None if running else _at(gone),
                nodes=("n0", "n1"),
                gpus=8,
                released=_at(gone) if kind else None,
                parts=(
                    Phase.between("backoff", _at(submit), _at(eligible), "sacct"),
                    Phase.between("queue", _at(eligible), _at(start), "sacct"),
                ),
            )
        )
    jobs = (Job(job_id="17", name=name or label, attempts=tuple(attempts)),)
    return RunReport(
        label=label,
        jobs=divided(jobs, log.events),
        events=tuple(log.events),
        outages=tuple(outages),
        baseline=baseline,
    )


def _at(seconds):
    return T0 + timedelta(seconds=seconds)
