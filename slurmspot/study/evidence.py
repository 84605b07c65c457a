"""What is known of a run: its history, its bill, and whether its checkpoints verify.

Nothing here decides; see :mod:`slurmspot.study.acceptance`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from slurmspot.cluster.spec import Spec
from slurmspot.cost.bill import bill, gpu_hours
from slurmspot.cost.prices import Prices
from slurmspot.cost.usage import usages
from slurmspot.errors import SlurmspotError, UsageError
from slurmspot.events import Event
from slurmspot.report import history
from slurmspot.report.history import History
from slurmspot.runfolder import RunFolder
from slurmspot.study.acceptance import Evidence, Integrity


def of_run(
    folder: RunFolder,
    known: History,
    *,
    label: str,
    prices: Prices,
    now: datetime,
    drills: str | None = None,
) -> Evidence:
    """What its history and the folder tell; its checkpoints are not looked at.

    Args:
        now: what still runs is counted up to here.
        drills: see :class:`~slurmspot.study.acceptance.Evidence`.
    """
    jobs, final = known.timeline.jobs, _final(folder)
    started = [a for job in jobs for a in job.attempts if a.start is not None]
    try:
        used_h = gpu_hours(started, now=now)
    except UsageError:
        used_h = None
    return Evidence(
        label=label,
        period_s=_period_s(folder),
        final=final,
        jobs=tuple(dict.fromkeys(history.base_id(job.job_id) for job in jobs)),
        attempts=len(started),
        logged=any(event.event == "finished" for event in known.events)
        if final is not None
        else bool(known.events),
        interruptions=tuple(known.interruptions),
        drills=drills,
        gpu_hours=used_h,
        bill=bill(usages(jobs, known.events, now=now), prices, name=label),
    )


def with_integrity(told: Evidence, folder: RunFolder, known: History) -> Evidence:
    """The same, once every byte of every committed checkpoint has been read."""
    return replace(told, integrity=_integrity(folder, known))


def _integrity(folder: RunFolder, known: History) -> Integrity:
    refused = tuple(dict.fromkeys(_refused(known.events)))
    try:
        from slurmspot.checkpoint.verify import verify  # noqa: PLC0415  h5py is an extra

        reports = verify(folder.checkpoints)
    except ModuleNotFoundError as error:
        return Integrity(unknown=f"{error.name} is not installed", refused=refused)
    except SlurmspotError as error:
        return Integrity(unknown=error.why or error.what, refused=refused)
    return Integrity(
        intact=tuple(one.path.name for one in reports if one.intact),
        damaged=tuple((one.path.name, str(one.problems[0])) for one in reports if not one.intact),
        refused=refused,
    )


def _refused(events: Iterable[Event]) -> Iterator[str]:
    """What restores found that was not as it had been saved, wherever it lay."""
    for event in events:
        if event.event == "restore_failed":
            yield str(event.data.get("error"))
        elif event.event == "restore_end":
            rejected, passed_over = (
                event.data.get(name) or () for name in ("rejected", "passed_over")
            )
            yield from map(str, rejected)
            yield from (str(one) for one in passed_over if _is_damaged(one))


def _is_damaged(passed_over: object) -> bool:
    """Whether what was passed over is more than incomplete; so is what says nothing of it."""
    return not isinstance(passed_over, dict) or passed_over.get("damaged") is not False


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
