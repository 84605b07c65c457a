"""Runs a job on spot capacity many times over, on paper, and says what it takes and costs.

Interruptions are drawn (exponential, :class:`random.Random`) or come from a trace. They come at any
time that capacity is held: while training, during a checkpoint and its way to durable storage, and
during a restart, which then begins again. Between them time is computed, not stepped through.

What is simplified: while a save on notice is made, and its job leaves, no second interruption
comes; a false notice is passed by if an interruption overtakes its save; work before the first
interruption begins with training, as it would on demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from slurmspot.cost.interval import Conditions, kept_period_s, loss_s, wasted_share, worst_loss_s
from slurmspot.cost.prices import Rate

_GIVE_UP = 20  # times the work, of wall time: then a run does not finish
_MOST_INTERRUPTIONS = 100_000  # of one run
_MOST_IN_ALL = 1_000_000  # of all runs of a forecast, once there are enough of these
_ENOUGH_RUNS = 20
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, without their whole part, lie evenly

_After = Callable[[float], float]
"""The first time after this one, seconds since the run began, at which something happens."""


class Outcome(NamedTuple):
    """One run; a tuple, for there are many thousands.

    Attributes:
        wall_s: from its begin to its last checkpoint being durable, or to its being given up.
        waited_s: of these, seconds without capacity.
        lost_s: training that was undone, and done again.
        interruptions: those during a restart too.
        finished: it was not given up, after 20 times the work in wall time.
    """

    wall_s: float
    waited_s: float
    lost_s: float
    interruptions: int
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and mean of many runs, and what 5 % of them are below (``low``) and above (``high``).

    A run that does not finish counts as infinite: so can these be.
    """

    low: float
    median: float
    high: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value, by nearest rank."""
        ordered = sorted(values)
        last = len(ordered) - 1
        low, median, high = (ordered[round(last * share)] for share in (0.05, 0.5, 0.95))
        return cls(low=low, median=median, high=high, mean=sum(ordered) / len(ordered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be done and what it is paid by.

    Attributes:
        useful_s: seconds of training that the job needs, undisturbed.
        gpus: it holds.
        rate: of one of them for an hour.
        waiting_hour: what an hour without capacity is worth, in the same currency.
    """

    useful_s: float
    gpus: int
    rate: Rate
    waiting_hour: float = 0.0

    @property
    def on_demand(self) -> float:
        """What the work alone costs on demand."""
        return self.useful_s / 3600 * self.gpus * self.rate.on_demand

    def cost(self, outcome: Outcome) -> float:
        """What a run costs on spot."""
        waiting = outcome.waited_s / 3600 * self.waiting_hour
        return self.gpu_hours(outcome) * self.rate.spot + waiting

    def saving(self, cost: float) -> float:
        """The share saved of what the work costs on demand."""
        return 1 - cost / self.on_demand

    def gpu_hours(self, outcome: Outcome) -> float:
        """GPU hours that a run holds."""
        return (outcome.wall_s - outcome.waited_s) / 3600 * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a period comes to.

    Attributes:
        kept_period_s: longer than ``period_s`` where a checkpoint is not durable in time.
        expected_share: of wall time wasted, by the formula.
        wasted_share: the same by simulation, of all runs together; 1 where one does not finish.
        expected_loss_s: training that an interruption undoes in the mean, by the formula.
        loss_s: the same by simulation; 0 where there was none.
        worst_loss_s: what one without notice can undo.
        steps_repeated: in one run, in the mean.
        interruptions: of one run, in the mean.
        cost: on spot, in the currency of the prices.
        saving: share of what the work costs on demand; negative where spot is dearer.
        unfinished: of the ``runs``, those given up.
    """

    period_s: float
    kept_period_s: float
    runs: int
    unfinished: int
    expected_share: float
    wasted_share: float
    wall_s: Spread
    gpu_hours: Spread
    interruptions: float
    expected_loss_s: float
    loss_s: float
    worst_loss_s: float
    steps_repeated: float
    cost: Spread
    saving: Spread


def forecast(
    conditions: Conditions,
    work: Work,
    *,
    period_s: float,
    runs: int,
    seed: int = 0,
    trace_s: Sequence[float] = (),
) -> Forecast:
    """What ``runs`` runs with a period come to; arguments as in :func:`simulate`."""
    found = simulate(
        conditions,
        useful_s=work.useful_s,
        period_s=period_s,
        runs=runs,
        seed=seed,
        trace_s=trace_s,
    )
    kept_s = kept_period_s(conditions, period_s)
    hits = sum(one.interruptions for one in found)
    lost_s = sum(one.lost_s for one in found)
    cost = Spread.of([_of_finished(one, work.cost(one)) for one in found])
    wall_s = Spread.of([_of_finished(one, one.wall_s) for one in found])
    return Forecast(
        period_s=period_s,
        kept_period_s=kept_s,
        runs=len(found),
        unfinished=sum(not one.finished for one in found),
        expected_share=wasted_share(conditions, kept_s),
        wasted_share=1 - work.useful_s / wall_s.mean,
        wall_s=wall_s,
        gpu_hours=Spread.of([_of_finished(one, work.gpu_hours(one)) for one in found]),
        interruptions=hits / len(found),
        expected_loss_s=loss_s(conditions, kept_s),
        loss_s=lost_s / hits if hits else 0.0,
        worst_loss_s=worst_loss_s(conditions, kept_s),
        steps_repeated=lost_s / conditions.step_s / len(found),
        cost=cost,
        saving=Spread(
            low=work.saving(cost.high),
            median=work.saving(cost.median),
            high=work.saving(cost.low),
            mean=work.saving(cost.mean),
        ),
    )


def simulate(
    conditions: Conditions,
    *,
    useful_s: float,
    period_s: float,
    runs: int,
    seed: int = 0,
    trace_s: Sequence[float] = (),
) -> list[Outcome]:
    """So many runs of a job; fewer, but 20 at least, where each is interrupted very often.

    Run *k* draws the same interruptions whatever the period is: differences are the period's.

    Args:
        useful_s: seconds of training that it needs, undisturbed, above 0.
        period_s: of training between two checkpoints, above 0.
        trace_s: when capacity is taken, ascending, seconds since the trace began, the last above
            0: instead of drawing. It begins again after the last. The first run begins where it
            does, the others elsewhere in it, evenly spread. Which interruption has a notice is
            drawn all the same.
    """
    kept_s = kept_period_s(conditions, period_s)
    found: list[Outcome] = []
    hits = 0
    for index in range(runs):
        rng = Random(seed * 1_000_003 + index)  # noqa: S311  nothing secret
        interrupted = (
            _in_trace(trace_s, trace_s[-1] * (index * _GOLDEN % 1))
            if trace_s
            else _drawn(conditions.mtbi_s, rng)
        )
        found.append(_run(conditions, useful_s, kept_s, interrupted, rng))
        hits += found[-1].interruptions
        if hits > _MOST_IN_ALL and len(found) >= _ENOUGH_RUNS:
            break
    return found


def _of_finished(outcome: Outcome, value: float) -> float:
    return value if outcome.finished else math.inf


def _drawn(mean_s: float, rng: Random) -> _After:
    """Exponential; infinite means never."""
    if math.isinf(mean_s):
        return lambda _: math.inf
    draw, rate = rng.expovariate, 1 / mean_s
    return lambda time_s: time_s + draw(rate)


def _in_trace(times_s: Sequence[float], start_s: float) -> _After:
    """Those of a trace that is entered at ``start_s``; to be asked for later and later times."""
    index, begun_s = 0, -start_s

    def after(time_s: float) -> float:
        nonlocal index, begun_s
        while begun_s + times_s[index] <= time_s:
            index += 1
            if index == len(times_s):
                index, begun_s = 0, begun_s + times_s[-1]
        return begun_s + times_s[index]

    return after


def _run(
    conditions: Conditions, useful_s: float, period_s: float, interrupted: _After, rng: Random
) -> Outcome:
    """One run. A checkpoint is taken after each period of training and at the end."""
    c, saved_share = conditions, conditions.saved_share
    restart_s = c.restart_s - c.wait_s
    leave_s = c.boundary_s + c.notice_save_s
    cycle_s = period_s + c.stall_s
    warned = _drawn(c.mtbi_s / c.false_notices if c.false_notices else math.inf, rng)
    saved_s = clock_s = waited_s = lost_s = 0.0
    interruptions = 0
    hit_s, alarm_s = interrupted(0.0), warned(0.0)
    most_s = _GIVE_UP * useful_s
    while clock_s <= most_s and interruptions < _MOST_INTERRUPTIONS:
        left_s = useful_s - saved_s
        end_s = clock_s + left_s + math.ceil(left_s / period_s) * c.stall_s + c.durable_s
        alarmed = alarm_s + c.notice_save_s <= hit_s and alarm_s < end_s
        if not alarmed and hit_s >= end_s:
            return Outcome(end_s, waited_s, lost_s, interruptions, finished=True)
        ran_s = (alarm_s if alarmed else hit_s) - clock_s
        cycles, into_s = divmod(ran_s, cycle_s)
        done_s = min(left_s, cycles * period_s + min(into_s, period_s))
        if alarmed:
            saved_s += done_s
            clock_s = alarm_s + c.notice_save_s
            alarm_s = warned(clock_s)
            continue
        if saved_share and rng.random() < saved_share:
            saved_s += done_s
            clock_s = hit_s + leave_s
        else:
            kept_s = max(0.0, (ran_s - c.durable_s) // cycle_s) * period_s
            saved_s += kept_s
            lost_s += done_s - kept_s
            clock_s = hit_s
        again = True
        while again and clock_s <= most_s and interruptions < _MOST_INTERRUPTIONS:
            interruptions += 1
            waited_s += c.wait_s
            clock_s += c.wait_s
            hit_s = interrupted(clock_s)
            again = hit_s < clock_s + restart_s
            clock_s = hit_s if again else clock_s + restart_s
        alarm_s = warned(clock_s)
    return Outcome(clock_s, waited_s, lost_s, interruptions, finished=False)
