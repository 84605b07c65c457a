"""The injector over a simulated cluster: what it refuses, what it waits for, what it gives back."""

import getpass
import json
import os

import pytest

from slurmspot.cluster.command import Output
from slurmspot.cluster.scontrol import JobState, Partition
from slurmspot.errors import (
    FinishedError,
    NotFoundError,
    SlurmError,
    SlurmspotError,
    UsageError,
)
from slurmspot.events import EventWriter, read_events
from slurmspot.faults import victim
from slurmspot.faults.fault import Aim, Fault, Target
from slurmspot.faults.injector import Injector
from slurmspot.faults.journal import Journal, owed, read_journal
from slurmspot.runfolder import RunFolder

ME = getpass.getuser()
NOW = Aim()


class Cluster:
    """A backend with one job on two nodes; remembers what is asked, and obeys unless told not to.

    Attributes:
        deaf: the job feels nothing.
    """

    def __init__(self, **job):
        given = {"state": "RUNNING", "nodes": "n[0-1]", "partition": "spot", "user": ME, **job}
        self.state = JobState(job_id="7", **given)
        self.done, self.deaf = [], False
        self.refuses, self.refusal = (), "Invalid user id"

    def job(self, job_id):
        if job_id != "7":
            raise NotFoundError(f"Slurm knows no job {job_id}")
        return self.state

    def partitions(self):
        nodes = ("n0", "n1", "n2")
        return {
            "spot": Partition(name="spot", tier=1, nodes=nodes, grace_s=5),
            "ondemand": Partition(name="ondemand", tier=10, nodes=nodes),
        }

    def node_state(self, node):
        return "MIXED+DRAIN" if f"DRAIN {node}" in self.done else "MIXED"

    def _do(self, *words, ends=True):
        self.done.append(" ".join(words))
        if words[0] in self.refuses:
            raise SlurmError(
                f"you may not set node n1 to {words[0]}",
                why=self.refusal,
                fix="ask one to run: scontrol …",
            )
        if ends and not self.deaf:
            self.state = JobState(job_id="7", state="PENDING", restarts=1, user=ME)

    def requeue(self, job_id, *, hold=False):
        self._do("hold" if hold else "requeue", job_id)

    def release(self, job_id):
        self._do("release", job_id, ends=False)

    def exclude(self, job_id, nodes):
        self._do("exclude", job_id, *nodes, ends=False)

    def set_nodes(self, nodes, state, *, reason=""):
        self._do(state, *nodes, ends=state == "DOWN")

    def signal_ranks(self, job_id, signal):
        self._do("signal", job_id, signal)

    def preempt(self, partition, nodes, hold_s):
        self._do("preempt", partition, *nodes)
        return "8"

    def cancel(self, job_id):
        self._do("cancel", job_id, ends=False)


class Machines:
    def __init__(self):
        self.done = []

    def warn(self, node):
        self.done.append(f"warn {node}")

    def vanish(self, node):
        self.done.append(f"vanish {node}")

    def revive(self, node):
        self.done.append(f"revive {node}")


