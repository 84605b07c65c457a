"""The gate on the spot ratio: what opens it, and everything that keeps it shut."""

import json
import math
from dataclasses import replace
from datetime import timedelta

import pytest
import simulated
from torch import nn

from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.cli import main
from slurmspot.cluster.spec import Spec
from slurmspot.cost.prices import load_prices
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.faults.record import Outcome, Record
from slurmspot.report.history import History
from slurmspot.runfolder import RunFolder
from slurmspot.study import evidence
from slurmspot.study.acceptance import Integrity, Terms, is_open, judge, row, saving
from slurmspot.study.comparison import table, verdict
from slurmspot.study.experiment import Experiment, carry_out, drills_of, runs_of
from slurmspot.timeline.attempts import Timeline

LAST = "step-00000240"
INTACT = Integrity(intact=(LAST,))
FINAL = {"step": 240, "digest": "abc", "loss": 0.4}
TERMS = Terms()


def history(label, hits=(), *, partition="spot", **options):
    run = simulated.run(label, hits, **options)
    jobs = tuple(
        job._replace(attempts=tuple(a._replace(partition=partition) for a in job.attempts))
        for job in run.jobs
    )
    return History(timeline=Timeline(jobs=jobs), events=run.events, outages=run.outages)


def prices(*partitions):
    found = load_prices(None)
    return replace(found, other=replace(found.other, on_demand_partitions=partitions))


def known(tmp_path, label, hits=(), *, final=FINAL, integrity=INTACT, told=None, **options):
    """A run as it is judged, from a simulated history or one that is ``told``."""
    folder = RunFolder(tmp_path / label).create()
    if final is not None:
        folder.finished.write_text(json.dumps(final))
    partition = "ondemand" if label == "baseline" else "spot"
    found = evidence.of_run(
        folder,
        told or history(label, hits, **{"partition": partition, **options}),
        label=label,
        prices=prices("ondemand"),
        now=simulated.T0 + timedelta(days=1),
    )
    return replace(found, integrity=integrity)


@pytest.fixture
def baseline(tmp_path):
    return known(tmp_path, "baseline")


def failing(baseline, *spot, terms=TERMS):
    findings = judge(baseline, spot, terms)
    wrong = [(one.run, one.check) for one in findings if not one.holds]
    assert is_open(findings) is (not wrong)
    return wrong, {(one.run, one.check): one.shown for one in findings}


def test_everything_shown_opens_the_gate(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("preempt", 50), ("kill", 111)])
    wrong, shown = failing(baseline, spot)
    assert wrong == []
    assert "interrupted twice; at most 11 steps lost" in shown["spot", "recovered"]
    assert shown["spot", "as good"] == "ends in the baseline's state, bit for bit"


@pytest.mark.parametrize(
    ("integrity", "says"),
    [
        (None, "nobody has looked"),
        (Integrity(), "the checkpoint of its last step, 240, is not among"),
        (
            Integrity(intact=("step-00000020",)),
            "the checkpoint of its last step, 240, is not among",
        ),
        (Integrity(intact=(LAST,), unknown="h5py is not installed"), "h5py is not installed"),
        (Integrity(intact=(LAST,), damaged=(("step-2", "is missing"),)), "step-2: is missing"),
        (Integrity(intact=(LAST,), refused=("content differs",)), "content differs"),
    ],
)
@pytest.mark.parametrize("whose", ["baseline", "spot"])
def test_what_cannot_be_verified_keeps_it_shut(tmp_path, baseline, integrity, says, whose):
    runs = {"baseline": baseline, "spot": known(tmp_path, "spot", [("kill", 50)])}
    runs[whose] = replace(runs[whose], integrity=integrity)
    wrong, shown = failing(runs["baseline"], runs["spot"])
    assert wrong == [(whose, "integrity")]
    assert says in shown[whose, "integrity"]


def test_a_run_that_does_not_come_back(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("kill", 50)], final=None, stop_at=50)
    wrong, _ = failing(baseline, spot)
    assert wrong == [
        ("spot", check) for check in ("finished", "recovered", "integrity", "as good", "saves")
    ]


def test_a_run_that_nothing_interrupted_shows_nothing(tmp_path, baseline):
    assert failing(baseline, known(tmp_path, "spot"))[0] == [("spot", "recovered")]


