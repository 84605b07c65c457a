"""Times as sacct prints them: the cluster's own, to the second, mostly without a zone.

Arithmetic in a zone that changes its offset is wrong by an hour twice a year, so every time gets
the fixed offset that held at that moment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cache

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?|\d{9,}"
"""What a time looks like: ISO 8601, or seconds since 1970 (``SLURM_TIME_FORMAT``)."""

UNKNOWN = frozenset({"", "Unknown", "None", "N/A"})
"""What sacct prints for a time that there is not."""

_TIME = re.compile(TIME)
_LOCAL = len("2026-01-02T03:04:05")
_TEN_MINUTES = len("2026-01-02T03:0")  # no zone has ever changed its offset within ten minutes
_SPAN = re.compile(
    r"(?:(?:(?P<days>\d+)-)?(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)(?:\.\d+)?"
)

_NO_TWO_CHANGES = timedelta(days=7)

_Zones = tuple[timezone, ...]

Moments = tuple[datetime, ...]
"""What a text of time can mean: nothing, one moment, or two in an hour that clocks repeat."""


class Times:
    """Reads times in one zone; knows the offset of every ten minutes it has met.

    Args:
        tz: the cluster's time zone, for times without one; None means this machine's.
    """

    def __init__(self, tz: tzinfo | None = None) -> None:
        self._tz = tz
        self._zones: dict[str, _Zones] = {}

    def read(self, text: str) -> Moments:
        """The moments that ``text`` can mean, the earlier first.

        Raises:
            ValueError, OverflowError, OSError: it is no time.
        """
        zones = self._zones.get(text[:_TEN_MINUTES])
        if zones is None or len(text) != _LOCAL:
            if text in UNKNOWN:
                return ()
            if not _TIME.fullmatch(text):
                raise ValueError(f"{text!r} is no time")
            if text.isdecimal():
                return (datetime.fromtimestamp(int(text), tz=UTC),)
            time = datetime.fromisoformat(text)
            if time.tzinfo is not None:
                return (time,)
            zones = self._zones[text[:_TEN_MINUTES]] = self._at(time)
        time = datetime.fromisoformat(text)
        first = time.replace(tzinfo=zones[0])
        return (first,) if len(zones) == 1 else (first, time.replace(tzinfo=zones[1]))

    def read_all(self, texts: Sequence[str]) -> list[datetime] | None:
        """Many times at once, if all have the usual form and one offset; else None."""
        try:
            zone = self._zone_of_all(texts)
            if zone is None:
                return None
            offset = "+00:00" if zone is UTC else f"{zone}".removeprefix("UTC")
            return list(map(datetime.fromisoformat, [text + offset for text in texts]))
        except ValueError:  # one of them is no time
            return None

    def _zone_of_all(self, texts: Sequence[str]) -> timezone | None:
        """The offset of all of ``texts``, where no change of it can lie between them."""
        if set(map(len, texts)) != {_LOCAL}:
            return None
        first, last = self.read(min(texts)), self.read(max(texts))
        same = len(first) == len(last) == 1 and first[0].utcoffset() == last[0].utcoffset()
        near = same and last[0] - first[0] < _NO_TWO_CHANGES
        zone = first[0].tzinfo
        return zone if near and isinstance(zone, timezone) else None

    def _at(self, time: datetime) -> _Zones:
        first, second = (self._offset(time.replace(fold=fold)) for fold in (0, 1))
        # In an hour that is left out, fold 1 is the greater offset; such a time is nobody's.
        return _zones(first, second) if first > second else _zones(first)

    def _offset(self, time: datetime) -> timedelta:
        aware = time.replace(tzinfo=self._tz) if self._tz else time.astimezone()
        return aware.utcoffset() or timedelta()


@cache
def _zones(*offsets: timedelta) -> _Zones:
    return tuple(map(timezone, offsets))


def in_order(read: Sequence[Moments], *, length_s: float | None = None) -> list[datetime | None]:
    """Of what each time can mean, the choice in which they follow one another best.

    Args:
        read: moments of submission, eligibility, start and end, as :meth:`Times.read` gives them.
        length_s: seconds that must lie between the last two, if that is known.
    """

    def misfit(choice: Iterable[datetime | None]) -> tuple[int, float]:
        choice = tuple(choice)
        known = [time for time in choice if time is not None]
        inversions = sum(before > after for before, after in itertools.pairwise(known))
        *_, start, end = choice
        if length_s is None or start is None or end is None:
            return inversions, 0.0
        return inversions, abs((end - start).total_seconds() - length_s)

    choices = itertools.product(*(moments or (None,) for moments in read))
    return list(min(choices, key=misfit))


def seconds(text: str) -> float:
    """A length of time as sacct prints it, ``[[days-]hours:]minutes:seconds``; 0 for none.

    Raises:
        ValueError: it is none.
    """
    if not text:
        return 0.0
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no length of time")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
