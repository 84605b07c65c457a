"""What a report says, apart from how it looks: plain frozen values, made from runs.

Times in a document are seconds since each run's first submission, so that runs of different days
stand on one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from slurmspot.events import Event
from slurmspot.timeline.attempts import Job
from slurmspot.timeline.outages import Outage
from slurmspot.timeline.recovery import Interruption, interruptions

GROUPS = {
    "waiting": ("backoff", "queue"),
    "starting": ("startup", "imports", "setup"),
    "restoring": ("restore",),
    "repeating": ("repeat",),
    "training": ("train", "run"),
    "leaving": ("notice", "snapshot", "save"),
    "ending": ("exit", "teardown", "release"),
}
"""Phases that are told as one: group → names of phases."""

MARKS = {
    "notice": "notice",
    "injection": "injected on purpose",
    "gone": "node gone",
    "commit": "checkpoint durable",
}
"""What is marked on the axis of time: kind → what it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run, as it enters a report.

    Attributes:
        outages: when Slurm took nodes for gone.
        baseline: it was not interrupted, and is what the others are compared with.
    """

    label: str
    jobs: tuple[Job, ...]
    events: tuple[Event, ...] = ()
    outages: tuple[Outage, ...] = ()
    baseline: bool = False

    @property
    def interruptions(self) -> list[Interruption]:
        """Every attempt after which the run was not finished."""
        return interruptions(self.jobs, self.events, self.outages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number to read first: its name, the number, and what it is measured against."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of an attempt on the common axis."""

    name: str
    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment on the common axis; ``kind`` is a key of :data:`MARKS`."""

    kind: str
    at_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One job on the common axis."""

    label: str
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Loss against step, in order of steps."""

    label: str
    points: tuple[tuple[int, float], ...]
    baseline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text. ``right`` names the columns of numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a length of time is spread over the interruptions that have one."""

    name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """One step of the way from the nominal to the effective saving.

    Attributes:
        before: the saving left before it, as a share of the price on demand; ``after`` behind it.
        amount: what it costs, to read.
    """

    name: str
    before: float
    after: float
    amount: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report.

    Attributes:
        lead: what it is about, in a few sentences.
        shares: how the time of each run divides into the groups of phases.
        moments: how each interruption went on, in seconds since the first thing known of it.
        breaks: steps at which a run was interrupted, with the kind.
        spreads: distributions of RPO and RTO.
        parts: the median of each part of the RTO, by kind of interruption.
        falls: from the nominal saving to the effective one; empty without useful work.
        unpriced: GPU hours that no bill counts, by type of GPU, for want of a price.
        costs: the bill of each run; ``assumptions`` says what they take for granted.
        baseline: label of the baseline, if there is one.
        notes: what else a reader should know.
    """

    title: str
    lead: tuple[str, ...]
    generated: datetime
    figures: tuple[Figure, ...]
    lanes: tuple[Lane, ...]
    shares: Table
    curves: tuple[Curve, ...]
    breaks: tuple[tuple[int, str], ...]
    interruptions: Table
    moments: Table
    attempts: Table
    spreads: tuple[Spread, ...]
    parts: Table
    falls: tuple[Fall, ...]
    costs: Table
    unpriced: Mapping[str, float]
    assumptions: tuple[str, ...]
    baseline: str | None
    notes: tuple[str, ...]
