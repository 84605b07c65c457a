"""Makes the document of a report from runs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import Any

from slurmspot.cost.bill import Bill, bill, gpu_hours
from slurmspot.cost.prices import Prices, load_prices
from slurmspot.cost.usage import usages
from slurmspot.errors import UsageError
from slurmspot.events import Event
from slurmspot.report.costs import bill_table, falls, percent, unpriced
from slurmspot.report.document import (
    GROUPS,
    Curve,
    Document,
    Figure,
    Lane,
    Mark,
    RunReport,
    Span,
    Spread,
    Table,
)
from slurmspot.report.table import duration
from slurmspot.timeline.attempts import Attempt, Job
from slurmspot.timeline.lives import INJECTOR, chains, moment
from slurmspot.timeline.moments import MOMENTS, since_first
from slurmspot.timeline.recovery import (
    Interruption,
    breakdown,
    ended_as,
    false_starts,
    finished,
    given_up,
)

_RTO_ORDER = (
    *("train", "notice", "snapshot", "save", "exit", "teardown", "release", "between"),
    *("backoff", "queue"),
    *("run", "startup", "imports", "setup", "restore", "repeat"),
)
_MARKS = {"notice": "notice", "commit": "commit", "inject": "injection"}
_MOST_POINTS = 600  # of a curve: more are not seen


def build_document(
    title: str,
    runs: Sequence[RunReport],
    summary: Mapping[str, Any] | None = None,
    *,
    generated: datetime,
    prices: Prices | None = None,
    notes: Sequence[str] = (),
) -> Document:
    """The document about ``runs``.

    Args:
        summary: what is known beyond the runs; ``final_state_equal`` (bool) is used.
        generated: now, aware; attempts that still run are drawn up to here.
        prices: default: the examples that come with this package.
        notes: what else a reader should know, a sentence each.
    """
    facts = _Facts.of(runs, summary or {}, prices or load_prices(), generated)
    ended = {id(run): ones for run, ones in facts.found}
    return Document(
        title=title,
        lead=tuple(_lead(facts)),
        generated=generated,
        figures=tuple(_figures(facts)),
        lanes=tuple(
            lane for run in runs for lane in _lanes(run, ended.get(id(run), ()), generated)
        ),
        shares=_share_table(runs),
        curves=tuple(curve for run in runs for curve in _curves(run)),
        breaks=tuple((one.at_step, one.kind) for one in facts.every if one.at_step is not None),
        interruptions=_interruption_table(facts.found),
        moments=_moment_table(facts.found),
        attempts=_attempt_table(runs, facts.found),
        spreads=tuple(_spreads(facts.every)),
        parts=_part_table(facts.found),
        falls=falls(facts.whole, facts.base_bill),
        costs=bill_table(
            facts.bills, "Run", on_demand=facts.base_bill.listed if facts.base_bill else None
        ),
        unpriced=unpriced(facts.bills),
        assumptions=facts.whole.assumptions,
        baseline=facts.baseline.label if facts.baseline else None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What lead and figures both speak of.

    Attributes:
        found: the interruptions of each spot run.
        equal: every run ended in the baseline's state; None while that cannot be said.
        done: the work of every spot run is finished.
        undone: what a reader is told if it is not.
        used: GPU hours of the spot runs; ``base`` those of the baseline; None if unknown.
        bills: of each run; ``whole`` is that of all spot runs together, ``base_bill`` what the
            baseline would have cost on spot.
    """

    found: tuple[tuple[RunReport, tuple[Interruption, ...]], ...]
    baseline: RunReport | None
    equal: bool | None
    done: bool
    undone: str
    used: float | None
    base: float | None
    prices: Prices
    bills: tuple[Bill, ...]
    whole: Bill
    base_bill: Bill | None

    @classmethod
    def of(
        cls, runs: Sequence[RunReport], summary: Mapping[str, Any], prices: Prices, now: datetime
    ) -> _Facts:
        spot = [run for run in runs if not run.baseline]
        baseline = next((run for run in runs if run.baseline), None)
        equal = summary.get("final_state_equal")
        used = {id(run): usages(run.jobs, run.events, now=now) for run in runs}
        return cls(
            found=tuple((run, tuple(run.interruptions)) for run in spot),
            baseline=baseline,
            equal=_ends_equal(baseline, spot) if equal is None else bool(equal),
            done=all(finished(run.jobs, run.events) for run in spot),
            undone="not finished, and nothing goes on with it"
            if any(given_up(run.jobs, run.events) for run in spot)
            else "not finished yet",
            used=_hours(spot, now),
            base=_hours([baseline], now) if baseline else None,
            prices=prices,
            bills=tuple(bill(used[id(run)], prices, name=run.label) for run in runs),
            whole=bill([one for run in spot for one in used[id(run)]], prices),
            base_bill=bill(used[id(baseline)], _all_spot(prices)) if baseline else None,
        )

    @property
    def every(self) -> list[Interruption]:
        return [one for _, ones in self.found for one in ones]

    @property
    def recovered(self) -> int:
        return sum(one.recovered for one in self.every)

    @property
    def saving(self) -> float | None:
        """The effective saving, once the work is done; without a baseline, on useful work."""
        if not self.done or not self.whole.exact["useful"]:
            return None
        if self.base_bill is None:
            return self.whole.saving
        return self.whole.saving_against(self.base_bill.listed)


