"""The simulation of a job on spot capacity: against theory, and case by case."""

from __future__ import annotations

import math
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmspot.cost.interval import Conditions, waste
from slurmspot.cost.prices import Rate
from slurmspot.cost.simulate import Spread, Work, forecast, simulate

HOUR_S = 3600.0
RATE = Rate(on_demand=3.0, spot=0.9, as_of=date(2026, 1, 1))
NOTICES = {"notice_share": 0.8, "window_s": 120.0, "notice_save_s": 90.0}


def conditions(**changed):
    plain = {
        "mtbi_s": 50 * HOUR_S, "stall_s": 5.0, "durable_s": 60.0, "restart_s": 300.0, "step_s": 1.0,
    }  # fmt: skip
    return Conditions(**{**plain, **changed})


def one(trace_s, *, useful_s=1000.0, period_s=100.0, **changed):
    """One run over a trace; the last time of which is far away, so that it is not reached."""
    found = simulate(
        conditions(**changed),
        useful_s=useful_s,
        period_s=period_s,
        runs=1,
        trace_s=(*trace_s, 1e9),
    )
    return found[0]


def mean_waste(found, useful_s):
    return sum(run.wall_s for run in found) / len(found) / useful_s - 1


# --- against theory ------------------------------------------------------------------------------

KINDS = {
    "no notice": {},
    "notices": NOTICES,
    "false notices": {**NOTICES, "precision": 0.5},
    "window too short": {**NOTICES, "window_s": 20.0},
    "always a notice": {**NOTICES, "notice_share": 1.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_the_formula_where_interruptions_are_rare(kind):
    """Some 40,000 interruptions: 0.4 % of error, and 1 % for what the first order leaves out."""
    c, useful_s = conditions(**KINDS[kind]), 2000 * HOUR_S
    found = simulate(c, useful_s=useful_s, period_s=900, runs=1000)
    assert sum(run.interruptions for run in found) > 35_000
    assert mean_waste(found, useful_s) == pytest.approx(waste(c, 900), rel=0.02)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (lambda c, t: c.stall_s / t + (t + c.durable_s + c.restart_s) / c.mtbi_s, "no notice"),
        (lambda c, t: c.stall_s / t + (t / 2 + c.restart_s) / c.mtbi_s, "no notice"),
        (lambda c, t: c.stall_s / t + (t / 2 + c.durable_s) / c.mtbi_s, "no notice"),
        (lambda c, t: (t / 2 + c.durable_s + c.restart_s) / c.mtbi_s, "no notice"),
        (lambda _, t: waste(conditions(), t), "notices"),
        (lambda c, t: waste(c, t) - c.saved_share * 90 / c.mtbi_s, "notices"),
        (lambda _, t: waste(conditions(**NOTICES), t), "false notices"),
        (lambda _, t: waste(conditions(**NOTICES), t), "window too short"),
    ],
)
def test_a_wrong_formula_would_be_seen(wrong, kind):
    """The control of the test above: what leaves out or doubles a term is not within 2 %."""
    c, useful_s = conditions(**KINDS[kind]), 2000 * HOUR_S
    found = simulate(c, useful_s=useful_s, period_s=900, runs=1000)
    assert mean_waste(found, useful_s) != pytest.approx(wrong(c, 900), rel=0.02)


@pytest.mark.parametrize("wait_s", [0.0, 200.0])
def test_it_agrees_with_daly_where_interruptions_are_many(wait_s):
    """Exact for exponential interruptions, also during checkpoints and restarts (Daly 2006).

    A period and its checkpoint, a seconds, take (e^(a/μ) - 1)·(μ + E[restart]) in the mean. Of a
    restart h seconds can be interrupted: E[restart] = wait·e^(h/μ) + μ·(e^(h/μ) - 1).
    """
    c = conditions(mtbi_s=1800.0, stall_s=20.0, durable_s=0.0, wait_s=wait_s)
    useful_s = 60 * 600.0
    found = simulate(c, useful_s=useful_s, period_s=600, runs=4000)
    hard = math.exp((300 - wait_s) / 1800)
    restart_s = wait_s * hard + 1800 * (hard - 1)
    exact_s = 60 * (math.exp(620 / 1800) - 1) * (1800 + restart_s)
    walls = [run.wall_s for run in found]
    mean_s = sum(walls) / len(walls)
    error_s = math.sqrt(sum((wall_s - mean_s) ** 2 for wall_s in walls)) / len(walls)
    assert abs(mean_s - exact_s) < 3 * error_s
    first_order_s = useful_s * (1 + waste(c, 600))
    assert abs(mean_s - first_order_s) > 10 * error_s  # the control: it can tell them apart


