"""Spot runs side by side with their baseline: collected, in a table, on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

from slurmspot.cost.prices import Prices
from slurmspot.report import history
from slurmspot.report.compose import build_document
from slurmspot.report.costs import percent
from slurmspot.report.document import Document
from slurmspot.report.history import History
from slurmspot.report.table import duration, render
from slurmspot.runfolder import RunFolder
from slurmspot.study import evidence
from slurmspot.study.acceptance import Evidence, Finding, Terms, judge, row


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run: where it lies, its history, and what that tells."""

    folder: RunFolder
    history: History
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A baseline and the spot runs that are compared with it."""

    baseline: Compared
    spot: Sequence[Compared]
    prices: Prices

    @classmethod
    def of(
        cls,
        baseline: RunFolder,
        spot: Sequence[RunFolder],
        *,
        prices: Prices,
        sacct_file: Path | None = None,
        tz: tzinfo | None = None,
        drills: Mapping[str, str] | None = None,
    ) -> Comparison:
        """Ask the cluster, or a saved text of sacct, about all runs; no checkpoint is read.

        Args:
            prices: the partitions of the baseline are on demand, whatever the list says of them.
            drills: by name of a run's folder, why its campaign was not carried out.

        Raises:
            NotFoundError, UsageError: the text cannot be used, or knows none of a run's jobs.
            SlurmError: the cluster cannot be asked.
        """
        now = datetime.now().astimezone()
        folders = (baseline, *spot)
        names = [folder.path.name for folder in folders]
        found = [history.of_run(one, sacct_file=sacct_file, tz=tz) for one in folders]
        prices = _on_demand(prices, found[0])
        runs = []
        for folder, known in zip(folders, found, strict=True):
            name = folder.path.name
            told = evidence.of_run(
                folder,
                known,
                label=name if names.count(name) == 1 else str(folder.path),
                prices=prices,
                now=now,
                drills=(drills or {}).get(name),
            )
            runs.append(Compared(folder=folder, history=known, evidence=told))
        return cls(baseline=runs[0], spot=tuple(runs[1:]), prices=prices)

    @property
    def every(self) -> Sequence[Compared]:
        """All runs, the baseline first."""
        return (self.baseline, *self.spot)

    def judged(self, terms: Terms) -> list[Finding]:
        """Verify every byte of all checkpoints, and say what holds."""
        baseline, *spot = (
            evidence.with_integrity(one.evidence, one.folder, one.history) for one in self.every
        )
        return judge(baseline, spot, terms)

    def rows(self, terms: Terms) -> list[dict[str, Any]]:
        """Each run in numbers; see :func:`slurmspot.study.acceptance.row`."""
        return [row(one.evidence, self.baseline.evidence, terms) for one in self.every]

    def document(self) -> Document:
        """The page about all of them."""
        return build_document(
            "Spot runs beside an undisturbed baseline",
            [
                one.history.report(one.evidence.label, baseline=one is self.baseline)
                for one in self.every
            ],
            generated=datetime.now().astimezone(),
            prices=self.prices,
            notes=[note for one in self.every for note in one.history.timeline.notes],
        )


def _on_demand(prices: Prices, baseline: History) -> Prices:
    """The prices, by which every partition that the baseline ran in is on demand."""
    theirs = {a.partition for job in baseline.timeline.jobs for a in job.attempts if a.partition}
    partitions = tuple(sorted({*prices.other.on_demand_partitions, *theirs}))
    return replace(prices, other=replace(prices.other, on_demand_partitions=partitions))


def table(rows: Sequence[dict[str, Any]], terms: Terms) -> str:
    """Rows for a terminal."""
    metric = terms.metric.upper()
    costs = ("GPU HOURS", "COST", "SAVING", metric)
    numbers = ("PERIOD", "INTERRUPTED", "BACK", "STEPS LOST", "RPO", "RTO", *costs)
    cells = [
        (
            one["run"],
            duration(one["period_s"]),
            str(one["interruptions"]),
            str(one["recovered"]),
            "-" if one["steps_lost"] is None else str(one["steps_lost"]),
            duration(one["rpo_max_s"]),
            duration(one["rto_median_s"]),
            "-" if one["gpu_hours"] is None else f"{one['gpu_hours']:.3g}",
            f"{one['cost']:.2f} {one['currency']}",
            percent(one["saving"]),
            "-" if one["final"] is None else f"{one['final']:.4g}",
            (one["digest"] or "-")[:12],
        )
        for one in rows
    ]
    return render(("RUN", *numbers, "FINAL STATE"), cells, right=numbers)


def verdict(findings: Sequence[Finding]) -> str:
    """Findings for a terminal."""
    cells = [(one.run, one.check, "yes" if one.holds else "NO", one.shown) for one in findings]
    return render(("RUN", "CHECK", "HOLDS", ""), cells)
