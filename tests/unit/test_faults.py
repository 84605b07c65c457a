"""Faults, traces, campaigns and the journal: values in, values out."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from slurmspot.errors import FinishedError, NotFoundError, SlurmspotError, UsageError
from slurmspot.events import Event, read_events
from slurmspot.faults import journal as journals
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.conduct import conduct
from slurmspot.faults.fault import PROFILES, Aim, Fault, Target, at_fraction, default_target
from slurmspot.faults.injector import Injection
from slurmspot.faults.record import Outcome, Record
from slurmspot.faults.trace import Reclaim, load

TRACES = Path(__file__).parents[1] / "data" / "traces"
NODES = ("n0", "n1", "n2")


# ---------------------------------------------------------------- what to hit


@pytest.mark.parametrize(
    ("text", "picked", "shown"),
    [
        ("gang", NODES, "gang"),
        ("node", ("n2",), "nodes:1"),
        ("node:n0", ("n0",), "nodes:n0"),
        ("nodes:2", ("n1", "n2"), "nodes:2"),
        ("nodes:n2,n0", ("n2", "n0"), "nodes:n2,n0"),
        ("rank:1", NODES, "rank:1"),
    ],
)
def test_targets(text, picked, shown):
    target = Target.parse(text)
    assert target.pick(NODES) == picked
    assert str(target) == shown


@pytest.mark.parametrize("text", ["", "everything", "gang:2", "rank", "rank:x", "nodes:0"])
def test_what_is_no_target(text):
    with pytest.raises(UsageError, match="nothing that can be hit"):
        Target.parse(text)


def test_nodes_that_the_job_does_not_have():
    with pytest.raises(NotFoundError, match="does not run on n9"):
        Target.parse("node:n9").pick(NODES)
    with pytest.raises(NotFoundError, match="3 nodes, not 4"):
        Target.parse("nodes:4").pick(NODES)
    assert Target(kind="nodes", count=4, at_most=True).pick(NODES) == NODES


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "needs a profile"),
        ({"profile": "magic"}, "no way to take"),
        ({"profile": "slurm", "colour": 1}, "no setting 'colour'"),
        ({"profile": "slurm", "in_phase": "sleep"}, "'sleep' is none"),
        ({"profile": "slurm", "at_fraction": "half"}, "neither a number nor a range"),
        ({"profile": "slurm", "at_fraction": 1.5}, "between 0 and 1"),
        ({"profile": "slurm", "at_step": -1}, "lies in the future"),
        ({"profile": "slurm", "hold_s": -1}, "not negative"),
        ({"profile": "slurm", "hold_s": "long"}, "wrong type"),
        ({"profile": "slurm", "target": "rank:0"}, "cannot be aimed at"),
        ({"profile": "kill-rank", "target": "gang"}, "cannot be aimed at"),
        ({"profile": "kill", "target": "node"}, "every rank"),
    ],
)
def test_faults_that_make_no_sense(table, words):
    with pytest.raises(UsageError, match=words):
        Fault.of(table)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_a_target_and_an_action(profile):
    from slurmspot.faults.actions import ACTIONS

    fault = Fault.of({"profile": profile})
    assert str(fault.target) == str(Target.parse(default_target(profile)))
    assert profile in ACTIONS


def test_windows_and_names():
    assert Fault(profile="cloud-aws").window == 120
    assert Fault(profile="cloud-gcp", window_s=5).window == 5
    assert Fault(profile="slurm").kind == "preempt"
    assert Fault(profile="forced").kind == "forced"
    assert Fault.of({"profile": "slurm", "at_step": 5, "hold_s": 1}).aim == Aim(at_step=5)


def test_a_range_is_drawn_by_the_seed():
    drawn = {at_fraction("0.2-0.8", seed) for seed in range(20)}
    assert len(drawn) == 20
    assert all(0.2 <= value <= 0.8 for value in drawn)
    assert at_fraction("0.2-0.8", 3) in drawn
    assert at_fraction("0.5", 3) == 0.5


# ---------------------------------------------------------------- traces


def test_both_formats():
    assert load(TRACES / "counts.json") == (
        Reclaim(at_s=90, nodes=1),
        Reclaim(at_s=180, nodes=4),
        Reclaim(at_s=270, nodes=2),
    )
    assert load(TRACES / "moves.csv") == (Reclaim(at_s=60, nodes=1), Reclaim(at_s=120, nodes=2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"metadata": {"gap_seconds": 30}, "data": [1, null, 1]}', "has a hole: tick 1"),
        ('{"metadata": {"gap_seconds": 30}, "data": [1, -1]}', "has a hole"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "is no trace"),
        ('{"data": [1]}', "is no trace"),
        ("{", "not valid JSON"),
        ("5,add,a\n3,add,b\n", "out of order at line 2"),
        ("5,remove,a\n", "hole before line 1"),
        ("5,add,a\n6,add,a\n", "hole before line 2"),
        ("when,what,who\n", "line 1 of"),
        ("5,add\n", "line 1 of"),
    ],
)
def test_broken_traces(tmp_path, text, words):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        load(path)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot read the trace"):
        load(tmp_path / "nothing")


def test_a_trace_without_an_event(tmp_path):
    (tmp_path / "t").write_text('{"metadata": {"gap_seconds": 30}, "data": [1, 1, 2]}')
    assert load(tmp_path / "t") == ()


# ---------------------------------------------------------------- campaigns


def campaign(tmp_path, text):
    path = tmp_path / "campaign.toml"
    path.write_text(text)
    return Campaign.read(path)


def test_a_list_is_carried_out_in_order(tmp_path):
    plan = list(
        campaign(
            tmp_path,
            '[[fault]]\nprofile = "slurm"\nat_step = 5\n[[fault]]\nprofile = "forced"\n'
            'target = "gang"\nin_phase = "commit"\n',
        ).plan(0)
    )
    assert [fault.profile for fault in plan] == ["slurm", "forced"]
    assert [fault.aim for fault in plan] == [Aim(at_step=5), Aim(in_phase="commit")]


def test_poisson_has_its_mean_and_is_drawn_again_the_same(tmp_path):
    text = 'schedule = "poisson"\nmean_s = 60\ncount = 2000\nseed = 1\n'
    text += '[[fault]]\nprofile = "slurm"\nweight = 3\n[[fault]]\nprofile = "kill-rank"\n'
    found = campaign(tmp_path, text)
    plan = list(found.plan(0))
    assert plan == list(found.plan(0))
    assert plan != list(found.plan(1))
    assert len(plan) == 2000
    assert sum(fault.aim.after_s for fault in plan) / 2000 == pytest.approx(60, rel=0.1)
    assert sum(fault.profile == "slurm" for fault in plan) / 2000 == pytest.approx(0.75, rel=0.1)


def test_a_trace_is_replayed_in_scaled_time(tmp_path):
    text = f'schedule = "trace"\ntrace = "{TRACES / "counts.json"}"\nscale = 0.1\n'
    plan = list(campaign(tmp_path, text + '[[fault]]\nprofile = "forced"\n').plan(0))
    assert [fault.aim.after_s for fault in plan] == [9, 9, 9]
    assert [fault.target.count for fault in plan] == [1, 4, 2]
    assert plan[1].target.pick(NODES) == NODES  # the job has no more


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least one"),
        ("seed = ", "not valid TOML"),
        ('speed = 1\n[[fault]]\nprofile = "slurm"\n', "no setting 'speed'"),
        ('schedule = "whim"\n[[fault]]\nprofile = "slurm"\n', "schedule='whim'"),
        ('schedule = "trace"\n[[fault]]\nprofile = "slurm"\n', "needs a trace"),
        ('schedule = "trace"\ntrace = "holes.csv"\n[[fault]]\nprofile = "slurm"\n', "has a hole"),
        ('mean_s = 0\n[[fault]]\nprofile = "slurm"\n', "mean_s=0 is not above 0"),
        ('mean_s = "x"\n[[fault]]\nprofile = "slurm"\n', "wrong type"),
        ('[[fault]]\nprofile = "slurm"\n[[fault]]\nprofile = "magic"\n', "no way to take"),
    ],
)
def test_broken_campaigns(tmp_path, text, words):
    (tmp_path / "holes.csv").write_text("5,add,a\n6,add,a\n")
    with pytest.raises(UsageError, match=words):
        campaign(tmp_path, text)


def test_a_campaign_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        Campaign.read(tmp_path / "nothing.toml")


class Hand:
    """Injects into nothing; fails where it is told to."""

    error = SlurmspotError("it was not seen to take effect", why="waited")

    def __init__(self, *, fails=(), finishes_after=99, lost=()):
        self.fails, self.finishes_after, self.lost = fails, finishes_after, lost
        self.done, self.undone, self.waited = [], 0, 0

    def inject(self, fault):
        if len(self.done) in self.fails:
            raise self.error
        self.done.append(fault)
        return Injection(
            kind=fault.kind,
            job_id="1",
            nodes=("n0",),
            notice=True,
            noticed=True,
            at_step=3,
            phase=fault.aim.in_phase,
            inside=None,
            seconds=1.5,
        )

    def await_training(self, deadline_s):
        self.waited += 1
        if len(self.done) in self.lost:
            raise SlurmspotError("waited in vain for the run to train again")
        return len(self.done) < self.finishes_after

    def undo(self):
        self.undone += 1
        return []


THREE = '[[fault]]\nprofile = "slurm"\n[[fault]]\nprofile = "forced"\nin_phase = "restore"\n'
THREE += '[[fault]]\nprofile = "kill"\n'


def go(tmp_path, plan, hands, **more):
    record, said = Record(tmp_path / "out" / "campaign.jsonl", plan.digest), []
    problems = conduct(
        plan, {run: lambda _, h=h: h for run, h in hands.items()}, record, say=said.append, **more
    )
    record.close()
    return problems, said


def test_every_run_gets_what_is_planned_for_it(tmp_path):
    hands = {"a": Hand(), "b": Hand()}
    problems, said = go(tmp_path, campaign(tmp_path, THREE), hands)
    assert problems == []
    for hand in hands.values():
        assert [fault.profile for fault in hand.done] == ["slurm", "forced", "kill"]
        assert hand.waited == 2  # restore is over once the run trains again
    assert len(said) == 6
    lines = [
        json.loads(line)
        for line in (tmp_path / "out/campaign.jsonl").read_text().split("\n")
        if line
    ]
    assert len(lines) == 7
    assert {line["seen"]["kind"] for line in lines[1:]} == {"preempt", "forced", "kill"}


def test_an_injection_without_effect_fails_the_campaign_and_is_tried_again(tmp_path):
    plan, hand = campaign(tmp_path, THREE), Hand(fails={1})
    problems, said = go(tmp_path, plan, {"a": hand})
    assert len(problems) == 1
    assert "injection 2: it was not seen" in problems[0]
    assert "NOT DONE" in said[-1]
    again = Hand()
    assert go(tmp_path, plan, {"a": again})[0] == []
    assert [fault.profile for fault in again.done] == ["forced", "kill"]
    assert (hand.undone, again.undone) == (0, 1)
    third = Hand()
    assert go(tmp_path, plan, {"a": third})[0] == []
    assert third.done == []


def test_a_run_that_does_not_come_back_fails_the_campaign(tmp_path):
    problems, _ = go(tmp_path, campaign(tmp_path, THREE), {"a": Hand(lost={2})})
    assert "injection 3: waited in vain" in problems[0]


def test_a_list_must_be_done_before_the_run_finishes(tmp_path):
    problems, _ = go(tmp_path, campaign(tmp_path, THREE), {"a": Hand(finishes_after=2)})
    assert "had finished before" in problems[0]
    text = 'schedule = "poisson"\n[[fault]]\nprofile = "slurm"\n'
    (tmp_path / "p").mkdir()
    hand = Hand(finishes_after=4)
    assert go(tmp_path / "p", campaign(tmp_path / "p", text), {"a": hand})[0] == []
    assert len(hand.done) == 4


def test_a_run_that_finishes_before_the_next_moment_ends_what_is_drawn_and_fails_a_list(tmp_path):
    text = 'schedule = "poisson"\n[[fault]]\nprofile = "slurm"\n'
    for plan, problems in ((text, 0), (THREE, 1)):
        folder = tmp_path / str(problems)
        folder.mkdir()
        hand = Hand(fails={1})
        hand.error = FinishedError("the run finished while waiting for its moment")
        assert len(go(folder, campaign(folder, plan), {"a": hand})[0]) == problems
        assert len(hand.done) == 1


def test_a_campaign_that_died_at_once_is_put_right_as_well(tmp_path):
    plan, hand = campaign(tmp_path, THREE), Hand()
    Record(tmp_path / "out" / "campaign.jsonl", plan.digest).close()
    assert go(tmp_path, plan, {"a": hand})[0] == []
    assert (hand.undone, len(hand.done)) == (1, 3)


def test_a_campaign_ends_in_time(tmp_path):
    text = 'schedule = "poisson"\nstop_after_s = 10\n[[fault]]\nprofile = "slurm"\n'
    clock = iter(range(0, 100, 3)).__next__
    hand = Hand()
    assert go(tmp_path, campaign(tmp_path, text), {"a": hand}, clock=clock)[0] == []
    assert len(hand.done) == 3


def test_an_interrupted_hand_says_so(tmp_path):
    plan = campaign(tmp_path, THREE)
    record = Record(tmp_path / "campaign.jsonl", plan.digest)

    def make(wait):
        hand = Hand()

        def await_training(_):
            raise KeyboardInterrupt

        hand.await_training = await_training
        return hand

    with pytest.raises(KeyboardInterrupt):
        conduct(plan, {"a": make}, record, say=lambda _: None)
    record.close()


def test_a_record_of_another_campaign_is_refused_and_a_torn_line_is_not(tmp_path):
    path = tmp_path / "campaign.jsonl"
    record = Record(path, "one")
    record.add(Outcome(run="a", index=0, t_ns=1, asked={}, seen={}))
    record.close()
    with path.open("a") as file:
        file.write('{"run": "a", "ind')
    again = Record(path, "one")
    assert [outcome.index for outcome in again.outcomes("a")] == [0]
    again.add(Outcome(run="a", index=1, t_ns=1, asked={}, seen={}))
    again.close()
    third = Record(path, "one")
    assert len(third.outcomes("a")) == 2
    third.close()
    with pytest.raises(UsageError, match="another campaign"):
        Record(path, "two")


# ---------------------------------------------------------------- the journal


def test_what_is_owed_is_what_was_promised_and_not_kept(tmp_path):
    journal = journals.Journal(tmp_path)
    journal.promise("node", "n0")
    journal.promise("node", "n1")
    journal.promise("hold", "7")
    journal.keep("node", "n0")
    journal.close()
    assert journals.owed(journals.read_journal(tmp_path)) == [("node", "n1"), ("hold", "7")]


def test_a_promise_that_cannot_be_written_is_not_made(tmp_path):
    journal = journals.Journal(tmp_path)
    journal.close()
    with pytest.raises(SlurmspotError, match="cannot write the journal"):
        journal.promise("node", "n0")


def test_a_silent_journal_leaves_nothing(tmp_path):
    journal = journals.Silent()
    journal.promise("node", "n0")
    journal.close()
    assert read_events(tmp_path) == []


def test_an_event_of_a_fault_can_be_read_back():
    fault = Fault.of({"profile": "cloud-aws", "target": "node", "at_step": 3})
    event = Event(
        t_ns=0,
        mono_ns=0,
        event="inject",
        step=1,
        attempt="injector",
        rank="1",
        data={"fault": asdict(fault)},
    )
    assert json.loads(json.dumps(event.data))["fault"]["aim"]["at_step"] == 3
