"""What a run cost, term by term, and what spot capacity saved.

Money is added up exactly and rounded once: the terms of a bill are whole cents whose sum is the
total, so that nothing is lost between the lines (largest remainder).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

from slurmspot.cost.prices import Prices
from slurmspot.cost.usage import TERMS, Usage
from slurmspot.errors import UsageError
from slurmspot.timeline.attempts import Attempt
from slurmspot.timeline.records import COMMAND

_CENT = Decimal("0.01")
_HOUR_S = Decimal(3600)
_MONTH_DAYS = Decimal(30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What some attempts cost.

    Attributes:
        name: of the run, user or partition that it is for.
        exact: what each term of :data:`slurmspot.cost.usage.TERMS` cost, not rounded.
        gpu_hours: by term; waiting holds none.
        waited_h: hours of waiting for capacity, which cost what ``other.waiting_hour`` says.
        listed: all GPU hours at the price on demand; ``useful_listed`` the useful ones.
        paid: all GPU hours at the price that was paid.
        unpriced: GPU hours of types without a price, which are in no amount.
        uncounted: attempts whose GPUs accounting does not say, which are in no amount.
        assumptions: what the figures take for granted, a sentence each.
    """

    name: str
    currency: str
    exact: Mapping[str, Decimal]
    gpu_hours: Mapping[str, float]
    waited_h: float
    listed: Decimal
    useful_listed: Decimal
    paid: Decimal
    unpriced: Mapping[str, float]
    uncounted: int
    assumptions: tuple[str, ...]

    @property
    def amounts(self) -> dict[str, Decimal]:
        """Whole cents by term; their sum is the total."""
        return to_the_cent(self.exact)

    @property
    def total(self) -> Decimal:
        """The whole bill, to the cent."""
        return _rounded(sum(self.exact.values(), Decimal(0)))

    @property
    def on_demand(self) -> Decimal:
        """What the useful GPU hours would have cost on demand, to the cent."""
        return _rounded(self.useful_listed)

    @property
    def nominal(self) -> float | None:
        """The discount of the price list for these GPU hours, as a fraction."""
        return float(1 - self.paid / self.listed) if self.listed else None

    @property
    def saving(self) -> float | None:
        """The effective saving on the useful work; negative where spot ended up dearer."""
        return self.saving_against(self.useful_listed)

    def saving_against(self, on_demand: Decimal) -> float | None:
        """The share saved of what the same work would have cost on demand, or did."""
        return float(1 - sum(self.exact.values()) / on_demand) if on_demand else None


def bill(used: Sequence[Usage], prices: Prices, *, name: str = "") -> Bill:
    """The bill for some attempts."""
    exact = dict.fromkeys(TERMS, Decimal(0))
    hours = dict.fromkeys(TERMS, Decimal(0))
    unpriced: dict[str, Decimal] = {}
    listed = useful_listed = Decimal(0)
    for one in used:
        rate = prices.rate(one.gpu_type, one.partition)
        dear = one.partition in prices.other.on_demand_partitions
        for term, held_h in _held_hours(one):
            hours[term] += held_h
            if rate is None:
                kind = one.gpu_type or "no type"
                unpriced[kind] = unpriced.get(kind, Decimal(0)) + held_h
                continue
            exact[term] += held_h * _decimal(rate.on_demand if dear else rate.spot)
            listed += held_h * _decimal(rate.on_demand)
            useful_listed += held_h * _decimal(rate.on_demand) if term == "useful" else 0
    paid = sum(exact.values(), Decimal(0))
    for one in used:
        for term, amount in _besides(one, prices):
            exact[term] += amount
    return Bill(
        name=name,
        currency=prices.currency,
        exact=exact,
        gpu_hours={term: float(amount) for term, amount in hours.items()},
        waited_h=sum(one.seconds.get("waiting", 0.0) for one in used) / 3600,
        listed=listed,
        useful_listed=useful_listed,
        paid=paid,
        unpriced={kind: float(amount) for kind, amount in sorted(unpriced.items())},
        uncounted=sum(one.gpus is None and _held_s(one) > 0 for one in used),
        assumptions=tuple(_assumptions(used, prices)),
    )


