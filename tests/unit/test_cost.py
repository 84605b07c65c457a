"""Price files, GPU hours and savings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
import simulated
from hypothesis import given
from hypothesis import strategies as st

from slurmspot.cost.bill import bill, bills, gpu_hours, savings
from slurmspot.cost.prices import ANY, Other, Prices, Rate, load_prices
from slurmspot.cost.usage import TERMS, Usage, usages
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.timeline.attempts import Attempt, Job
from slurmspot.timeline.recovery import of_each

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
    rate = Rate(on_demand=2.0, spot=0.5, as_of=date(2026, 2, 3))
    assert load_prices(path) == Prices(rates={ANY: rate}, currency="EUR", as_of=rate.as_of)


def test_prices_of_several_types(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(
        f"{GOOD}[type.h100]\non_demand = 4\nspot = 1\nas_of = 2026-03-01\n"
        '[type.a100]\non_demand = 3\nspot = 1\npartitions = ["old", "old-spot"]\n'
        '[other]\nkeep_days = 7\nmanual_hour = 80\non_demand_partitions = ["ondemand"]\n'
    )
    prices = load_prices(path)
    assert prices.rate("h100", "old").on_demand == 4
    assert prices.rate("h100", "x").as_of == date(2026, 3, 1)
    assert prices.rate("", "old-spot").on_demand == 3
    assert prices.rate("l40", "x").on_demand == 2
    assert prices.other.on_demand_partitions == ("ondemand",)
    path.write_text(path.read_text().replace("[gpu_hour]\non_demand = 2\nspot = 0.5\n", ""))
    assert load_prices(path).rate("l40", "x") is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[gpu_hour]", "[gpu_hours]", "no table [gpu_hour]"),
        ("[gpu_hour]", "type = 3\n[gpu_hour]", "type is not a table"),
        ("[gpu_hour]", "[type.h100]\nspot = 1\n[gpu_hour]", "type.h100.on_demand is missing"),
        ("[gpu_hour]", "[other]\nwaiting = 1\n[gpu_hour]", "unknown entries: other.waiting"),
        ("[gpu_hour]", "[other]\nkeep_days = -1\n[gpu_hour]", "other.keep_days is -1"),
        ("= 2\n", "= -2\n", "on_demand is -2"),
        ("= 2\n", "= 0\n", "on_demand is 0"),
        ("= 2\n", "= nan\n", "on_demand is nan"),
        ("= 2\n", "= true\n", "on_demand is not a number"),
        ("spot = 0.5", "", "spot is missing"),
        ("spot = 0.5", "spot = 0.5\nspott = 1", "unknown entries: gpu_hour.spott"),
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


# --- terms ---------------------------------------------------------------------------------------

HITS = [("preempt", 50), ("node-down", 110), ("kill", 170)]
OTHER = Other(
    storage_gib_month=0.02, egress_gib=0.09, waiting_hour=1.0, manual_hour=80.0,
    manual_hours_per_failure=0.5, keep_days=7.0,
)  # fmt: skip


def prices(**rates):
    day = date(2026, 1, 1)
    return Prices(
        rates={
            name.strip("_"): Rate(on_demand=dear, spot=cheap, as_of=day)
            for name, (dear, cheap) in rates.items()
        },
        currency="EUR",
        as_of=day,
        other=OTHER,
    )


ONE = prices(_=(3.0, 0.9))


def test_every_second_of_a_run_is_in_one_term():
    run = simulated.run("spot", HITS)
    used = usages(run.jobs, run.events)
    for attempt, one in zip(run.jobs[0].attempts, used, strict=True):
        whole = (attempt.process_exit - attempt.submit).total_seconds()
        assert sum(one.seconds.values()) == pytest.approx(whole)
    totals = {term: sum(one.seconds[term] for one in used) for term in TERMS}
    assert totals["useful"] == pytest.approx(240 * 0.5, abs=1.5)  # seconds of 240 new steps
    assert totals["repeated"] == pytest.approx(20 * 0.5, abs=1.5)  # ten steps lost twice
    assert totals["checkpoint"] == pytest.approx(0.5 + 0.8)
    assert totals["waiting"] == 4 * 1 + 3 * (5 + 2)
    assert totals["failures"] == 0


def test_a_bill_names_what_it_is_made_of():
    run = simulated.run("spot", HITS)
    found = bill(usages(run.jobs, run.events), ONE, name="spot")
    assert found.nominal == pytest.approx(0.7)
    assert 0 < found.saving < 0.7
    assert found.total == sum(found.amounts.values())
    assert sum(found.gpu_hours.values()) == pytest.approx(gpu_hours(run.jobs[0].attempts))
    assert any("0.90 EUR on spot" in line for line in found.assumptions)
    assert not any("no event log" in line for line in found.assumptions)


def test_without_an_event_log_all_running_counts_as_useful_and_that_is_said():
    run = simulated.run("spot", HITS)
    jobs = [job._replace(attempts=tuple(a._replace(parts=()) for a in job.attempts))
            for job in run.jobs]  # fmt: skip
    found = bill(usages(jobs), ONE)
    assert found.amounts["repeated"] == 0
    assert any(line.startswith("4 attempts left no event log") for line in found.assumptions)


def test_jobs_of_an_export_are_work_of_their_own():
    def job(job_id, *kinds):
        attempts = (attempt(1, 4)._replace(index=i, kind=kind) for i, kind in enumerate(kinds))
        return Job(job_id=job_id, name="", attempts=tuple(attempts))

    jobs = [
        job("1", "completed"), job("2", "failed"), job("2", "timeout"), job("3", "cancelled"),
        job("4", "preempted", "completed"),
    ]  # fmt: skip
    assert [one.failures for one in usages(jobs)] == [0, 1, 1, 0, 0, 0]
    assert [one.job_id for one in of_each(jobs)] == ["2", "2", "3", "4"]


def test_cleaning_up_after_an_attempt_is_waiting():
    first = attempt(1, 4)
    cleaned = first._replace(released=first.process_exit + timedelta(seconds=90))
    plain, longer = (
        usages([Job(job_id="1", name="", attempts=(one,))])[0].seconds for one in (first, cleaned)
    )
    assert longer == {**plain, "waiting": plain["waiting"] + 90}


def test_attempts_that_get_nowhere_are_failures():
    run = simulated.run("spot", [("kill", 50), ("kill", 45)], steps=60)
    used = usages(run.jobs, run.events)
    assert used[1].seconds["failures"] > 5
    assert used[1].seconds["repeated"] == 0
    dead = simulated.run("spot", [("kill", 50), ("kill", 45)])
    ended = dead.jobs[0]._replace(attempts=dead.jobs[0].attempts[:2])
    assert [one.failures for one in usages([ended], dead.events)] == [1, 1]


def test_a_type_without_a_price_is_named_and_the_rest_is_billed():
    used = [
        Usage(job_id="1", user="ann", partition="a", gpu_type=kind, gpus=gpus,
              seconds={"useful": 3600.0})
        for kind, gpus in (("h100", 8), ("l40", 4), ("l40", None))
    ]  # fmt: skip
    found = bill(used, prices(h100=(4.0, 1.0)))
    assert found.unpriced == {"l40": 4.0}
    assert found.uncounted == 1
    assert found.total == Decimal("8.00")


def test_bills_apart():
    used = [
        Usage(job_id=str(n), user=user, partition=partition, gpu_type="", gpus=n,
              seconds={"useful": 3600.0})
        for n, (user, partition) in enumerate(
            [("ann", "a"), ("bob", "a"), ("ann", "b"), ("", "b")], start=1
        )
    ]  # fmt: skip
    for by, names in (("user", {"ann", "bob", "-"}), ("partition", {"a", "b"})):
        found = bills(used, ONE, by=by)
        assert {one.name for one in found} == names
        assert sum(one.total for one in found) == bill(used, ONE).total
        assert found == sorted(found, key=lambda one: -one.total)


seconds = st.floats(0, 1e7, allow_nan=False)
used_up = st.builds(
    Usage,
    job_id=st.just("1"),
    user=st.sampled_from(["ann", "bob"]),
    partition=st.sampled_from(["spot", "ondemand"]),
    gpu_type=st.sampled_from(["", "h100", "l40"]),
    gpus=st.one_of(st.none(), st.integers(0, 512)),
    seconds=st.fixed_dictionaries(dict.fromkeys(TERMS, seconds)),
    written_gib=st.floats(0, 1e5),
    read_gib=st.floats(0, 1e5),
    failures=st.integers(0, 3),
)


@given(st.lists(used_up, max_size=6), st.floats(0.01, 50), st.floats(0, 50))
def test_the_terms_add_up_to_the_whole_bill_to_the_cent(used, dear, cheap):
    listed = prices(_=(dear, cheap), h100=(dear * 2, cheap * 2))
    listed = replace(listed, other=replace(OTHER, on_demand_partitions=("ondemand",)))
    found = bill(used, listed)
    whole = Decimal(0)  # the bill again, in one sum
    for one in used:
        rate = listed.rate(one.gpu_type, one.partition)
        paid = rate.on_demand if one.partition == "ondemand" else rate.spot
        held = sum(Decimal(str(s)) for term, s in one.seconds.items() if term != "waiting")
        whole += held * (one.gpus or 0) / 3600 * Decimal(str(paid))
        moved = Decimal(str(one.written_gib + one.read_gib)) * Decimal("0.09")
        kept = Decimal(str(one.written_gib)) * Decimal("0.02") * 7 / 30
        whole += moved + kept + one.failures * 40 + Decimal(str(one.seconds["waiting"])) / 3600
    assert set(found.amounts) == set(TERMS)
    assert sum(found.amounts.values()) == found.total
    assert abs(found.total - whole) <= Decimal("0.00500001")
    assert all(amount == amount.quantize(Decimal("0.01")) >= 0 for amount in found.amounts.values())
    apart = bills(used, listed, by="user")
    assert abs(sum(one.total for one in apart) - found.total) <= Decimal("0.02")
