"""How often to checkpoint: what a period is expected to waste, and the period that wastes least.

For μ the mean time between interruptions, δ the stall of a checkpoint, L the time from a snapshot
until it is durable, R a restart, C a save on notice, s the wait for the step it is taken at, W the
window of a notice, r the share of interruptions with a notice and p the share of notices that come
true; r' = r if C + s ≤ W, else 0::

    w(T) = δ/T + (1/μ)·[(1-r')(T/2 + L) + r'(C+s) + r'((1-p)/p)·C + R]    a second of useful work
    T*   = sqrt(2·μ·δ / (1-r'))                                           where w is least
    w/(1+w)                                                               share of wall time

At r' = 0 and L = 0 this is the first-order rule of J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974, and of J. T. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", FGCS 22(3), 2006. The terms for notices and for L
follow in the same way. It holds while T, L and R are short against μ: an interruption that comes
during a restart is not in it. :mod:`slurmspot.cost.simulate` has those.

T* depends on the stall and not on L: L only bounds how close checkpoints may follow one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from slurmspot.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What decides how much spot capacity wastes; lengths of time in seconds.

    Attributes:
        mtbi_s: mean time between interruptions while capacity is held, above 0.
        stall_s: what training waits for one periodic checkpoint.
        durable_s: from then until this checkpoint is durable.
        restart_s: from an interruption until training goes on: detect, wait, start, load.
        wait_s: the part of a restart in which no GPU is held: backoff and queue.
        step_s: one training step, above 0.
        notice_share: share of interruptions that are announced.
        precision: share of notices that an interruption follows, above 0.
        window_s: what a notice leaves.
        notice_save_s: from the agreed step until the checkpoint taken on notice is durable.

    Raises:
        UsageError: one of them is out of its range; the message says which.
    """

    mtbi_s: float
    stall_s: float
    durable_s: float
    restart_s: float
    step_s: float
    wait_s: float = 0.0
    notice_share: float = 0.0
    precision: float = 1.0
    window_s: float = 0.0
    notice_save_s: float = 0.0

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name))
        if self.wait_s > self.restart_s:
            raise UsageError(
                f"a restart of {self.restart_s:g} s cannot hold a wait of {self.wait_s:g} s",
                fix="restart_s is the whole of it, wait_s the part in which no GPU is held",
            )

    @property
    def boundary_s(self) -> float:
        """The longest wait for the step that a notice is saved at.

        Ranks put in their wish at the first boundary and read the answer at the second: see
        :mod:`slurmspot.job.agreement`.
        """
        return 2 * self.step_s

    @property
    def saved_share(self) -> float:
        """The share of interruptions that lose nothing, r': a save on notice fits its window."""
        fits = self.notice_save_s + self.boundary_s <= self.window_s
        return self.notice_share if fits else 0.0

    @property
    def false_notices(self) -> float:
        """Notices that are saved at and come to nothing, for each interruption."""
        return self.saved_share * (1 - self.precision) / self.precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The period to choose.

    Attributes:
        seconds: of training between two checkpoints.
        bound: what set it: ``formula``, ``durable`` (no checkpoint before the last is durable),
            ``step`` (none within a step), ``rpo`` (the loss allowed) or ``work`` (all of it).
    """

    seconds: float
    bound: str


def waste(conditions: Conditions, period_s: float) -> float:
    """Expected seconds wasted for each second of useful work, w(T).

    Args:
        period_s: T, above 0; if checkpoints cannot follow so close, see :func:`kept_period_s`.
    """
    c = conditions
    interruption_s = (
        loss_s(c, period_s)
        + c.saved_share * (c.notice_save_s + c.boundary_s)
        + c.false_notices * c.notice_save_s
        + c.restart_s
    )
    return c.stall_s / period_s + interruption_s / c.mtbi_s


def wasted_share(conditions: Conditions, period_s: float) -> float:
    """The share of wall time that is expected to be wasted, w/(1+w)."""
    wasted = waste(conditions, period_s)
    return wasted / (1 + wasted)


def loss_s(conditions: Conditions, period_s: float) -> float:
    """Seconds of training that an interruption is expected to undo: those of (1-r')(T/2 + L)."""
    return (1 - conditions.saved_share) * (period_s / 2 + conditions.durable_s)


def worst_loss_s(conditions: Conditions, period_s: float) -> float:
    """Seconds of training that an interruption without notice can undo, T + L.

    It comes just before the next checkpoint would have been durable.
    """
    return period_s + conditions.durable_s


def optimum_s(conditions: Conditions) -> float:
    """The period T* at which w(T) is least, without any bound: infinite at r' = 1."""
    unannounced = 1 - conditions.saved_share
    if not unannounced:
        return math.inf
    return math.sqrt(2 * conditions.mtbi_s * conditions.stall_s / unannounced)


def best_period(conditions: Conditions, *, useful_s: float, rpo_s: float | None = None) -> Period:
    """T* within its bounds.

    Args:
        useful_s: the work; no period is longer.
        rpo_s: training that may be lost at worst. The bounds from below come first: where they
            are above it, :func:`worst_loss_s` of the answer is too.
    """
    c = conditions
    found = Period(seconds=optimum_s(c), bound="formula")
    if found.seconds > useful_s:
        found = Period(seconds=useful_s, bound="work")
    if rpo_s is not None and worst_loss_s(c, found.seconds) > rpo_s:
        found = Period(seconds=rpo_s - c.durable_s, bound="rpo")
    for least_s, bound in ((c.durable_s, "durable"), (c.step_s, "step")):
        if found.seconds < least_s:
            found = Period(seconds=least_s, bound=bound)
    return found


def kept_period_s(conditions: Conditions, period_s: float) -> float:
    """The period that is kept where a save is passed by while the one before is not durable."""
    return period_s * max(1, math.ceil(conditions.durable_s / period_s))


def _check(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"{name} is {value:g}", why="it is a finite number, not below 0")
    if name in {"notice_share", "precision"} and value > 1:
        raise UsageError(f"{name} is {value:g}", why="it is a share, from 0 to 1")
    if name in {"mtbi_s", "step_s", "precision"} and not value:
        raise UsageError(f"{name} is 0", why="it has to be above 0")