def test_a_baseline_that_was_interrupted_is_none(tmp_path):
    disturbed = known(tmp_path, "baseline", [("kill", 50)])
    spot = known(tmp_path, "spot", [("preempt", 50)])
    assert failing(disturbed, spot)[0] == [("baseline", "undisturbed")]


@pytest.mark.parametrize(
    ("loss", "good"),
    [(0.4, True), (0.403, True), (0.1, True), (0.405, False), (math.nan, False), (None, False)],
)
def test_where_the_states_differ_the_metric_decides(tmp_path, baseline, loss, good):
    spot = known(tmp_path, "spot", [("kill", 50)], final={**FINAL, "digest": "x", "loss": loss})
    assert failing(baseline, spot)[0] == ([] if good else [("spot", "as good")])


@pytest.mark.parametrize(
    ("other", "mine", "good"),
    [(-2.0, -1.99, True), (-2.0, -1.9, False), (0.0, 0.0, True), (0.0, 1e-9, False)],
)
def test_negative_and_zero_metrics(tmp_path, other, mine, good):
    baseline = known(tmp_path, "baseline", final={**FINAL, "digest": "a", "loss": other})
    spot = known(tmp_path, "spot", [("kill", 50)], final={**FINAL, "digest": "b", "loss": mine})
    assert failing(baseline, spot)[0] == ([] if good else [("spot", "as good")])


def test_states_of_nothing_are_not_equal(tmp_path):
    """A run that registered no tensor has an empty digest."""
    nothing = {"step": 240, "digest": ""}
    baseline = known(tmp_path, "baseline", final=nothing)
    spot = known(tmp_path, "spot", [("kill", 50)], final=nothing)
    assert failing(baseline, spot)[0] == [("spot", "as good")]


def test_savings_are_against_what_the_baseline_cost(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("preempt", 50)])
    hours = spot.gpu_hours / baseline.gpu_hours
    discount = 1 - load_prices(None).discount
    assert saving(spot, baseline) == pytest.approx(1 - hours * discount, abs=0.01)
    often = known(tmp_path, "often", [("kill", 21)] * 60)
    assert failing(baseline, often)[0] == [("often", "saves")]
    unpriced = replace(spot, bill=replace(spot.bill, unpriced={"h100": 1.0}))
    assert failing(baseline, unpriced)[0] == [("spot", "saves")]
    for hours in (0.0, None):
        assert failing(baseline, replace(spot, gpu_hours=hours))[0] == [("spot", "saves")]


def test_a_run_in_the_baselines_partition_was_not_on_spot(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("preempt", 50)], partition="ondemand")
    assert failing(baseline, spot)[0] == [("spot", "saves")]


def test_a_baseline_of_several_attempts_costs_what_no_baseline_would(tmp_path):
    twice = replace(known(tmp_path, "baseline"), attempts=2)
    spot = known(tmp_path, "spot", [("preempt", 50)])
    assert failing(twice, spot)[0] == [("baseline", "undisturbed")]


def test_a_shorter_run_is_not_as_good(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("kill", 50)], final={**FINAL, "step": 60})
    wrong, shown = failing(baseline, replace(spot, integrity=Integrity(intact=("step-00000060",))))
    assert wrong == [("spot", "as good")]
    assert shown["spot", "as good"] == "it made 60 steps, and the baseline 240"


def test_a_run_that_somebody_began_again_did_not_come_back_by_itself(tmp_path, baseline):
    spot = replace(known(tmp_path, "spot", [("kill", 50)]), jobs=("17", "18"))
    wrong, shown = failing(baseline, spot)
    assert wrong == [("spot", "recovered")]
    assert "jobs 17, 18" in shown["spot", "recovered"]


@pytest.mark.parametrize("kind", ["cancelled", "timeout"])
def test_ends_that_say_nothing_of_capacity_show_nothing(tmp_path, baseline, kind):
    spot = known(tmp_path, "spot", [("kill", 50)])
    ends = tuple(replace(one, kind=kind) for one in spot.interruptions)
    assert failing(baseline, replace(spot, interruptions=ends))[0] == [("spot", "recovered")]


def test_without_an_event_log_nothing_is_known_of_losses(tmp_path, baseline):
    told = replace(history("spot", [("kill", 50)]), events=())
    spot = known(tmp_path, "spot", told=told)
    assert row(spot, baseline, TERMS)["steps_lost"] is None
    assert failing(baseline, spot)[0] == [("spot", "recovered")]


