"""What an hour of a GPU costs, and what else there is to pay, from a small TOML file.

::

    as_of = 2026-01-01          # the date the prices were taken
    currency = "USD"
    note = "who says so"        # optional

    [gpu_hour]                  # any GPU that no type below names; may be left out if one does
    on_demand = 3.00
    spot = 0.90

    [type.h100]                 # as AllocTRES names it; any number of them
    on_demand = 4.10
    spot = 1.30
    as_of = 2026-02-01          # optional
    partitions = ["h100"]       # optional: where AllocTRES does not name the type

    [other]                     # all optional, see Other
    storage_gib_month = 0.023
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from slurmspot.errors import NotFoundError, UsageError

ANY = ""
"""The type of a GPU that has no price of its own."""


class _BadEntryError(Exception):
    """What is wrong with an entry of a price file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The price of one GPU for one hour.

    Attributes:
        on_demand: above 0.
        spot: not negative.
        partitions: whose GPUs are of this type, where accounting does not say.
    """

    on_demand: float
    spot: float
    as_of: date
    partitions: tuple[str, ...] = ()

    @property
    def discount(self) -> float:
        """The nominal discount of spot, as a fraction: 0.7 means that it costs 30 %."""
        return 1 - self.spot / self.on_demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """Prices of what is not a GPU; what is not given is free.

    Attributes:
        storage_gib_month: remote checkpoints, for each GiB and 30 days.
        egress_gib: each GiB of a checkpoint that crosses the cloud's border.
        waiting_hour: what an hour of waiting for capacity is worth.
        manual_hour: an hour of a person.
        manual_hours_per_failure: spent on an interruption that the run did not come back from.
        keep_days: how long a checkpoint is kept, on average.
        on_demand_partitions: whose jobs are billed on demand; all others are spot.
    """

    storage_gib_month: float = 0.0
    egress_gib: float = 0.0
    waiting_hour: float = 0.0
    manual_hour: float = 0.0
    manual_hours_per_failure: float = 0.0
    keep_days: float = 0.0
    on_demand_partitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A list of prices.

    Attributes:
        rates: by type of GPU; :data:`ANY` is the price of those that have none of their own.
        as_of: the day they were taken.
        note: where they come from.
        example: they are the ones this package ships, not the user's.
    """

    rates: Mapping[str, Rate]
    currency: str
    as_of: date
    note: str = ""
    other: Other = field(default_factory=Other)
    example: bool = False

    @property
    def main(self) -> Rate:
        """The rate to name first: of any GPU, or of the first type listed."""
        return self.rates.get(ANY) or next(iter(self.rates.values()))

    @property
    def discount(self) -> float:
        """The nominal discount of the main rate."""
        return self.main.discount

    def rate(self, gpu_type: str, partition: str) -> Rate | None:
        """The rate of a GPU by its type, else by the partition it was in; None if it has none."""
        if gpu_type and gpu_type in self.rates:
            return self.rates[gpu_type]
        listed = (rate for rate in self.rates.values() if partition in rate.partitions)
        return next(listed, None) or self.rates.get(ANY)


def load_prices(path: Path | None = None) -> Prices:
    """The prices in the file at ``path``, or the examples that come with this package.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it is not a price file; the message says what is wrong.
    """
    if path is None:
        shipped = resources.files("slurmspot.cost") / "prices.toml"
        return _read(shipped.read_text(), "the example prices", example=True)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise NotFoundError(f"there is no price file {path}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"the price file {path} cannot be read", why=str(error)) from None
    return _read(text, str(path), example=False)


def _read(text: str, where: str, *, example: bool) -> Prices:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _bad(where, f"it is not TOML: {error}") from None
    try:
        return _prices(found, example=example)
    except _BadEntryError as error:
        raise _bad(where, str(error)) from None


def _prices(found: dict[str, Any], *, example: bool) -> Prices:
    as_of, currency = found.get("as_of"), found.get("currency")
    if not isinstance(as_of, date):
        raise _BadEntryError("as_of is not a date such as 2026-01-01")
    if not isinstance(currency, str) or not currency:
        raise _BadEntryError('currency is not a name such as "USD"')
    types = _table(found, "type")
    tables = {f"type.{name}": _table(types, name) for name in types}
    if "gpu_hour" in found:
        tables = {"gpu_hour": _table(found, "gpu_hour"), **tables}
    if not tables:
        raise _BadEntryError("it has no table [gpu_hour] and no [type.NAME]")
    _known("", found, {"as_of", "currency", "note", "gpu_hour", "type", "other"})
    return Prices(
        rates={
            name.removeprefix("type.") if name != "gpu_hour" else ANY: _rate(name, table, as_of)
            for name, table in tables.items()
        },
        currency=currency,
        as_of=as_of,
        note=str(found.get("note", "")),
        other=_other(_table(found, "other")),
        example=example,
    )


def _rate(name: str, table: dict[str, Any], as_of: date) -> Rate:
    _known(f"{name}.", table, {"on_demand", "spot", "as_of", "partitions"})
    on_demand, spot = (_number(f"{name}.{kind}", table.get(kind)) for kind in ("on_demand", "spot"))
    if on_demand == 0:
        raise _BadEntryError(f"{name}.on_demand is 0, so that no saving can be told")
    own = table.get("as_of", as_of)
    if not isinstance(own, date):
        raise _BadEntryError(f"{name}.as_of is not a date such as 2026-01-01")
    partitions = _names(f"{name}.partitions", table.get("partitions", []))
    return Rate(on_demand=on_demand, spot=spot, as_of=own, partitions=partitions)


def _other(table: dict[str, Any]) -> Other:
    _known("other.", table, {item.name for item in fields(Other)})
    partitions = _names("other.on_demand_partitions", table.pop("on_demand_partitions", []))
    numbers: dict[str, Any] = {
        name: _number(f"other.{name}", value) for name, value in table.items()
    }
    return replace(Other(**numbers), on_demand_partitions=partitions)


def _table(found: dict[str, Any], name: str) -> dict[str, Any]:
    table = found.get(name, {})
    if not isinstance(table, dict):
        raise _BadEntryError(f"{name} is not a table")
    return table


def _known(prefix: str, table: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(f"{prefix}{name}" for name in table.keys() - known)
    if unknown:
        raise _BadEntryError(f"it holds unknown entries: {', '.join(unknown)}")


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _BadEntryError(f"{name} is not a list of names")
    return tuple(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadEntryError(f"{name} is {'missing' if value is None else 'not a number'}")
    if not math.isfinite(value) or value < 0:
        raise _BadEntryError(f"{name} is {value}, which is no price")
    return float(value)


def _bad(where: str, why: str) -> UsageError:
    return UsageError(
        f"{where} cannot be used as a price file",
        why=why,
        fix='write as_of = 2026-01-01, currency = "USD", and [gpu_hour] with on_demand and spot',
    )
