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
from slurmspot.timeline.recovery import Interruption

OPEN = "the gate is open: more of the work may go to spot capacity"
SHUT = "the gate is shut: the spot ratio must not be raised"


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity:
    """What verifying every byte of a run's committed checkpoints has shown.

    Attributes:
        intact: names of those whose every byte is as it was saved.
        damaged: (name, what is wrong) of the others.
        refused: (step, what was wrong) of committed checkpoints that a restore had to pass over.
        unknown: why they could not be verified; empty if they were.
    """

    intact: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one run.

    Attributes:
        period_s: seconds between its periodic checkpoints; None if its spec does not say.
        final: what ``finished.json`` holds; None if the run is not finished.
        interruptions: every attempt that ended before the work was done.
        integrity: of its checkpoints; None if nobody has looked.
        gpu_hours: of all attempts; None if accounting does not say.
        bill: what it cost: the baseline on demand, the others on spot.
    """

    label: str
    period_s: float | None
    final: Mapping[str, Any] | None
    interruptions: tuple[Interruption, ...]
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
        _finding(baseline, "integrity", _integrity(baseline.integrity)),
    ]
    for run in spot:
        found += [
            _finding(run, "finished", _finished(run)),
            _finding(run, "recovered", _recovered(run)),
            _finding(run, "integrity", _integrity(run.integrity)),
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
    return True, "nothing interrupted it"


def _recovered(run: Evidence) -> _Answer:
    if not run.interruptions:
        return False, "nothing interrupted it, so it shows nothing"
    for one in run.interruptions:
        if not one.recovered:
            return False, f"it did not come back from {one.kind} at step {one.at_step}"
    return True, "; ".join([f"interrupted {_times(len(run.interruptions))}", *_worst(run)])


def _worst(run: Evidence) -> Iterator[str]:
    """What the worst interruption cost, as far as the log tells."""
    lost = values(run, lambda one: one.steps_lost)
    rpo, rto = (values(run, of) for of in (lambda one: one.rpo_s, lambda one: one.rto_s))
    if lost:
        yield f"at most {max(lost):.0f} steps lost"
    if rpo:
        yield f"RPO at most {duration(max(rpo))}"
    if rto:
        yield f"RTO at most {duration(max(rto))}"


def values(run: Evidence, of: Callable[[Interruption], float | None]) -> list[float]:
    """One number of each interruption, where it is known."""
    return [value for one in run.interruptions if (value := of(one)) is not None]


def _integrity(found: Integrity | None) -> _Answer:
    if found is None or found.unknown:
        return False, f"cannot be verified: {found.unknown if found else 'nobody has looked'}"
    if found.damaged:
        name, problem = found.damaged[0]
        return False, f"{_checkpoints(found.damaged)} damaged; {name}: {problem}"
    if found.refused:
        step, problem = found.refused[0]
        return False, f"a restore had to pass over step {step}: {problem}"
    if not found.intact:
        return False, "there is no checkpoint to verify"
    return True, f"{_checkpoints(found.intact)}, every byte as it was saved"


def _as_good(run: Evidence, baseline: Evidence, terms: Terms) -> _Answer:
    if run.final is None or baseline.final is None:
        return False, "there are not two final states to compare"
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
    rto = values(run, lambda one: one.rto_s)
    final = run.final or {}
    return {
        "run": run.label,
        "period_s": run.period_s,
        "interruptions": len(run.interruptions),
        "recovered": sum(one.recovered for one in run.interruptions),
        "steps_lost": sum(values(run, lambda one: one.steps_lost)),
        "rpo_max_s": max(values(run, lambda one: one.rpo_s), default=None),
        "rto_median_s": median(rto) if rto else None,
        "gpu_hours": run.gpu_hours,
        "cost": float(run.bill.total),
        "currency": run.bill.currency,
        "saving": None if run is baseline else saving(run, baseline),
        "final": final.get(terms.metric),
        "digest": final.get("digest"),
    }