# --- case by case: 5 s of stall, 60 s until durable, 300 s of restart, a checkpoint each 100 s ---


def test_without_interruptions_only_checkpoints_are_waited_for():
    run = one([])
    assert run.wall_s == 1000 + 10 * 5 + 60
    assert (run.waited_s, run.lost_s, run.interruptions, run.finished) == (0, 0, 0, True)


def test_an_interruption_undoes_what_is_not_durable():
    run = one([3 * 105 + 61])  # the third checkpoint is durable at 375 s
    assert run.lost_s == 61
    assert run.wall_s == 376 + 300 + 700 + 7 * 5 + 60
    run = one([3 * 105 + 59])
    assert run.lost_s == 159
    assert run.wall_s == 374 + 300 + 800 + 8 * 5 + 60


def test_an_interruption_during_a_checkpoint_undoes_its_period():
    run = one([3 * 105 + 102])  # two seconds into the stall
    assert run.lost_s == 100
    assert run.wall_s == 417 + 300 + 700 + 7 * 5 + 60


def test_an_interruption_before_the_last_checkpoint_is_durable():
    run = one([1000 + 50 + 59])
    assert run.lost_s == 100
    assert run.wall_s == 1109 + 300 + 100 + 5 + 60


def test_an_interruption_during_a_restart_begins_it_again():
    run = one([400, 500, 799])
    assert run.interruptions == 3
    assert run.lost_s == 400 - 3 * 5 - 300
    assert run.wall_s == 799 + 300 + 700 + 7 * 5 + 60


def test_while_no_capacity_is_held_none_is_taken():
    run = one([400, 500, 799], wait_s=120.0)  # held again from 520 s, training from 700 s
    assert (run.interruptions, run.waited_s) == (2, 240)
    assert run.lost_s == 85 + 99
    assert run.wall_s == 799 + 300 + 700 + 7 * 5 + 60


def test_a_notice_saves_the_steps_and_costs_the_save():
    announced = {"notice_share": 1.0, "window_s": 60.0, "notice_save_s": 30.0}
    run = one([250], **announced)
    assert run.lost_s == 0
    assert run.wall_s == 250 + 32 + 300 + 760 + 8 * 5 + 60
    late = one([250], **{**announced, "window_s": 31.0})
    assert late.lost_s == 140  # of 240 seconds trained, the first 100 are durable


def test_checkpoints_are_passed_by_while_the_one_before_is_not_durable():
    run = one([], durable_s=150.0)
    assert run.wall_s == 1000 + 5 * 5 + 150


def test_capacity_that_goes_too_often_finishes_nothing():
    work = Work(useful_s=HOUR_S, gpus=64, rate=RATE)
    row = forecast(conditions(mtbi_s=30.0), work, period_s=600, runs=20)
    assert (row.runs, row.unfinished, row.wasted_share) == (20, 20, 1)
    assert (row.cost.median, row.saving.median) == (math.inf, -math.inf)


def test_fewer_runs_are_enough_where_each_is_interrupted_very_often():
    work = Work(useful_s=100 * HOUR_S, gpus=64, rate=RATE)
    row = forecast(conditions(mtbi_s=60.0, restart_s=10.0), work, period_s=30, runs=500)
    assert 20 <= row.runs < 500
    assert row.runs * row.interruptions > 1e6


# --- traces and draws ----------------------------------------------------------------------------


def test_a_trace_begins_again():
    found = simulate(
        conditions(durable_s=0.0, stall_s=0.0, restart_s=0.0),
        useful_s=1000,
        period_s=10,
        runs=1,
        trace_s=(105.0, 205.0),
    )
    hits = [105, 205, 310, 410, 515, 615, 720, 820, 925]
    assert found[0].interruptions == len(hits)
    assert found[0].wall_s == 1000 + found[0].lost_s == 1025