def test_a_campaign_that_was_not_carried_out_keeps_it_shut(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("kill", 50)])
    assert failing(baseline, replace(spot, drills=""))[0] == []
    wrong, shown = failing(baseline, replace(spot, drills="2 of 3 were made"))
    assert wrong == [("spot", "recovered")]
    assert shown["spot", "recovered"] == "2 of 3 were made"


def test_there_must_be_something_to_judge(baseline):
    with pytest.raises(UsageError, match="no spot run"):
        judge(baseline, [], TERMS)
    assert not is_open([])
    for tolerance in (-0.1, math.nan, math.inf):
        with pytest.raises(UsageError, match="tolerance"):
            Terms(tolerance=tolerance)
    with pytest.raises(UsageError, match="digest is no metric"):
        Terms(metric="digest")


def test_tables_name_every_run_and_every_finding(tmp_path, baseline):
    spot = known(tmp_path, "spot", [("preempt", 50)])
    text = table([row(one, baseline, TERMS) for one in (baseline, spot)], TERMS)
    assert [line.split()[0] for line in text.splitlines()] == ["RUN", "baseline", "spot"]
    assert len(verdict(judge(baseline, [spot], TERMS)).splitlines()) == 1 + 3 + 5


def saved(folder):
    """Two checkpoints of a small model."""
    model = nn.Linear(8, 8)
    checkpointer = Checkpointer(folder.checkpoints, {"model": model})
    for step in (1, 2):
        checkpointer.save(step, trigger="period", meta={}, blocking=True)
    checkpointer.close()


def looked_at(tmp_path, events=()):
    folder = RunFolder(tmp_path / "spot")
    told = History(timeline=Timeline(jobs=()), events=tuple(events))
    found = known(tmp_path / "elsewhere", "spot", integrity=None)
    return evidence.with_integrity(found, folder, told).integrity


def test_every_byte_is_looked_at(tmp_path):
    folder = RunFolder(tmp_path / "spot").create()
    assert looked_at(tmp_path) == Integrity()
    saved(folder)
    assert looked_at(tmp_path).intact == ("step-00000002", "step-00000001")
    file = folder.checkpoints / "step-00000001" / "rank-00000.h5"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    found = looked_at(tmp_path)
    assert found.intact == ("step-00000002",)
    assert [name for name, _ in found.damaged] == ["step-00000001"]


@pytest.mark.parametrize(
    ("event", "data", "refused"),
    [
        ("restore_end", {"rejected": [{"step": 9, "problem": "x"}]}, 1),
        ("restore_end", {"passed_over": [{"step": 9, "problem": "x", "damaged": True}]}, 1),
        ("restore_end", {"passed_over": [{"step": 9, "problem": "x", "damaged": False}]}, 0),
        ("restore_end", {"passed_over": ["nobody knows"], "rejected": None}, 1),
        ("restore_failed", {"error": "x"}, 1),
        ("restore_end", {}, 0),
    ],
)
def test_what_a_restore_refused_is_remembered_though_it_is_gone(tmp_path, event, data, refused):
    saved(RunFolder(tmp_path / "spot").create())
    events = [replace(one, event=event, data=data) for one in history("spot").events[:2]]
    assert len(looked_at(tmp_path, events).refused) == refused


def test_checkpoints_that_cannot_be_read_are_not_taken_for_good(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "spot").create()
    folder.checkpoints.rmdir()
    assert "not a folder" in looked_at(tmp_path).unknown
    monkeypatch.setitem(__import__("sys").modules, "slurmspot.checkpoint.verify", None)
    assert "not installed" in looked_at(tmp_path).unknown


SPEC = Spec(command=("train",), period_s=7.0)


def test_an_experiment_has_a_baseline_and_a_run_for_each_period(tmp_path):
    plan = Experiment(out=tmp_path, spec=SPEC)
    assert [(name, spec.partition, spec.period_s) for name, spec in plan.specs.items()] == [
        ("baseline", "ondemand", 3600),
        ("period-300s", "spot", 300),
        ("period-900s", "spot", 900),
        ("period-1800s", "spot", 1800),
        ("period-3600s", "spot", 3600),
    ]


@pytest.mark.parametrize("wrong", [{"periods_s": ()}, {"periods_s": (0.0,)},
                                   {"baseline_partition": "spot"}])  # fmt: skip
def test_an_experiment_that_makes_no_sense(tmp_path, wrong):
    with pytest.raises(UsageError):
        Experiment(out=tmp_path, spec=SPEC, **wrong)


