"""Times without a zone, and the hour that clocks repeat."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmspot.timeline.attempts import read_timeline
from slurmspot.timeline.times import Times, in_order, seconds

BERLIN = ZoneInfo("Europe/Berlin")  # clocks went back on 25 October 2026, at 03:00 to 02:00
HEADER = "JobID|State|Submit|Eligible|Start|End|ElapsedRaw|Suspended\n"


def utc(*parts):
    return datetime(2026, *parts, tzinfo=UTC)


def only(*cells, elapsed=""):
    line = "5|COMPLETED|" + "|".join(f"2026-10-25T{cell}" for cell in cells)
    timeline = read_timeline(f"{HEADER}{line}|{elapsed}|00:00:00\n", tz=BERLIN)
    assert not timeline.rejected
    repeated = any(cell.startswith("02") for cell in cells)
    assert [note[:38] for note in timeline.notes] == [
        "1 records have a time in the hour that"
    ] * repeated
    return timeline.jobs[0].attempts[0]


def test_an_hour_of_winter_is_not_an_hour_of_summer():
    attempt = only("01:30:00", "01:30:00", "01:30:00", "03:30:00")
    assert (attempt.start, attempt.end) == (utc(10, 24, 23, 30), utc(10, 25, 2, 30))
    assert [p.seconds for p in attempt.phases if p.name == "run"] == [3 * 3600]
    assert attempt.start.isoformat() == "2026-10-25T01:30:00+02:00"
    assert attempt.end.isoformat() == "2026-10-25T03:30:00+01:00"


@pytest.mark.parametrize(
    ("cells", "elapsed", "expected"),
    [
        (("02:10:00", "02:10:00", "02:20:00", "02:50:00"), "1800", 1800),
        (("02:10:00", "02:10:00", "02:20:00", "02:50:00"), "5400", 5400),
        (("02:10:00", "02:10:00", "02:50:00", "02:20:00"), "", 1800),
        (("01:10:00", "01:10:00", "02:50:00", "02:20:00"), "1800", 1800),
        (("02:50:00", "02:50:00", "02:20:00", "02:30:00"), "600", 600),
    ],
)
def test_the_hour_that_comes_twice(cells, elapsed, expected):
    attempt = only(*cells, elapsed=elapsed)
    assert (attempt.end - attempt.start).total_seconds() == expected
    assert attempt.submit <= attempt.eligible <= attempt.start <= attempt.end


@pytest.mark.parametrize("text", ["2026-03-29T02:30:00", "2026-13-01T00:00:00", "yesterday"])
def test_times_that_are_none(text):
    """An hour that is left out is read somehow; the others are refused."""
    times = Times(BERLIN)
    if "03-29" in text:
        assert len(times.read(text)) == 1
    else:
        with pytest.raises(ValueError):
            times.read(text)


instants = st.integers(0, 2 * 86_400).map(lambda s: utc(10, 24) + timedelta(seconds=s))


@given(st.lists(instants, min_size=4, max_size=4).map(sorted), st.sampled_from(["UTC", "DST"]))
def test_any_four_times_in_order_come_back_given_their_length(moments, zone):
    tz = UTC if zone == "UTC" else BERLIN
    times = Times(tz)
    texts = [f"{moment.astimezone(tz):%Y-%m-%dT%H:%M:%S}" for moment in moments]
    read = [times.read(text) for text in texts]
    assert all(moment in found for moment, found in zip(moments, read, strict=True))
    length_s = (moments[3] - moments[2]).total_seconds()
    chosen = in_order(read, length_s=length_s)
    assert chosen == sorted(chosen)
    assert (chosen[3] - chosen[2]).total_seconds() == length_s
    plain = times.read_all(texts)
    assert plain is None or plain == [found[0] for found in read]
    assert plain is not None or any(len(found) > 1 for found in read) or tz is BERLIN


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0), ("00:05", 5), ("01:00:05", 3605), ("2-03:00:00", 183600), ("00:05.123", 5)],
)
def test_lengths(text, value):
    assert seconds(text) == value


def test_a_length_that_is_none():
    with pytest.raises(ValueError):
        seconds("soon")
    assert timedelta(seconds=seconds("1-00:00:00")) == timedelta(days=1)
