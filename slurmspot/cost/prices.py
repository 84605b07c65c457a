"""What an hour of a GPU costs, from a small TOML file.

::

    as_of = 2026-01-01          # the date the prices were taken
    currency = "USD"
    note = "who says so"        # optional

    [gpu_hour]
    on_demand = 3.00
    spot = 0.90
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from slurmspot.errors import NotFoundError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one GPU for one hour.

    Attributes:
        on_demand: in ``currency``; above 0.
        spot: in ``currency``; not negative.
        as_of: the day they were taken.
        note: where they come from.
        example: they are the ones this package ships, not the user's.
    """

    on_demand: float
    spot: float
    currency: str
    as_of: date
    note: str = ""
    example: bool = False

    @property
    def discount(self) -> float:
        """The nominal discount of spot, as a fraction: 0.7 means that it costs 30 %."""
        return 1 - self.spot / self.on_demand


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
    hour = found.pop("gpu_hour", None)
    if not isinstance(hour, dict):
        raise _bad(where, "it has no table [gpu_hour]")
    unknown = [
        *(found.keys() - {"as_of", "currency", "note"}),
        *(hour.keys() - {"on_demand", "spot"}),
    ]
    if unknown:
        raise _bad(where, f"it holds unknown entries: {', '.join(sorted(unknown))}")
    as_of, currency = found.get("as_of"), found.get("currency")
    if not isinstance(as_of, date):
        raise _bad(where, "as_of is not a date such as 2026-01-01")
    if not isinstance(currency, str) or not currency:
        raise _bad(where, 'currency is not a name such as "USD"')
    on_demand, spot = (_price(hour, kind, where) for kind in ("on_demand", "spot"))
    if on_demand == 0:
        raise _bad(where, "gpu_hour.on_demand is 0, so that no saving can be told")
    return Prices(
        on_demand=on_demand,
        spot=spot,
        currency=currency,
        as_of=as_of,
        note=str(found.get("note", "")),
        example=example,
    )


def _price(hour: dict[str, Any], kind: str, where: str) -> float:
    value = hour.get(kind)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(where, f"gpu_hour.{kind} is {'missing' if value is None else 'not a number'}")
    if not math.isfinite(value) or value < 0:
        raise _bad(where, f"gpu_hour.{kind} is {value}, which is no price")
    return float(value)


def _bad(where: str, why: str) -> UsageError:
    return UsageError(
        f"{where} cannot be used as a price file",
        why=why,
        fix='write as_of = 2026-01-01, currency = "USD", and [gpu_hour] with on_demand and spot',
    )