def _all_spot(prices: Prices) -> Prices:
    return replace(prices, other=replace(prices.other, on_demand_partitions=()))


def _ends_equal(baseline: RunReport | None, spot: Sequence[RunReport]) -> bool | None:
    if baseline is None or not spot:
        return None
    digests = [_digests(run) for run in (baseline, *spot)]
    return len(set.union(*digests)) == 1 if all(digests) else None


def _digests(run: RunReport) -> set[str]:
    """Of the final states that the run's ranks logged."""
    return {
        str(event.data["digest"])
        for event in run.events
        if event.event == "finished" and event.data.get("digest")
    }


def _hours(runs: Sequence[RunReport], now: datetime) -> float | None:
    try:
        return sum(gpu_hours(job.attempts, now=now) for run in runs for job in run.jobs)
    except UsageError:
        return None


def _lead(facts: _Facts) -> list[str]:
    """What the report is about, in sentences."""
    runs = {0: "No run", 1: "One run"}.get(len(facts.found), f"{len(facts.found)} runs")
    against = ", next to a baseline that was left alone" if facts.baseline else ""
    lead = [f"{runs} on spot capacity{against}."]
    every = len(facts.every)
    if every:
        injected = sum(one.inject is not None for one in facts.every)
        purpose = f", {injected} of these on purpose" if injected else ""
        purpose = " on purpose" if injected == every else purpose
        lead.append(f"The work was interrupted {_times(every)}{purpose}.")
        back = "every time" if facts.recovered == every else _times(facts.recovered)
        lead.append(f"It came back {back}.")
    else:
        lead.append("Nothing interrupted the work.")
    failed = sum(false_starts(run.jobs, run.events) for run, _ in facts.found)
    if failed:
        attempts = "One attempt" if failed == 1 else f"{failed} attempts"
        lead.append(f"{attempts} ended by a fault of its own before the first step.")
    if not facts.done:
        lead.append(f"It is {facts.undone}.")
    if facts.equal is not None:
        ending = "is the baseline's, bit for bit" if facts.equal else "is not the baseline's"
        lead.append(f"Its final state {ending}.")
    return lead


