"""The plan command: what it measures, refuses, and says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import simulated

from slurmspot.cli import main
from slurmspot.cost.measured import Observed, observe, pooled
from slurmspot.events import Event
from slurmspot.timeline.lives import witnessed

DATA = Path(__file__).parents[2] / "analysis" / "data"
TRACES = Path(__file__).parents[1] / "data" / "traces"
GIVEN = {
    "--work-h": 100, "--gpus": 64, "--mtbi-s": 14400, "--stall-s": 2, "--durable-s": 60,
    "--restart-s": 420, "--step-s": 1.5, "--notice-share": 0.8, "--notice-save-s": 25,
    "--window-s": 120, "--runs": 50,
}  # fmt: skip
RUN = ("--from", DATA / "spot", "--sacct", DATA / "sacct.txt", "--tz", "UTC")


def flags(**changed):
    every = {**GIVEN, **{f"--{name.replace('_', '-')}": value for name, value in changed.items()}}
    return [word for name, value in every.items() if value is not None for word in (name, value)]


def call(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(["plan", *map(str, argv)])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def plan(capsys, *argv):
    code, out, err = call(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# --- what it says --------------------------------------------------------------------------------


def test_a_plan_has_a_row_for_each_period_and_the_best(capsys):
    found = plan(capsys, *flags())
    assert found["schema_version"] == 1
    assert [row["period_s"] for row in found["periods"]][:4] == [300, 900, 1800, 3600]
    assert found["best"] == {
        "seconds": pytest.approx((2 * 14400 * 2 / 0.2) ** 0.5),
        "bound": "formula",
    }
    assert found["periods"][4]["period_s"] == found["best"]["seconds"]
    assert found["on_demand"] == 19_200
    assert found["nominal_discount"] == pytest.approx(0.7)
    for row in found["periods"]:
        assert row["saving"]["median"] < 0.7
        assert row["cost"]["median"] == pytest.approx(19_200 * (1 - row["saving"]["median"]))
        assert row["wasted_share"] == pytest.approx(row["expected_share"], rel=0.1)


def test_the_tables(capsys):
    code, out, err = call(capsys, *flags())
    assert (code, err) == (0, "")
    rows = out.splitlines()
    assert rows[0].split()[:4] == ["PERIOD", "FORMULA", "WASTE", "WALL"]
    assert [row.endswith("best") for row in rows[1:6]] == [False] * 4 + [True]
    assert "The price list's discount is 70.0%; spot really saves 6" in out
    assert "Young 1974, Daly 2006" in out
    assert "precision of notices                 100.0%  default: every notice comes true" in out
    assert "given" in out
    assert "made up as an example" in out


def test_the_formula_shown_is_the_formula(capsys):
    row = plan(capsys, *flags(notice_share=0), "--period-s", 900)["periods"][0]
    wasted = 2 / 900 + (450 + 60 + 420) / 14400
    assert row["expected_share"] == pytest.approx(wasted / (1 + wasted))
    assert row["worst_loss_s"] == 960


def test_a_loss_beyond_the_rpo_is_marked(capsys):
    code, out, _ = call(capsys, *flags(rpo_s=400))
    assert code == 0
    rows = out.splitlines()
    assert "over the RPO" not in rows[1]
    assert "over the RPO: up to 16 min 00 s lost" in rows[2]
    assert "Best period: 340 s, the longest that the RPO allows." in out
    _, out, _ = call(capsys, *flags(rpo_s=100))
    assert "An RPO of 1 min 40 s cannot be held: at worst 2 min 00 s of training are lost" in out


def test_a_window_that_is_too_short_is_told(capsys):
    _, out, _ = call(capsys, *flags(window_s=20))
    assert "Notices save nothing: a save takes 28 s with the wait for a step" in out
    _, out, _ = call(capsys, *flags())
    assert "Notices save nothing" not in out


def test_a_period_that_cannot_be_kept_is_told(capsys):
    _, out, _ = call(capsys, *flags(durable_s=700), "--period-s", 300)
    assert "saves every 900 s: not durable before" in out.splitlines()[1]


def test_spot_that_does_not_pay_is_told(capsys):
    code, out, _ = call(capsys, *flags(mtbi_s=250, window_s=20, work_h=20))
    assert code == 0
    assert "Spot does not pay: the price list's discount is 70.0%" in out
    assert "more than on demand (3,840.00 USD)" in out


def test_capacity_that_goes_faster_than_a_job_recovers_is_told(capsys):
    argv = flags(mtbi_s=60, window_s=20, work_h=2)
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert "The job does not finish on this capacity: it is interrupted every 1 min 00 s" in out
    assert "50 of 50 runs do not finish" in out
    row = plan(capsys, *argv)["periods"][0]
    assert (row["unfinished"], row["cost"]["median"]) == (50, None)


def test_prices_of_ones_own(capsys, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'as_of = 2026-02-03\ncurrency = "EUR"\n'
        "[type.h100]\non_demand = 4\nspot = 1\n[type.l40]\non_demand = 2\nspot = 1\n"
    )
    argv = [*flags(), "--prices", prices]
    found = plan(capsys, *argv, "--gpu-type", "h100")
    assert (found["currency"], found["on_demand"]) == ("EUR", 25_600)
    assert found["nominal_discount"] == 0.75
    code, _, err = call(capsys, *argv)
    assert code == 2
    assert "--gpu-type: h100, l40" in err


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_says_how_often_capacity_goes(capsys):
    trace = ("--trace", TRACES / "counts.json")
    argv = flags(mtbi_s=None, work_h=0.1, restart_s=5, durable_s=1, stall_s=0.1, step_s=0.1)
    found = plan(capsys, *argv, *trace)
    assert found["inputs"]["mtbi_s"]["value"] == 90
    assert found["inputs"]["mtbi_s"]["source"].endswith("counts.json: 3 interruptions in 0 h")
    row = found["periods"][-1]
    assert row["interruptions"] == pytest.approx(row["wall_s"]["mean"] / 90, abs=1)
    assert row["interruptions"] > 4
    assert any("Each fall of the trace" in line for line in found["assumptions"])


def test_a_trace_that_never_falls_tells_nothing(capsys, tmp_path):
    path = tmp_path / "flat.json"
    path.write_text('{"metadata": {"gap_seconds": 30}, "data": [1, 1, 1]}')
    code, _, err = call(capsys, *flags(mtbi_s=None), "--trace", path)
    assert code == 3
    assert "capacity never falls in" in err


# --- wrong use -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [flag for flag in GIVEN if flag != "--runs"])
def test_what_nobody_says_has_no_default(capsys, flag):
    code, out, err = call(capsys, *flags(**{flag[2:]: None}))
    assert (code, out) == (2, "")
    assert f"give {flag}, or a run that tells (--from)" in err


def test_everything_that_is_missing_is_named_at_once(capsys):
    code, _, err = call(capsys)
    assert code == 2
    assert "nobody says: useful work, GPUs, mean time between interruptions, stall" in err


def test_without_notices_nothing_is_asked_about_them(capsys):
    found = plan(capsys, *flags(notice_share=0, notice_save_s=None, window_s=None))
    assert found["inputs"]["window_s"] == {"value": 0, "source": "not needed without notices"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (flags(mtbi_s=0), "--mtbi-s is 0"),
        (flags(work_h=0), "--work-h is 0"),
        (flags(mtbi_s="nan"), "nan is no number"),
        (flags(period_s="inf"), "inf is no number"),
        (flags(period_s=0), "--period-s"),
        (flags(notice_share=1.5), "notice_share is 1.5"),
        (flags(precision=0), "precision is 0"),
        (flags(wait_s=500), "a restart of 420 s cannot hold a wait of 500 s"),
        ([*flags(), "--trace", TRACES / "counts.json"], "--trace and --mtbi-s"),
        ([*flags(), "--sacct", DATA / "sacct.txt"], "name the run with --from"),
        ([*flags(mtbi_s=None), "--trace", "/no/such"], "cannot read the trace"),
    ],
)
def test_wrong_use(capsys, argv, words):
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert words in err


def test_a_run_that_is_not_there(capsys):
    code, _, err = call(capsys, *flags(), "--from", "/no/such/run")
    assert code == 3
    assert "is not a run folder" in err


# --- what runs tell ------------------------------------------------------------------------------


def test_a_run_tells_what_no_flag_says(capsys):
    found = plan(capsys, *RUN, "--work-h", 1, "--runs", 5, "--stall-s", 0.5)["inputs"]
    values = {name: one["value"] for name, one in found.items()}
    assert found["stall_s"] == {"value": 0.5, "source": "given"}
    assert values["gpus"] == 4
    assert values["mtbi_s"] == pytest.approx(95 / 3)  # sacct: 95 s in four attempts
    assert values["notice_share"] == pytest.approx(1 / 3)
    assert values["window_s"] == 15  # not the 5 s of the SIGTERM after the node was lost
    assert values["notice_save_s"] == pytest.approx(0.073, abs=0.001)
    assert values["durable_s"] == pytest.approx(0.14, abs=0.02)
    assert values["restart_s"] == pytest.approx((18.45 + 22.35 + 20.90) / 3, abs=0.01)
    assert values["step_s"] == pytest.approx(0.101, abs=0.001)
    assert found["mtbi_s"]["source"].endswith("spot: 3 interruptions, 3 of them injected")


def test_a_run_without_interruptions_does_not_tell_how_often_they_come(capsys):
    baseline = ("--from", DATA / "baseline", *RUN[2:])
    code, _, err = call(capsys, *baseline, "--work-h", 1)
    assert code == 2
    assert "give --mtbi-s, --restart-s, --notice-share, --notice-save-s, --window-s" in err
    assert "--stall-s" not in err


def test_several_runs_tell_together(capsys, tmp_path):
    shutil.copytree(DATA / "spot", tmp_path / "again")
    two = plan(capsys, *RUN, "--from", tmp_path / "again", "--work-h", 1, "--runs", 5)["inputs"]
    assert two["mtbi_s"]["value"] == pytest.approx(95 / 3)
    assert "again: 6 interruptions" in two["mtbi_s"]["source"]


def test_observed_of_a_made_up_run():
    """Restart: 0.1 s after the last step, 3 s of leaving, 8 s of waiting, 5 s of starting."""
    run = simulated.run("spot", [("preempt", 50), ("kill", 170)])
    found = observe(run.jobs, run.events, run.interruptions)
    assert found.interruptions == 2
    assert (found.noticed, found.injected, found.gpus) == (1, 2, 8)
    assert found.window_s == (15,)
    assert found.notice_save_s == (pytest.approx(0.8),)
    assert found.wait_s == (8, 8)
    saved, killed = found.restart_s
    assert killed == pytest.approx(0.1 + 3 + 8 + 5, abs=0.01)
    assert saved == pytest.approx(0.1 + 3.2 + 8 + 5 + 0.5, abs=0.01)  # and the first new step
    assert found.step_s[:3] == (pytest.approx(0.5),) * 3
    used = sum((a.process_exit - a.start).total_seconds() for job in run.jobs for a in job.attempts)
    assert found.held_s == pytest.approx(used)


def test_ends_that_someone_wanted_are_no_interruptions():
    run = simulated.run("spot", [("preempt", 50)])
    ends = [replace(one, kind=kind) for kind in ("cancelled", "timeout", "preemption")
            for one in run.interruptions]  # fmt: skip
    assert observe(run.jobs, run.events, ends).interruptions == 1


def test_periodic_saves_are_measured_on_the_rank_that_waits_longest():
    def event(at_s, name, step, rank="0", **data):
        at_ns = int(at_s * 1e9)
        return Event(
            t_ns=10**18 + at_ns, mono_ns=at_ns, event=name, step=step, attempt="1-0", rank=rank,
            data=data,
        )  # fmt: skip

    events = [
        event(0, "attempt_start", None),
        event(1, "snapshot_begin", 0, trigger="start"),
        event(2, "snapshot_end", 0, stall_s=0.9),
        event(3, "commit", 0, tier="remote"),
        event(10, "snapshot_begin", 5, trigger="period"),
        event(10, "snapshot_begin", 5, "1", trigger="period"),
        event(11, "snapshot_end", 5, stall_s=0.2),
        event(12, "snapshot_end", 5, "1", stall_s=0.5),
        event(13, "commit", 5, tier="local"),
        event(18, "commit", 5, tier="remote"),
        event(20, "snapshot_begin", 9, trigger="period"),
        event(21, "snapshot_end", 9, stall_s=0.0),
    ]
    found = observe(witnessed(events), events, [])
    assert found.stall_s == (0.5, 0.0)
    assert found.durable_s == (7.5,)


def test_what_no_run_has_seen_is_absent():
    assert pooled({}) == {}
    assert pooled({"a": Observed(gpus=4), "b": Observed(gpus=8)}) == {}
    assert pooled({"a": Observed(gpus=4)})["gpus"].source == "measured in a"
