"""Bills as tables, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

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


def bill_table(found: Sequence[Bill], what: str, *, on_demand: Decimal | None = None) -> Table:
    """One row a bill: its terms, their sum, and the discounts.

    Args:
        what: heads the names.
        on_demand: what the same work cost on demand; default: the useful work of each.
    """
    numbers = (*(TITLES[term] for term in TERMS), "Total", "On demand", "Nominal", "Effective")
    rows = tuple(
        (
            one.name,
            *(f"{one.amounts[term]:,.2f}" for term in TERMS),
            f"{one.total:,.2f}",
            f"{on_demand or one.on_demand:,.2f}",
            percent(one.nominal),
            percent(one.saving_against(on_demand or one.useful_listed)),
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


def falls(whole: Bill, baseline: Bill | None = None) -> tuple[Fall, ...]:
    """From the nominal saving, term by term, to the effective saving.

    Args:
        baseline: the bill, at the price of spot, of the run to compare with: then a term counts as
            far as it is more than the baseline's. Without one, only the useful work counts as what
            would have been paid for on demand.
    """
    reference = baseline.listed if baseline else whole.useful_listed
    if not reference:
        return ()
    usual = dict.fromkeys(TERMS, Decimal(0)) | (
        dict(baseline.exact) if baseline else {"useful": whole.exact["useful"]}
    )
    left = 1 - sum(usual.values()) / reference
    found = [Fall(name="Nominal saving", before=0.0, after=float(left), amount="")]
    for term in TERMS:
        more = whole.exact[term] - usual[term]
        if more or term != "useful":
            after = left - more / reference
            amount = f"{more:z,.2f} {whole.currency}"
            found.append(
                Fall(name=TITLES[term], before=float(left), after=float(after), amount=amount)
            )
            left = after
    return (*found, Fall(name="Effective saving", before=0.0, after=float(left), amount=""))


def missing_prices(hours: Mapping[str, float]) -> list[str]:
    """What to say of GPU hours without a price, a text for each type."""
    return [
        f"there is no price for GPUs of {'no type' if kind == 'no type' else f'type {kind}'}: "
        f"{amount:,.2f} GPU hours are in no bill\n"
        f"  do:  add [{'gpu_hour' if kind == 'no type' else f'type.{kind}'}] to the prices"
        for kind, amount in hours.items()
    ]