class Run:
    """A run folder with a job, two ranks in their second attempt, and an injector of it."""

    def __init__(self, path, **job):
        self.folder = RunFolder(path).create()
        self.settings(metadata_url="", hang_s=0)
        self.folder.jobs.write_text('{"job_id": "7"}\n')
        self.cluster, self.machines = Cluster(**job), Machines()
        self.ranks = [EventWriter(self.folder.events, "7-0", rank) for rank in range(2)]
        for number, rank in enumerate(self.ranks):
            rank.write("attempt_start", host=f"n{number}", pid=100 + number)
            rank.write("imports_done")
            rank.write("goal", step=0, total=100)
            rank.beat(10)
        self.commands, self.on_wait = [], lambda: None

    def settings(self, **values):
        self.folder.spec.write_text(json.dumps(values))

    def runner(self, argv, stdin=None):
        self.commands.append(list(argv))
        self.cluster._do("command")
        return Output(stdout="", stderr="", returncode=0)

    def injector(self, **more):
        given = {"machines": self.machines, "deadline_s": 0.05, **more}
        return Injector(
            self.folder,
            backend=self.cluster,
            runner=self.runner,
            wait=lambda _: self.on_wait(),
            **given,
        )

    def inject(self, profile, target="gang", *, deadline_s=1.0, aim=NOW, injector=None, **more):
        fault = Fault(profile=profile, target=Target.parse(target), aim=aim, **more)
        return (injector or self.injector()).inject(fault, deadline_s=deadline_s)

    def journal(self):
        return read_journal(self.folder.events)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.mark.parametrize(
    ("profile", "target", "asked", "machines"),
    [
        ("slurm", "gang", ["preempt ondemand n0 n1", "cancel 8"], []),
        ("slurm", "node", ["preempt ondemand n1", "cancel 8"], []),
        ("requeue", "gang", ["requeue 7"], []),
        ("requeue", "node", ["requeue 7", "exclude 7 n1"], []),
        ("requeue-hold", "gang", ["hold 7", "release 7"], []),
        ("forced", "node", ["DOWN n1"], ["vanish n1", "revive n1"]),
        (
            *("forced", "gang", ["DOWN n0"]),
            ["vanish n0", "vanish n1", "revive n0", "revive n1"],
        ),
        ("node-down", "node:n0", ["DOWN n0"], ["vanish n0", "revive n0"]),
        ("kubernetes", "node", ["DOWN n1"], ["warn n1", "vanish n1", "revive n1"]),
        ("kill", "gang", ["signal 7 KILL"], []),
    ],
)
def test_what_each_profile_does(run, profile, target, asked, machines):
    if profile == "kubernetes":  # the job feels the warning, as it would
        run.on_wait = lambda: run.ranks[0].write("notice", source="SIGTERM")
    more = {"window_s": 0.1} if profile == "kubernetes" else {}
    injection = run.inject(profile, target, hold_s=0, detect_s=0, **more)
    assert run.cluster.done == asked
    assert run.machines.done == machines
    assert injection.at_step == 10
    assert injection.phase is None
    events = [event.event for event in run.journal()]
    assert (events[0], events.count("inject_observed")) == ("inject", 1)
    assert owed(run.journal()) == []


def test_one_rank_is_found_by_what_it_has_logged(run):
    injection = run.inject("kill-rank", "rank:1")
    (command,) = run.commands
    assert "--nodelist=n1" in command
    assert command[-2:] == ["-KILL", "101"]
    assert injection.kind == "kill-rank"


@pytest.mark.parametrize("number", [2, 0])
def test_a_rank_that_is_not_there(run, number):
    run.ranks[0].write("exit", code=75)
    with pytest.raises(NotFoundError, match=f"no rank {number} now"):
        run.inject("kill-rank", f"rank:{number}")
    assert run.commands == []


def test_setting_a_node_down_without_a_machine_to_end(run):
    run.inject("node-down", "node", injector=run.injector(machines=None))
    assert run.cluster.done == ["DOWN n1", "RESUME n1"]
    run.cluster = Cluster()
    run.inject("node-down", "node", keep_machine=True)
    assert run.cluster.done == ["DOWN n1"]
    assert run.machines.done == ["revive n1"]


def test_draining_takes_nothing_and_is_seen_in_the_node(run):
    run.inject("node-down", "node", node_state="DRAIN")
    assert run.cluster.done == ["DRAIN n1"]
    assert run.cluster.state.state == "RUNNING"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"state": "COMPLETED"}, "is not running but completed"),
        ({"state": "PENDING"}, "is not running but pending"),
        ({"user": "somebody"}, f"belongs to somebody, not to {ME}"),
    ],
)
def test_a_job_that_is_not_to_be_hit(tmp_path, job, words):
    run = Run(tmp_path, **job)
    with pytest.raises(UsageError, match=words):
        run.inject("slurm")
    assert run.cluster.done == []
    assert run.journal() == []


def test_an_explicit_flag_allows_anybodys_job(tmp_path):
    run = Run(tmp_path / "a", user="somebody")
    run.inject("slurm", injector=run.injector(any_job=True))
    bare = Run(tmp_path / "b", user="somebody")
    bare.folder.jobs.unlink()  # as with a batch script written by hand: the log names the job
    with pytest.raises(UsageError, match="belongs to somebody"):
        bare.inject("slurm")
    bare.inject("slurm", injector=bare.injector(job_id="7"))
    assert bare.cluster.done == ["preempt ondemand n0 n1", "cancel 8"]


@pytest.mark.parametrize(
    ("profile", "target", "machines", "words"),
    [
        ("forced", "node", None, "nobody here can"),
        ("cloud-aws", "node", Machines(), "own metadata service"),
        ("hang-rank", "rank:0", None, "no watchdog"),
    ],
)
def test_what_cannot_be_done_here(run, profile, target, machines, words):
    with pytest.raises(UsageError, match=words):
        run.inject(profile, target, injector=run.injector(machines=machines))
    assert run.cluster.done == []


