"""Bills as tables, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from slurmspot.cost.bill import Bill
from slurmspot.cost.usage import TERMS
from slurmspot.report.document import Fall, Table

TITLES = {
    "useful": "Useful work",
    "running": "Running",
    "checkpoint": "Checkpoints",
    "repeated": "Repeated",
    "waiting": "Waiting",
    "failures": "Failures",
}
"""What each term is called."""


def bill_table(found: Sequence[Bill], what: str) -> Table:
    """One row a bill: its terms, their sum, and the discounts. ``what`` heads the names."""
    numbers = (*(TITLES[term] for term in TERMS), "Total", "On demand", "Nominal", "Effective")
    rows = tuple(
        (
            one.name,
            *(f"{one.amounts[term]:,.2f}" for term in TERMS),
            f"{one.total:,.2f}",
            "-" if one.on_demand is None else f"{one.on_demand:,.2f}",
            percent(one.nominal),
            percent(one.saving),
        )
        for one in found
    )
    return Table(header=(what, *numbers), rows=rows, right=frozenset(numbers))


def percent(share: float | None) -> str:
    """A share to read, or a dash."""
    return "-" if share is None else f"{share:.1%}"


def unpriced(found: Sequence[Bill]) -> dict[str, float]:
    """GPU hours that no bill counts, by type of GPU."""
    hours: dict[str, float] = {}
    for one in found:
        for kind, amount in one.unpriced.items():
            hours[kind] = hours.get(kind, 0.0) + amount
    return hours


def falls(one: Bill) -> tuple[Fall, ...]:
    """From the nominal saving on the useful work, term by term, to the effective saving."""
    if one.on_demand is None or one.nominal is None:
        return ()
    left = float(1 - one.amounts["useful"] / one.on_demand)
    found = [Fall(name="Nominal saving", before=0.0, after=left, amount="")]
    for term in TERMS[1:]:
        share = float(one.amounts[term] / one.on_demand)
        amount = f"{one.amounts[term]:,.2f} {one.currency}"
        found.append(Fall(name=TITLES[term], before=left, after=left - share, amount=amount))
        left -= share
    amount = f"{one.on_demand - one.total:,.2f} {one.currency}"
    return (*found, Fall(name="Effective saving", before=0.0, after=left, amount=amount))
