"""Whether spot runs were as good as their baseline, and may carry more of the work.

The gate on the spot ratio fails closed: what cannot be shown does not hold, and one thing that does
not hold keeps it shut. Pure; :mod:`slurmspot.study.evidence` collects what is judged here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import median
from typing import Any, TypeGuard

from slurmspot.cost.bill import Bill
from slurmspot.errors import UsageError
from slurmspot.report.table import duration
from slurmspot.timeline.recovery import WANTED, Interruption

OPEN = "the gate is open: more of the work may go to spot capacity"
SHUT = "the gate is shut: the spot ratio must not be raised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity:
    """What verifying every byte of a run's committed checkpoints has shown.

    Attributes:
        intact: names of those whose every byte is as it was saved.
        damaged: (name, what is wrong) of the others.
        refused: what was wrong with checkpoints that a restore had to pass over, a sentence each.
        unknown: why they could not be verified; empty if they were.
    """

    intact: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one run.

    Attributes:
        period_s: seconds between its periodic checkpoints; None if its spec does not say.
        final: what ``finished.json`` holds; None if the run is not finished.
        jobs: ids of the Slurm jobs that it took; more than one if somebody began it again.
        attempts: how many of them were started.
        logged: it has an event log, which goes as far as ``final`` says.
        interruptions: every attempt that ended before the work was done.
        drills: why the campaign that was planned for it was not carried out; empty if it was, None
            if none was planned.
        integrity: of its checkpoints; None if nobody has looked.
        gpu_hours: of all attempts; None if accounting does not say.
        bill: what it cost: in partitions of the baseline on demand, elsewhere on spot.
    """

    label: str
    period_s: float | None
    final: Mapping[str, Any] | None
    jobs: tuple[str, ...]
    attempts: int
    logged: bool
    interruptions: tuple[Interruption, ...]
    drills: str | None = None
    integrity: Integrity | None = None
    gpu_hours: float | None
    bill: Bill


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is accepted as good.

    Attributes:
        metric: the value of the last ``run.log`` to compare where final states differ; less is
            better.
        tolerance: how much worse it may be, as a share of the baseline's.
    """

    metric: str = "loss"
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"tolerance={self.tolerance} is no share of a {self.metric}")
        if self.metric in {"step", "digest"}:
            raise UsageError(f"{self.metric} is no metric", fix="name a value that run.log() took")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that must hold of one run, whether it does, and what shows it."""

    run: str
    check: str
    holds: bool
    shown: str


def judge(baseline: Evidence, spot: Sequence[Evidence], terms: Terms) -> list[Finding]:
    """Everything that must hold for the gate to open, the baseline's first.

    Raises:
        UsageError: there is no spot run to judge.
    """
    if not spot:
        raise UsageError("there is no spot run to judge", fix="name at least one beside --baseline")
    found = [
        _finding(baseline, "finished", _finished(baseline)),
        _finding(baseline, "undisturbed", _undisturbed(baseline)),
        _finding(baseline, "integrity", _integrity(baseline)),
    ]
    for run in spot:
        found += [
            _finding(run, "finished", _finished(run)),
            _finding(run, "recovered", _recovered(run)),
            _finding(run, "integrity", _integrity(run)),
            _finding(run, "as good", _as_good(run, baseline, terms)),
            _finding(run, "saves", _saves(run, baseline)),
        ]
    return found


def is_open(findings: Sequence[Finding]) -> bool:
    """Whether the spot ratio may be raised."""
    return bool(findings) and all(one.holds for one in findings)


def saving(run: Evidence, baseline: Evidence) -> float | None:
    """The share of what the baseline cost that ``run`` has saved; None if unknown.

    Only GPU hours that are all counted and priced make a saving.
    """
    bills = (run.bill, baseline.bill)
    if run.final is None or any(one.unpriced or one.uncounted for one in bills):
        return None
    return run.bill.saving_against(sum(baseline.bill.exact.values(), Decimal(0)))


_Answer = tuple[bool, str]


def _finding(run: Evidence, check: str, answer: _Answer) -> Finding:
    return Finding(run=run.label, check=check, holds=answer[0], shown=answer[1])


def _finished(run: Evidence) -> _Answer:
    if run.final is None:
        return False, "it is not finished"
    return True, f"finished at step {run.final.get('step', '?')}"


def _undisturbed(run: Evidence) -> _Answer:
    if count := len(run.interruptions):
        return False, f"it was interrupted {_times(count)}, so it is no baseline"
    if run.attempts > 1:
        return False, f"it took {run.attempts} attempts, so that its cost is no baseline's"
    return True, "nothing interrupted it"


