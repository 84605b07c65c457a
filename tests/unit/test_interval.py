"""The formula of waste and the best period."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmspot.cost.interval import (
    Conditions,
    best_period,
    kept_period_s,
    loss_s,
    optimum_s,
    waste,
    wasted_share,
    worst_loss_s,
)
from slurmspot.errors import UsageError

HOUR_S = 3600.0


def conditions(**changed):
    plain = {
        "mtbi_s": 4 * HOUR_S, "stall_s": 2.0, "durable_s": 60.0, "restart_s": 420.0, "step_s": 1.5,
    }  # fmt: skip
    return Conditions(**{**plain, **changed})


NOTICES = {"notice_share": 0.8, "window_s": 120.0, "notice_save_s": 25.0}


def test_waste_without_notices_by_hand():
    found = waste(conditions(), 900)
    assert found == pytest.approx(2 / 900 + (450 + 60 + 420) / 14400)
    assert wasted_share(conditions(), 900) == pytest.approx(found / (1 + found))


def test_waste_with_notices_by_hand():
    saved = 0.2 * (450 + 60) + 0.8 * (25 + 3) + 420
    assert waste(conditions(**NOTICES), 900) == pytest.approx(2 / 900 + saved / 14400)
    false = 0.8 * (0.25 / 0.75) * 25
    found = waste(conditions(**NOTICES, precision=0.75), 900)
    assert found == pytest.approx(2 / 900 + (saved + false) / 14400)


def test_the_best_period_of_young_and_daly():
    assert optimum_s(conditions()) == pytest.approx(math.sqrt(2 * 14400 * 2))
    assert optimum_s(conditions(durable_s=1000.0)) == optimum_s(conditions())
    assert optimum_s(conditions(**NOTICES)) == pytest.approx(math.sqrt(2 * 14400 * 2 / 0.2))
    assert optimum_s(conditions(**{**NOTICES, "notice_share": 1.0})) == math.inf


@given(
    st.floats(600, 1e6), st.floats(0.01, 60), st.floats(0, 0.99), st.floats(0.2, 1),
    st.floats(0.3, 3).filter(lambda factor: abs(factor - 1) > 0.01),
)  # fmt: skip
def test_no_other_period_wastes_less(mtbi_s, stall_s, share, precision, factor):
    c = conditions(
        mtbi_s=mtbi_s, stall_s=stall_s, precision=precision, **{**NOTICES, "notice_share": share}
    )
    assert waste(c, optimum_s(c)) < waste(c, optimum_s(c) * factor)


def test_a_notice_counts_if_a_save_fits_its_window():
    fits = conditions(**{**NOTICES, "window_s": 28.0})
    short = conditions(**{**NOTICES, "window_s": 27.9})
    assert (fits.saved_share, short.saved_share) == (0.8, 0.0)
    assert waste(short, 900) == waste(conditions(), 900)
    assert short.false_notices == 0


def test_what_an_interruption_undoes():
    assert loss_s(conditions(), 900) == 510
    assert loss_s(conditions(**NOTICES), 900) == pytest.approx(102)
    assert worst_loss_s(conditions(**NOTICES), 900) == 960


def best(rpo_s=None, useful_s=100 * HOUR_S, **changed):
    found = best_period(conditions(**changed), useful_s=useful_s, rpo_s=rpo_s)
    return found.bound, found.seconds


def test_what_bounds_the_best_period():
    assert best() == ("formula", pytest.approx(240))
    assert best(rpo_s=600) == ("formula", pytest.approx(240))
    assert best(rpo_s=200) == ("rpo", 140)
    assert best(rpo_s=100) == ("durable", 60)
    assert best(stall_s=0.0) == ("durable", 60)
    assert best(stall_s=0.0, durable_s=0.0) == ("step", 1.5)
    assert best(useful_s=100) == ("work", 100)
    surely = {**NOTICES, "notice_share": 1.0}
    assert best(**surely) == ("work", 100 * HOUR_S)
    assert best(**surely, rpo_s=1800) == ("rpo", 1740)


@given(st.floats(0, 1e5), st.floats(0, 1e4), st.floats(1e-3, 1e4))
def test_an_rpo_is_held_or_cannot_be(rpo_s, durable_s, stall_s):
    c = conditions(durable_s=durable_s, stall_s=stall_s)
    found = best_period(c, useful_s=1e6, rpo_s=rpo_s)
    assert found.seconds >= max(durable_s, c.step_s)
    if found.bound not in {"durable", "step"}:
        assert worst_loss_s(c, found.seconds) <= rpo_s * (1 + 1e-9)


def test_checkpoints_follow_no_closer_than_they_become_durable():
    c = conditions(durable_s=700.0)
    assert [kept_period_s(c, period_s) for period_s in (300, 700, 900)] == [900, 700, 900]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mtbi_s": 0.0}, "mtbi_s is 0"),
        ({"step_s": 0.0}, "step_s is 0"),
        ({"precision": 0.0}, "precision is 0"),
        ({"precision": 1.1}, "precision is 1.1"),
        ({"notice_share": 1.1}, "notice_share is 1.1"),
        ({"stall_s": -1.0}, "stall_s is -1"),
        ({"durable_s": math.nan}, "durable_s is nan"),
        ({"restart_s": math.inf}, "restart_s is inf"),
        ({"wait_s": 421.0}, "cannot hold a wait of 421 s"),
    ],
)
def test_what_cannot_be_is_refused(changed, words):
    with pytest.raises(UsageError, match=words):
        conditions(**changed)


def test_costs_know_neither_the_cluster_nor_the_job():
    script = (
        "import sys, slurmspot.cost.interval, slurmspot.cost.measured, slurmspot.cost.simulate\n"
        "heavy = ('slurmspot.cluster', 'slurmspot.job', 'numpy', 'torch')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