def complete(plan):
    """As if all its runs had finished."""
    for name in plan.specs:
        plan.folder(name).create().finished.write_text(json.dumps(FINAL))


def test_a_finished_experiment_is_not_run_again_and_another_is_refused(tmp_path):
    plan = Experiment(out=tmp_path / "study", spec=SPEC, periods_s=(5.0, 9.0))
    complete(plan)
    said = []
    assert carry_out(plan, say=said.append) == []
    assert said == [f"{name}: finished before" for name in plan.specs]
    baseline, spot = runs_of(plan.out)
    assert [one.path.name for one in (baseline, *spot)] == list(plan.specs)
    other = replace(plan, periods_s=(5.0,))
    with pytest.raises(UsageError, match="holds another study"):
        carry_out(other, say=said.append)
    (plan.out / "study.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        carry_out(plan, say=said.append)
    with pytest.raises(UsageError, match="cannot be read"):
        runs_of(plan.out)
    (plan.out / "study.json").write_text('{"runs": []}')
    with pytest.raises(UsageError, match="cannot be read"):
        runs_of(plan.out)
    with pytest.raises(NotFoundError):
        runs_of(tmp_path)


def journal(plan, outcomes, planned=2):
    """A study with a campaign and its journal: (run, index, problem)."""
    document = json.loads((plan.out / "study.json").read_text())
    document["campaign"] = {"digest": "d", "planned": planned}
    (plan.out / "study.json").write_text(json.dumps(document))
    (plan.out / "campaign.jsonl").unlink(missing_ok=True)
    record = Record(plan.out / "campaign.jsonl", "d")
    for run, index, problem in outcomes:
        record.add(Outcome(run=run, index=index, t_ns=0, asked={}, problem=problem))
    record.close()
    return drills_of(plan.out)


def test_a_study_knows_what_of_its_campaign_was_carried_out(tmp_path):
    plan = Experiment(out=tmp_path / "study", spec=SPEC, periods_s=(5.0,))
    complete(plan)
    carry_out(plan, say=str)
    assert drills_of(plan.out) == {}
    run = "period-5s"
    assert journal(plan, [(run, 0, ""), (run, 1, "")]) == {run: ""}
    assert journal(plan, [(run, 0, "no effect"), (run, 0, ""), (run, 1, "")]) == {run: ""}
    assert journal(plan, [(run, 0, "")]) == {run: "1 of 2 planned interruptions were made"}
    assert journal(plan, [], None) == {run: "0 of its planned interruptions were made"}
    assert journal(plan, [(run, 0, "")], None) == {run: ""}
    missed = journal(plan, [(run, 0, ""), (run, 1, "no effect")])
    assert missed == {run: "interruption 2 of its campaign was not made: no effect"}


def call(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(["study", *map(str, argv)])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_gate_is_shut_for_runs_of_which_nothing_is_known(tmp_path, capsys):
    plan = Experiment(out=tmp_path / "study", spec=SPEC, periods_s=(5.0,))
    complete(plan)
    carry_out(plan, say=str)
    code, out, err = call(capsys, "gate", plan.out, "--json")
    answer = json.loads(out)
    assert (code, answer["open"], err) == (1, False, "")
    wrong = {(one["run"], one["check"]) for one in answer["findings"] if not one["holds"]}
    assert wrong == {
        ("baseline", "integrity"),
        ("period-5s", "integrity"),
        ("period-5s", "recovered"),
        ("period-5s", "saves"),
    }
    code, out, _ = call(capsys, "gate", plan.folder("period-5s").path,
                        "--baseline", plan.folder("baseline").path)  # fmt: skip
    assert code == 1
    assert out.endswith("the gate is shut: the spot ratio must not be raised\n")


@pytest.mark.parametrize("argv", [["gate"], ["gate", "a", "b"], ["gate", "a", "--tolerance", "-1"],
                                  ["run"], ["run", "--period-s", "0", "--", "x"]])  # fmt: skip
def test_wrong_use(tmp_path, capsys, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert err
    assert list(tmp_path.iterdir()) == []


def test_a_report_reads_no_checkpoint(tmp_path, capsys):
    plan = Experiment(out=tmp_path / "study", spec=SPEC, periods_s=(5.0,))
    complete(plan)
    carry_out(plan, say=str)
    page = tmp_path / "page.html"
    code, out, _ = call(capsys, "report", plan.out, "-o", page)
    assert code == 0
    assert "period-5s" in out
    assert "<html" in page.read_text()