def bills(used: Iterable[Usage], prices: Prices, *, by: str) -> list[Bill]:
    """A bill for each job, user or partition, the dearest first.

    Args:
        by: ``job_id``, ``user`` or ``partition``.
    """
    groups: dict[str, list[Usage]] = {}
    for one in used:
        groups.setdefault(getattr(one, by) or "-", []).append(one)
    found = [bill(group, prices, name=name) for name, group in groups.items()]
    return sorted(found, key=lambda one: one.total, reverse=True)


def to_the_cent(exact: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """Amounts in whole cents whose sum is the rounded sum of the exact ones.

    Each is off by less than a cent: the cents that rounding down leaves over go to the amounts
    that lost most by it (largest remainder).
    """
    total = _rounded(sum(exact.values(), Decimal(0)))
    amounts = {name: value.quantize(_CENT, ROUND_FLOOR) for name, value in exact.items()}
    spare = int((total - sum(amounts.values(), Decimal(0))) / _CENT)
    for name in sorted(exact, key=lambda name: amounts[name] - exact[name])[:spare]:
        amounts[name] += _CENT
    return amounts


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
    """The share of the money saved by spot, for the same work, by the main rate.

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
    rate = prices.main
    return 1 - spot_gpu_hours * rate.spot / (baseline_gpu_hours * rate.on_demand)


def _rounded(value: Decimal) -> Decimal:
    return value.quantize(_CENT, ROUND_HALF_EVEN)


def _decimal(value: float) -> Decimal:
    return Decimal(str(value))


def _held_s(one: Usage) -> float:
    return sum(seconds for term, seconds in one.seconds.items() if term != "waiting")


def _held_hours(one: Usage) -> Iterator[tuple[str, Decimal]]:
    """GPU hours by term, of the terms that hold any."""
    for term, seconds in one.seconds.items():
        if term != "waiting" and seconds and one.gpus:
            yield term, _decimal(seconds) / _HOUR_S * one.gpus


def _besides(one: Usage, prices: Prices) -> Iterator[tuple[str, Decimal]]:
    """What there is to pay besides GPUs."""
    other = prices.other
    months = _decimal(other.keep_days) / _MONTH_DAYS
    kept = _decimal(one.written_gib) * _decimal(other.storage_gib_month) * months
    moved = _decimal(one.written_gib + one.read_gib) * _decimal(other.egress_gib)
    waited_h = _decimal(one.seconds.get("waiting", 0.0)) / _HOUR_S
    by_hand_h = one.failures * _decimal(other.manual_hours_per_failure)
    yield "checkpoint", kept + moved
    yield "waiting", waited_h * _decimal(other.waiting_hour)
    yield "failures", by_hand_h * _decimal(other.manual_hour)


def _assumptions(used: Sequence[Usage], prices: Prices) -> Iterator[str]:
    money, other = prices.currency, prices.other
    for kind, rate in prices.rates.items():
        yield (
            f"One hour of {f'a GPU of type {kind}' if kind else 'a GPU'} costs "
            f"{rate.on_demand:.2f} {money} on demand and {rate.spot:.2f} {money} on spot, "
            f"as of {rate.as_of}."
        )
    if prices.note:
        yield f"About the prices: {prices.note}."
    if prices.example:
        yield "These prices are made up as an example; give your own with --prices."
    yield (
        "GPUs are paid for from the start of each attempt until its last process was gone, "
        "whatever they did."
    )
    yield (
        f"A GiB of checkpoint costs {other.storage_gib_month:g} {money} a month, is kept for "
        f"{other.keep_days:g} days, and costs {other.egress_gib:g} {money} each time it is moved."
    )
    yield (
        f"An hour of waiting for capacity is worth {other.waiting_hour:g} {money}. What a run did "
        f"not come back from by itself takes a person {other.manual_hours_per_failure:g} h at "
        f"{other.manual_hour:g} {money}."
    )
    if other.on_demand_partitions:
        yield f"Billed on demand: partition {', '.join(other.on_demand_partitions)}; the rest spot."
    blind = sum(not one.logged and _held_s(one) > 0 for one in used)
    if blind:
        yield (
            f"{blind} attempt{'s' * (blind > 1)} left no event log: all their running time counts "
            "as useful, so that what was lost or repeated in them is not seen."
        )