def test_runs_enter_a_trace_at_different_places():
    found = simulate(conditions(), useful_s=1000, period_s=100, runs=50, trace_s=(900.0, 20_000.0))
    hit = sum(run.interruptions > 0 for run in found)
    assert 2 <= hit <= 9  # of some 1110 s that a run takes, in 20,000
    assert found[0].interruptions == 1  # it begins where the trace does


def test_the_same_seed_draws_the_same():
    def walls(seed):
        found = simulate(conditions(), useful_s=1e6, period_s=900, runs=20, seed=seed)
        return [run.wall_s for run in found]

    assert walls(1) == walls(1)
    assert walls(1) != walls(2)
    assert len(set(walls(1))) > 10


@settings(max_examples=50)
@given(
    st.floats(60, 1e5), st.floats(0, 30), st.floats(0, 200), st.floats(0, 600), st.floats(0, 1),
    st.floats(0.1, 1), st.floats(50, 5000), st.floats(1e3, 1e5),
)  # fmt: skip
def test_no_second_is_lost_or_made_up(  # noqa: PLR0917  hypothesis passes them by place
    mtbi_s, stall_s, durable_s, restart_s, share, precision, period_s, useful_s
):
    c = conditions(
        mtbi_s=mtbi_s, stall_s=stall_s, durable_s=durable_s, restart_s=restart_s,
        wait_s=restart_s / 3, precision=precision, **{**NOTICES, "notice_share": share},
    )  # fmt: skip
    for run in simulate(c, useful_s=useful_s, period_s=period_s, runs=5):
        assert run.waited_s == pytest.approx(run.interruptions * restart_s / 3)
        assert run.lost_s >= 0
        if run.finished:
            assert run.wall_s >= useful_s + run.lost_s + run.waited_s - 1e-6 * run.wall_s


# --- what it comes to ----------------------------------------------------------------------------

WORK = Work(useful_s=100 * HOUR_S, gpus=64, rate=RATE)


def test_a_forecast_without_interruptions_saves_the_nominal_discount():
    row = forecast(
        conditions(stall_s=0.0, durable_s=0.0), WORK, period_s=900, runs=3, trace_s=(1e9,)
    )
    assert row.gpu_hours.median == pytest.approx(6400)
    assert row.cost.median == pytest.approx(6400 * 0.9)
    assert row.saving.median == pytest.approx(0.7)
    assert (row.interruptions, row.loss_s, row.wasted_share) == (0, 0, pytest.approx(0))


def test_a_forecast_adds_up():
    c = conditions(mtbi_s=4 * HOUR_S, wait_s=120.0)
    row = forecast(c, WORK, period_s=900, runs=400)
    assert row.interruptions == pytest.approx(row.wall_s.mean / (4 * HOUR_S), rel=0.03)
    held_h = (row.wall_s.mean - row.interruptions * 120) / HOUR_S
    assert row.gpu_hours.mean == pytest.approx(held_h * 64)
    assert row.cost.mean == pytest.approx(row.gpu_hours.mean * 0.9)
    assert row.saving.mean == pytest.approx(1 - row.cost.mean / (6400 * 3))
    assert row.steps_repeated == pytest.approx(row.loss_s * row.interruptions)
    assert row.wall_s.low < row.wall_s.median < row.wall_s.high
    assert 0 < row.saving.low < row.saving.median < row.saving.high < 0.7


def test_waiting_costs_what_it_is_worth():
    c = conditions(mtbi_s=4 * HOUR_S, wait_s=120.0)
    dear = Work(useful_s=WORK.useful_s, gpus=64, rate=RATE, waiting_hour=50.0)
    plain, more = (forecast(c, work, period_s=900, runs=50) for work in (WORK, dear))
    assert more.cost.mean - plain.cost.mean == pytest.approx(plain.interruptions * 120 / 3600 * 50)


def test_spread_by_nearest_rank():
    assert Spread.of([3, 1, 2]) == Spread(low=1, median=2, high=3, mean=2)
    found = Spread.of([float(number) for number in range(101)])
    assert (found.low, found.median, found.high) == (5, 50, 95)
    assert Spread.of([1, math.inf, math.inf]).median == math.inf