def test_a_partition_that_cannot_preempt(run):
    with pytest.raises(UsageError, match="partition nope cannot preempt"):
        run.inject("slurm", partition="nope")


def test_a_node_that_the_job_does_not_have(run):
    with pytest.raises(NotFoundError, match="does not run on n2"):
        run.inject("forced", "node:n2")
    assert run.machines.done == []


def test_an_action_without_effect_is_an_error_and_everything_is_given_back(run):
    run.cluster.deaf = True
    with pytest.raises(SlurmspotError, match="forced was not seen to take effect"):
        run.inject("forced", "node", detect_s=0)
    assert run.machines.done == ["vanish n1", "revive n1"]
    observed = [event for event in run.journal() if event.event == "inject_observed"]
    assert observed[0].data["observed"] is False


def test_without_permission_the_machine_comes_back_and_the_operators_command_is_named(run):
    run.cluster.refuses = ("DOWN",)
    with pytest.raises(SlurmError, match="ask one to run: scontrol"):
        run.inject("forced", "node", detect_s=0)
    assert run.machines.done == ["vanish n1", "revive n1"]


def test_an_operators_right_that_is_missing_leaves_nothing_taken_and_is_the_error(run):
    run.cluster.refuses = ("DOWN", "RESUME")
    with pytest.raises(SlurmError, match="may not set node n1 to DOWN"):
        run.inject("node-down", "node", injector=run.injector(machines=None))
    assert run.cluster.state.state == "RUNNING"
    assert owed(run.journal()) == []


def test_a_cluster_that_powers_no_nodes_down_says_so(run):
    run.cluster.refuses, run.cluster.refusal = ("POWER_DOWN_FORCE",), "Invalid node state specified"
    with pytest.raises(SlurmError, match="SuspendProgram") as refused:
        run.inject("node-down", "node", node_state="POWER_DOWN_FORCE")
    assert "--state DOWN or DRAIN" in str(refused.value)
    assert run.cluster.state.state == "RUNNING"
    assert owed(run.journal()) == []


def test_what_cannot_be_given_back_keeps_nothing_else_from_it(run):
    def revive(node):
        if node == "n0":
            raise SlurmspotError("node n0 is not back")
        run.machines.done.append(f"revive {node}")

    run.machines.revive = revive
    with pytest.raises(SlurmspotError, match="node n0 is not back"):
        run.inject("forced", detect_s=0)
    assert run.machines.done[-1] == "revive n1"
    assert owed(run.journal()) == [("node", "n0")]
    run.machines.revive = lambda node: run.machines.done.append(f"revive {node}")
    assert run.injector().undo() == ["node n0 is back"]


def test_undo_gives_back_what_a_dead_injector_took(run):
    journal = Journal(run.folder.events)
    for what, name in (("node", "n0"), ("node", "n1"), ("hold", "7"), ("preemptor", "8")):
        journal.promise(what, name)
    journal.keep("node", "n0")
    journal.close()
    run.folder.hold.write_text("{}")
    assert run.injector().undo() == ["node n1 is back", "job 7 is released", "job 8 has ended"]
    assert run.machines.done == ["revive n1"]
    assert run.cluster.done == ["release 7", "cancel 8"]
    assert not run.folder.hold.exists()
    assert run.injector().undo() == []


# ---------------------------------------------------------------- aim


def test_a_step_and_a_share_of_all_steps_are_waited_for(run):
    steps = iter(range(11, 200))
    run.on_wait = lambda: [rank.beat(next(steps)) for rank in run.ranks]
    assert run.inject("kill", aim=Aim(at_step=20)).at_step >= 20
    run.cluster = Cluster()
    assert 50 <= run.inject("kill", aim=Aim(at_fraction=0.5)).at_step < 60


def test_a_moment_that_does_not_come(run):
    with pytest.raises(SlurmspotError, match="in vain for step 50"):
        run.inject("kill", aim=Aim(at_step=50), deadline_s=0.05)
    run.folder.finished.write_text("{}")
    with pytest.raises(FinishedError, match="finished while waiting for step 50"):
        run.inject("kill", aim=Aim(at_step=50))
    assert run.cluster.done == []


def test_a_run_that_has_finished_is_not_hit_though_its_processes_are_still_there(run):
    run.folder.finished.write_text("{}")
    for aim in (NOW, Aim(after_s=60)):
        with pytest.raises(FinishedError, match="finished"):
            run.inject("node-down", "node", aim=aim)
    assert run.journal() == []


