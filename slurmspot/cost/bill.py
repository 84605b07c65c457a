"""GPU hours used, and what spot capacity saved."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from slurmspot.cost.prices import Prices
from slurmspot.errors import UsageError
from slurmspot.timeline.attempts import Attempt
from slurmspot.timeline.records import COMMAND


def gpu_hours(attempts: Iterable[Attempt], *, now: datetime | None = None) -> float:
    """GPUs times the hours they were held, from each start until the processes were gone.

    Args:
        now: counts attempts that still run up to here; without it they count nothing.

    Raises:
        UsageError: sacct was not asked how many GPUs an attempt had.
    """
    total_s = 0.0
    for attempt in attempts:
        until = attempt.process_exit or now
        if attempt.start is None or until is None:
            continue
        if attempt.gpus is None:
            raise UsageError(
                "the accounts do not say how many GPUs were used",
                why="they were saved without the field AllocTRES",
                fix=f"save them again: {COMMAND}",
            )
        total_s += attempt.gpus * max(0.0, (until - attempt.start).total_seconds())
    return total_s / 3600


def savings(baseline_gpu_hours: float, spot_gpu_hours: float, prices: Prices) -> float:
    """The share of the money saved by spot, for the same work.

    Lost steps, restarts and checkpoints cost GPU hours, so that this is less than the nominal
    discount; it is negative where spot ended up dearer.

    Args:
        baseline_gpu_hours: what the uninterrupted run used, at the price of on-demand capacity.
        spot_gpu_hours: what the spot run used in all its attempts.

    Raises:
        ValueError: the baseline used no GPU hours.
    """
    if baseline_gpu_hours <= 0:
        raise ValueError("a baseline without GPU hours saves nothing")
    paid = spot_gpu_hours * prices.spot
    return 1 - paid / (baseline_gpu_hours * prices.on_demand)