def _times(count: int) -> str:
    return {0: "not once", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _figures(facts: _Facts) -> list[Figure]:
    every, saving, prices = facts.every, facts.saving, facts.prices
    lost = [one.steps_lost for one in every if one.steps_lost is not None]
    rpo = [one.rpo_s for one in every if one.rpo_s is not None]
    rto = [one.rto_s for one in every if one.rto_s is not None]
    return [
        Figure(
            name="Interruptions",
            value=f"{len(every):,}",
            note=f"recovered from {facts.recovered:,}" if every else "",
        ),
        Figure(
            name="Steps lost",
            value=f"{sum(lost):,}" if lost or not every else "unknown",
            note=f"at most {max(lost):,} at once, {duration(max(rpo))}" if lost and rpo else "",
        ),
        Figure(
            name="RTO, median",
            value=duration(median(rto)) if rto else "-",
            note=f"longest {duration(max(rto))}" if rto else "",
        ),
        Figure(
            name="GPU hours",
            value="unknown" if facts.used is None else f"{facts.used:,.3g}",
            note="" if facts.base is None else f"baseline {facts.base:,.3g}",
        ),
        Figure(
            name="Effective saving",
            value=percent(saving),
            note=f"nominal discount {prices.discount:.0%}"
            + (", example prices" if prices.example else ""),
        ),
        _final_state(facts),
    ]


def _final_state(facts: _Facts) -> Figure:
    if facts.equal is None:
        value, note = "-", "not compared" if facts.done else facts.undone
    elif facts.equal:
        value, note = "equal", "to the baseline's, bit for bit"
    else:
        value, note = "differs", "from the baseline's"
    return Figure(name="Final state", value=value, note=note)


def _spreads(every: Sequence[Interruption]) -> list[Spread]:
    found = {"RPO": [one.rpo_s for one in every], "RTO": [one.rto_s for one in every]}
    spreads = {
        name: tuple(sorted(value for value in values if value is not None))
        for name, values in found.items()
    }
    return [Spread(name=name, seconds=values) for name, values in spreads.items() if values]


def _part_table(found: Sequence[tuple[RunReport, Sequence[Interruption]]]) -> Table:
    """How long each part of the RTO took, the median of each kind of interruption."""
    by_kind: dict[str, list[dict[str, float]]] = {}
    for run, ones in found:
        phases = _InTime(run.jobs)
        for one in ones:
            parts = breakdown(one, phases.around(one))
            if parts:
                by_kind.setdefault(one.kind, []).append(parts)
    names = [name for name in _RTO_ORDER if any(name in p for ps in by_kind.values() for p in ps)]
    rows = tuple(
        (
            kind.replace("_", " "),
            str(len(ones)),
            *(duration(median(parts.get(name, 0.0) for parts in ones)) for name in names),
            duration(median(sum(parts.values()) for parts in ones)),
        )
        for kind, ones in by_kind.items()
    )
    header = ("Median RTO", "Count", *(name.capitalize() for name in names), "In all")
    return Table(header=header, rows=rows, right=frozenset(header[1:]))


class _InTime:
    """The attempts of a run by time, so that those around an interruption are found at once."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._attempts = sorted(
            ((attempt.submit, job, attempt) for job in jobs for attempt in job.attempts),
            key=lambda item: item[0],
        )
        self._submits = [submit for submit, _, _ in self._attempts]

    def around(self, one: Interruption) -> list[Job]:
        """Jobs with only the attempts that lie between an interruption and the way back."""
        if one.down_at is None or one.back_at is None:
            return []
        first = max(0, bisect_right(self._submits, one.down_at) - 1)
        last = bisect_right(self._submits, one.back_at)
        return [job._replace(attempts=(a,)) for _, job, a in self._attempts[first:last]]


def _lanes(run: RunReport, ended: Sequence[Interruption], now: datetime) -> list[Lane]:
    submits = [attempt.submit for job in run.jobs for attempt in job.attempts]
    if not submits:
        return []
    zero = min(submits)

    def since(time: datetime) -> float:
        return max(0.0, (time - zero).total_seconds())

    return [
        Lane(
            label=f"{run.label} · job {job.job_id}" if job.job_id != "local" else run.label,
            spans=tuple(
                Span(
                    name=phase.name,
                    start_s=since(phase.start),
                    end_s=since(phase.end or max(now, phase.start)),
                    text=f"{phase.name}, attempt {attempt.index}: "
                    + (duration(phase.seconds) if phase.end else "still going"),
                )
                for attempt in job.attempts
                for phase in attempt.phases
                if phase.seconds != 0
            ),
            marks=tuple(
                Mark(kind=kind, at_s=since(time), text=text)
                for kind, time, text in _marks(job, run.events, ended)
            ),
        )
        for job in run.jobs
    ]


def _marks(
    job: Job, events: Sequence[Event], ended: Sequence[Interruption]
) -> Iterator[tuple[str, datetime, str]]:
    """Kind, time and text of each mark of a job."""
    for event in _marked(job, events):
        yield _MARKS[event.event], moment(event), _mark_text(event)
    for one in ended:
        if one.job_id == job.job_id and "node_gone" in one.moments:
            yield "gone", one.moments["node_gone"], f"a node of attempt {one.attempt} is gone"


def _marked(job: Job, events: Sequence[Event]) -> list[Event]:
    """The events of a job worth a mark; of what several ranks log, the first."""
    found: dict[tuple[str, str, int | None], Event] = {}
    for event in events:
        if event.attempt == INJECTOR and event.event == "inject":
            if str(event.data.get("job_id", job.job_id)) == job.job_id:
                found["inject", "", event.t_ns] = event
        elif event.event in _MARKS and event.attempt.rpartition("-")[0] == job.job_id:
            step = event.step if event.event == "commit" else None
            found.setdefault((event.event, event.attempt, step), event)
    return list(found.values())


def _mark_text(event: Event) -> str:
    where = "on the nodes' disks" if event.data.get("tier") == "local" else "durable"
    detail = {
        "notice": f"notice by {event.data.get('source', 'an unknown source')}",
        "commit": f"checkpoint of step {event.step} {where}",
        "inject": f"injection: {event.data.get('kind', 'unknown')}",
    }
    return detail[event.event]


def _curves(run: RunReport) -> list[Curve]:
    """The run's loss, from the lead rank of each attempt; a step done again counts as done last."""
    points: dict[int, float] = {}
    for chain in chains(run.jobs, run.events):
        for life in chain:
            for event in life.steps:
                loss = event.data.get("loss")
                if event.rank != life.lead or not isinstance(loss, int | float):
                    continue
                if math.isfinite(loss):
                    points[event.step or 0] = float(loss)
    ordered = sorted(points.items())
    stride = -(-len(ordered) // _MOST_POINTS) or 1
    kept = tuple(ordered[::stride]) + tuple(ordered[-1:] if (len(ordered) - 1) % stride else ())
    return [Curve(label=run.label, points=kept, baseline=run.baseline)] if len(kept) > 1 else []


def _share_table(runs: Sequence[RunReport]) -> Table:
    rows = []
    for run in runs:
        phases = [phase for job in run.jobs for attempt in job.attempts for phase in attempt.phases]
        spent = {
            group: sum(phase.seconds or 0.0 for phase in phases if phase.name in names)
            for group, names in GROUPS.items()
        }
        total = sum(spent.values())
        if total > 0:
            shares = [f"{seconds / total:.1%}" for seconds in spent.values()]
            rows.append((run.label, *shares, duration(total)))
    header = ("Run", *(group.capitalize() for group in GROUPS), "In all")
    return Table(header=header, rows=tuple(rows), right=frozenset(header[1:]))


def _interruption_table(found: Sequence[tuple[RunReport, Sequence[Interruption]]]) -> Table:
    header = (
        *("Run", "Attempt", "Kind", "Injected", "At step", "Notice", "Back", "Steps lost", "RPO"),
        *("RTO", "Notice to durable", "Notice to exit", "Requeue wait"),
    )
    rows = tuple(
        (
            run.label,
            f"{one.job_id}-{one.attempt}",
            one.kind.replace("_", " "),
            str(one.inject.data.get("kind", "yes")) if one.inject else "-",
            _number(one.at_step),
            "yes" if one.notice else "no",
            "yes" if one.recovered else "no",
            _number(one.steps_lost),
            *map(duration, (one.rpo_s, one.rto_s, one.notice_to_durable_s, one.notice_to_exit_s)),
            duration(one.requeue_wait_s),
        )
        for run, ones in found
        for one in ones
    )
    text = {"Run", "Attempt", "Kind", "Injected", "Notice", "Back"}
    return Table(header=header, rows=rows, right=frozenset(set(header) - text))


def _moment_table(found: Sequence[tuple[RunReport, Sequence[Interruption]]]) -> Table:
    rows = tuple(
        (run.label, f"{one.job_id}-{one.attempt}", *_offsets(one))
        for run, ones in found
        for one in ones
    )
    header = ("Run", "Attempt", *(name.replace("_", " ").capitalize() for name in MOMENTS))
    return Table(header=header, rows=rows, right=frozenset(header[2:]))


def _offsets(one: Interruption) -> list[str]:
    after_s = {name: seconds for name, _, seconds in since_first(one.moments)}
    return [duration(after_s.get(name)) for name in MOMENTS]


def _attempt_table(
    runs: Sequence[RunReport], found: Sequence[tuple[RunReport, Sequence[Interruption]]]
) -> Table:
    ends = {(run.label, one.job_id, one.attempt): one for run, ones in found for one in ones}
    header = ("Run", "Job", "Attempt", "Ended as", "Submitted", "Waited", "Ran", "GPUs", "Nodes")
    rows = tuple(
        (
            run.label,
            job.job_id,
            str(attempt.index),
            ended_as(attempt, ends.get((run.label, job.job_id, attempt.index))),
            f"{attempt.submit:%Y-%m-%d %H:%M:%S}",
            _length(attempt, attempt.submit, attempt.start),
            _length(attempt, attempt.start, attempt.process_exit),
            _number(attempt.gpus),
            _nodes(attempt.nodes),
        )
        for run in runs
        for job in run.jobs
        for attempt in job.attempts
    )
    return Table(header=header, rows=rows, right=frozenset({"Attempt", "Waited", "Ran", "GPUs"}))


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _length(attempt: Attempt, since: datetime | None, until: datetime | None) -> str:
    if since is None:
        return "-"
    if until is None:
        return "so far" if attempt.kind in {"running", "pending"} else "-"
    return duration((until - since).total_seconds())


def _nodes(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 4 else f"{nodes[0]} to {nodes[-1]} ({len(nodes)})"
