"""Price files, GPU hours and savings."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest

from slurmspot.cost.bill import gpu_hours, savings
from slurmspot.cost.prices import Prices, load_prices
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.timeline.attempts import Attempt

T0 = datetime(2026, 1, 1, tzinfo=UTC)
GOOD = 'as_of = 2026-02-03\ncurrency = "EUR"\n[gpu_hour]\non_demand = 2\nspot = 0.5\n'


def attempt(hours, gpus, *, start=T0, over=True):
    gone = start + timedelta(hours=hours) if start and over else None
    return Attempt(
        index=0, kind="completed", submit=T0, eligible=T0, start=start, end=gone,
        process_exit=gone, nodes=(), gpus=gpus,
    )  # fmt: skip


def test_the_shipped_prices_say_that_they_are_an_example():
    prices = load_prices()
    assert prices.example
    assert "example" in prices.note
    assert prices.discount == pytest.approx(0.7)
    assert (prices.currency, prices.as_of) == ("USD", date(2026, 1, 1))


def test_own_prices(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    assert load_prices(path) == Prices(
        on_demand=2.0, spot=0.5, currency="EUR", as_of=date(2026, 2, 3)
    )


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[gpu_hour]", "[gpu_hours]", "no table [gpu_hour]"),
        ("= 2\n", "= -2\n", "on_demand is -2"),
        ("= 2\n", "= 0\n", "on_demand is 0"),
        ("= 2\n", "= nan\n", "on_demand is nan"),
        ("= 2\n", "= true\n", "on_demand is not a number"),
        ("spot = 0.5", "", "spot is missing"),
        ("spot = 0.5", "spot = 0.5\nspott = 1", "unknown entries: spott"),
        ("2026-02-03", '"soon"', "as_of is not a date"),
        ('"EUR"', "3", "currency is not a name"),
        ("=", "", "not TOML"),
    ],
)
def test_a_bad_price_file_says_what_is_wrong(tmp_path, old, new, why):
    path = tmp_path / "prices.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_prices(path)
    assert why in (caught.value.why or "")
    assert "on_demand and spot" in (caught.value.fix or "")


def test_files_that_are_none(tmp_path):
    with pytest.raises(NotFoundError):
        load_prices(tmp_path / "none.toml")
    with pytest.raises(UsageError):
        load_prices(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        load_prices(tmp_path / "binary")


def test_gpu_hours_run_from_start_to_the_last_process():
    attempts = [attempt(0.5, 8), attempt(1, 4), attempt(1, None, start=None), attempt(1, 0)]
    assert gpu_hours(attempts) == pytest.approx(8)
    assert gpu_hours([]) == 0


def test_running_attempts_count_up_to_now():
    running = attempt(1, 8, over=False)
    assert gpu_hours([running]) == 0
    assert gpu_hours([running], now=T0 + timedelta(hours=2)) == pytest.approx(16)


def test_unknown_gpus_give_no_figure():
    with pytest.raises(UsageError, match="how many GPUs"):
        gpu_hours([attempt(1, 8), attempt(1, None)])


def test_savings():
    prices = load_prices()
    assert savings(100, 100, prices) == pytest.approx(0.7)
    assert savings(100, 110, prices) == pytest.approx(0.67)
    assert savings(100, 400, prices) == pytest.approx(-0.2)
    with pytest.raises(ValueError):
        savings(0, 1, prices)
