"""What is known of a run: its history, its bill, and whether its checkpoints verify.

Nothing here decides; see :mod:`slurmspot.study.acceptance`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from slurmspot.cluster.spec import Spec
from slurmspot.cost.bill import bill, gpu_hours
from slurmspot.cost.prices import Prices
from slurmspot.cost.usage import usages
from slurmspot.errors import SlurmspotError, UsageError
from slurmspot.events import Event
from slurmspot.report.history import History
from slurmspot.runfolder import RunFolder
from slurmspot.study.acceptance import Evidence, Integrity


def of_run(
    folder: RunFolder,
    history: History,
    *,
    label: str,
    prices: Prices,
    on_demand: bool,
    now: datetime,
) -> Evidence:
    """What ``history`` and the folder tell; its checkpoints are not looked at.

    Args:
        on_demand: it ran on capacity at that price, whatever the price list says of its partition.
        now: what still runs is counted up to here.
    """
    jobs = history.timeline.jobs
    if on_demand:
        theirs = {attempt.partition for job in jobs for attempt in job.attempts}
        prices = replace(prices, other=replace(prices.other, on_demand_partitions=tuple(theirs)))
    try:
        used_h = gpu_hours((a for job in jobs for a in job.attempts), now=now)
    except UsageError:
        used_h = None
    return Evidence(
        label=label,
        period_s=_period_s(folder),
        final=_final(folder),
        interruptions=tuple(history.interruptions),
        gpu_hours=used_h,
        bill=bill(usages(jobs, history.events, now=now), prices, name=label),
    )


def with_integrity(
    known: Evidence,
    folder: RunFolder,
    history: History,
    *,
    progress: Callable[[int], None] | None = None,
) -> Evidence:
    """The same, once every byte of every committed checkpoint has been read.

    Args:
        progress: called with the number of bytes just read, by any thread.
    """
    return replace(known, integrity=_integrity(folder, history, progress))


def _integrity(
    folder: RunFolder, history: History, progress: Callable[[int], None] | None
) -> Integrity:
    refused = tuple(_refused(history.events))
    try:
        from slurmspot.checkpoint.verify import verify  # noqa: PLC0415  h5py is an extra

        reports = verify(folder.checkpoints, progress)
    except ModuleNotFoundError as error:
        return Integrity(unknown=f"{error.name} is not installed", refused=refused)
    except SlurmspotError as error:
        return Integrity(unknown=error.why or error.what, refused=refused)
    return Integrity(
        intact=tuple(one.path.name for one in reports if one.intact),
        damaged=tuple((one.path.name, str(one.problems[0])) for one in reports if not one.intact),
        refused=refused,
    )


def _refused(events: tuple[Event, ...]) -> Iterator[tuple[int, str]]:
    """Committed checkpoints that some restore found damaged, each once."""
    told = {
        (item["step"], str(item["problem"]))
        for event in events
        if event.event == "restore_end"
        for item in event.data.get("rejected") or ()
    }
    yield from sorted(told)


def _period_s(folder: RunFolder) -> float | None:
    try:
        return Spec.from_json(folder.spec.read_text()).period_s
    except (OSError, ValueError, KeyError, TypeError, SlurmspotError):
        return None  # a batch script of the user's own


def _final(folder: RunFolder) -> Mapping[str, Any] | None:
    try:
        final = json.loads(folder.finished.read_text())
    except (OSError, ValueError):
        return None
    return final if isinstance(final, dict) else None