def _recovered(run: Evidence) -> _Answer:
    if run.drills:
        return False, run.drills
    if len(run.jobs) > 1:
        return False, f"it did not come back by itself: it took jobs {', '.join(run.jobs)}"
    taken = [one for one in run.interruptions if one.kind not in WANTED]
    if not taken:
        return False, "its capacity was never taken away, so it shows nothing"
    for one in run.interruptions:
        if not one.recovered:
            return False, f"it did not come back from {one.kind} at step {one.at_step}"
    if _lost(run) is None:
        return False, "its event log does not tell what was lost"
    return True, "; ".join([f"interrupted {_times(len(run.interruptions))}", *_worst(run)])


def _lost(run: Evidence) -> list[int] | None:
    """Steps that each interruption has cost; None if that of one is not known."""
    lost = [0 if one.at_step is None else one.steps_lost for one in run.interruptions]
    known = [steps for steps in lost if steps is not None]
    return known if run.logged and len(known) == len(lost) else None


def _worst(run: Evidence) -> Iterator[str]:
    """What the worst interruption cost, as far as the log tells."""
    lost = _lost(run)
    rpo, rto = (_values(run, of) for of in (lambda one: one.rpo_s, lambda one: one.rto_s))
    if lost:
        yield f"at most {max(lost)} steps lost"
    if rpo:
        yield f"RPO at most {duration(max(rpo))}"
    if rto:
        yield f"RTO at most {duration(max(rto))}"


def _values(run: Evidence, of: Callable[[Interruption], float | None]) -> list[float]:
    """One number of each interruption, where it is known."""
    return [value for one in run.interruptions if (value := of(one)) is not None]


def _integrity(run: Evidence) -> _Answer:
    found = run.integrity
    if found is None or found.unknown:
        return False, f"cannot be verified: {found.unknown if found else 'nobody has looked'}"
    if found.damaged:
        name, problem = found.damaged[0]
        return False, f"{_checkpoints(found.damaged)} damaged; {name}: {problem}"
    if found.refused:
        return False, f"a restore had to pass over a checkpoint: {found.refused[0]}"
    last = (run.final or {}).get("step")
    if not isinstance(last, int) or f"step-{last:08d}" not in found.intact:
        return False, f"the checkpoint of its last step, {last}, is not among the intact ones"
    return True, f"{_checkpoints(found.intact)}, every byte as it was saved"


def _as_good(run: Evidence, baseline: Evidence, terms: Terms) -> _Answer:
    if run.final is None or baseline.final is None:
        return False, "there are not two final states to compare"
    steps = (run.final.get("step"), baseline.final.get("step"))
    if steps[0] != steps[1]:
        return False, f"it made {steps[0]} steps, and the baseline {steps[1]}"
    digests = (run.final.get("digest"), baseline.final.get("digest"))
    if digests[0] and digests[0] == digests[1]:
        return True, "ends in the baseline's state, bit for bit"
    mine, other = (final.get(terms.metric) for final in (run.final, baseline.final))
    if not _is_number(mine) or not _is_number(other):
        return False, f"the final states differ, and not both runs logged a {terms.metric}"
    worse = mine - other
    share = worse / abs(other) if other else math.copysign(math.inf, worse) if worse else 0.0
    shown = f"{terms.metric} {mine:.4g}, the baseline's is {other:.4g}: {share:+.2%}"
    return share <= terms.tolerance, f"{shown}, and {terms.tolerance:.2%} is accepted"


def _saves(run: Evidence, baseline: Evidence) -> _Answer:
    if not run.gpu_hours or not baseline.gpu_hours:
        return False, "accounting does not tell the GPU hours of both runs"
    share = saving(run, baseline)
    if share is None:
        return False, "not all GPU hours of both runs are known and have a price"
    if share <= 0:
        return False, f"it costs {-share:.0%} more than the baseline on demand"
    return True, f"it costs {share:.0%} less than the baseline on demand"


def _checkpoints(names: Sequence[object]) -> str:
    return f"{len(names)} checkpoint{'s' * (len(names) != 1)}"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def row(run: Evidence, baseline: Evidence, terms: Terms) -> dict[str, Any]:
    """One run in numbers: seconds, steps, GPU hours; None where something is not known."""
    rto, lost = _values(run, lambda one: one.rto_s), _lost(run)
    final = run.final or {}
    value = final.get(terms.metric)
    return {
        "run": run.label,
        "period_s": run.period_s,
        "interruptions": len(run.interruptions),
        "recovered": sum(one.recovered for one in run.interruptions),
        "steps_lost": None if lost is None else sum(lost),
        "rpo_max_s": max(_values(run, lambda one: one.rpo_s), default=None),
        "rto_median_s": median(rto) if rto else None,
        "gpu_hours": run.gpu_hours,
        "cost": float(run.bill.total),
        "currency": run.bill.currency,
        "saving": None if run is baseline else saving(run, baseline),
        "final": value if _is_number(value) else None,
        "digest": final.get("digest"),
    }