def test_a_job_that_ends_while_its_moment_is_awaited_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(victim, "_LOOK_S", 0.0)
    run.cluster.state = JobState(job_id="7", state="CANCELLED", user=ME)
    with pytest.raises(SlurmspotError, match="ended while waiting for the job to run"):
        run.inject("kill", aim=Aim(after_s=0.01), deadline_s=60)


def test_a_run_that_finishes_before_it_feels_the_blow_was_not_taken(run):
    real = run.cluster.signal_ranks

    def too_late(job_id, signal):
        run.folder.finished.write_text("{}")
        real(job_id, signal)

    run.cluster.signal_ranks = too_late
    with pytest.raises(SlurmspotError, match="kill had no effect on job 7") as missed:
        run.inject("kill")
    assert missed.value.why == "the run finished first"
    assert run.journal()[-1].data["observed"] is False


def held(run, phase, **more):
    """The ranks obey a request to stand still, until it is withdrawn."""
    state = {}

    def obey():
        asked = run.folder.hold.exists()
        if asked and "held" not in state:
            assert json.loads(run.folder.hold.read_text()) == {"phase": phase, "step": None, **more}
            run.ranks[0].write("held", phase=phase, step=10)
            state["held"] = True

    run.on_wait = obey
    return state


def test_a_phase_is_hit_inside_and_the_log_proves_it(run):
    held(run, "commit")
    injection = run.inject("kill", aim=Aim(in_phase="commit"))
    assert (injection.phase, injection.inside) == ("commit", True)
    assert not run.folder.hold.exists()
    inject, seen = (e for e in run.journal() if e.event.startswith("inject"))
    assert (inject.data["phase"], seen.data["inside"]) == ("commit", True)


def test_a_drain_is_led_in_by_a_signal(run):
    run.cluster.deaf = True
    held(run, "drain")

    def signal(job_id, name):
        run.cluster.done.append(name)
        run.cluster.deaf = name == "USR1"
        if name == "KILL":
            run.cluster.requeue(job_id)

    run.cluster.signal_ranks = signal
    assert run.inject("kill", aim=Aim(in_phase="drain")).inside
    assert run.cluster.done[:2] == ["USR1", "KILL"]


def test_nobody_stands_still_for_us(run):
    with pytest.raises(SlurmspotError, match="in vain for a rank to stand in forward"):
        run.inject("kill", aim=Aim(in_phase="forward"), deadline_s=0.05)
    assert not run.folder.hold.exists()


@pytest.mark.parametrize("started", ["before", "meanwhile"])
def test_ranks_that_cannot_be_held_are_not_waited_for(run, started):
    def start():
        run.ranks[0].write("attempt_start", job_id="7", host="n0", pid=100)

    if started == "before":
        start()
    else:
        run.on_wait = start
    with pytest.raises(UsageError, match="cannot be held in a phase") as refused:
        run.inject("kill", aim=Aim(in_phase="forward"), deadline_s=60)
    assert "without SLURMSPOT_HOLD=1" in str(refused.value)
    assert not run.folder.hold.exists()
    assert run.cluster.done == []


def test_startup_is_hit_before_the_ranks_have_opened_the_run(run):
    starting = JobState(
        job_id="7", state="RUNNING", nodes="n0", partition="spot", user=ME, restarts=1
    )
    run.on_wait = lambda: setattr(run.cluster, "state", starting)
    injection = run.inject("requeue", aim=Aim(in_phase="startup"))
    assert (injection.phase, injection.inside) == ("startup", True)


def test_a_dry_run_touches_nothing(run):
    before = {path.name for path in run.folder.path.rglob("*")}
    for profile, target in (("slurm", "gang"), ("forced", "node"), ("requeue-hold", "gang")):
        run.cluster = Cluster()
        run.inject(profile, target, injector=run.injector(dry=True))
    assert {path.name for path in run.folder.path.rglob("*")} == before


def test_the_journal_lies_in_the_event_log_of_the_run(run):
    run.inject("kill")
    paths = [path.name for path in (run.folder.events / "injector").glob("*.jsonl")]
    assert paths == [f"{os.getpid()}.jsonl"]
    (inject,) = (e for e in read_events(run.folder.events) if e.event == "inject")
    assert inject.data["fault"]["profile"] == "kill"
    assert inject.data["nodes"] == ["n0", "n1"]
