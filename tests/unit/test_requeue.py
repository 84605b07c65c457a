"""What becomes of a job when its ranks have left."""

import pytest

from slurmspot.cluster.command import Output
from slurmspot.events import Event, EventWriter, read_events
from slurmspot.job import requeue
from slurmspot.job.requeue import (
    MAX_CRASHES,
    PEER_LOST,
    WANTS_REQUEUE,
    crashes_without_progress,
    decide,
)
from slurmspot.settings import JobEnvironment


@pytest.mark.parametrize(
    ("exit_code", "requeued", "ends_with"),
    [
        (0, False, 0),
        (WANTS_REQUEUE, True, WANTS_REQUEUE),
        (PEER_LOST, True, WANTS_REQUEUE),
        (128 + 9, True, WANTS_REQUEUE),
        (128 + 10, True, WANTS_REQUEUE),
        (1, False, 1),
        (127, False, 127),
    ],
)
def test_what_each_exit_code_means(exit_code, requeued, ends_with):
    decision = decide(exit_code, finished=False, failed=None, crashes=0)
    assert (decision.requeue, decision.exit_code) == (requeued, ends_with)


def test_a_finished_run_is_never_run_again():
    for exit_code in (0, 1, WANTS_REQUEUE, 137):
        decision = decide(exit_code, finished=True, failed=None, crashes=0)
        assert (decision.requeue, decision.exit_code) == (False, 0)


def test_a_fault_of_its_own_is_not_hidden_by_the_ranks_it_took_along():
    decision = decide(PEER_LOST, finished=False, failed="rank 1 failed: ValueError", crashes=0)
    assert not decision.requeue
    assert "ValueError" in decision.reason


def test_dying_again_and_again_without_progress_comes_to_an_end():
    assert decide(137, finished=False, failed=None, crashes=MAX_CRASHES - 1).requeue
    last = decide(137, finished=False, failed=None, crashes=MAX_CRASHES)
    assert (last.requeue, last.exit_code) == (False, 137)


def _event(name, step=None, **data):
    return Event(t_ns=0, mono_ns=0, event=name, step=step, attempt="1-0", rank="0", data=data)


def test_only_a_new_step_made_durable_counts_as_progress():
    killed = _event("requeue_asked", exit_code=137)
    noticed = _event("requeue_asked", exit_code=WANTS_REQUEUE)
    assert crashes_without_progress([]) == 0
    assert crashes_without_progress([_event("commit", 5), killed, noticed, killed]) == 2
    assert crashes_without_progress([_event("commit", 5), killed, _event("commit", 5)]) == 1
    assert crashes_without_progress([_event("commit", 5), killed, _event("commit", 6)]) == 0


def test_a_commit_on_the_nodes_disks_is_progress_once_an_attempt_has_found_it():
    """Nodes that die one after the other take their disks with them; those that stay do not."""
    killed = _event("requeue_asked", exit_code=137)
    local = [_event("commit", step, tier="local", trigger="period") for step in range(1, 9)]
    lost = [event for commit in local[:3] for event in (commit, killed)]
    assert crashes_without_progress(lost) == 3
    found = _event("commit", 3, tier="remote", trigger="restore")
    assert crashes_without_progress([*lost, found]) == 0
    assert crashes_without_progress([*lost, found, local[3], killed]) == 1
    drained = _event("commit", 4, tier="remote", trigger="period")
    assert crashes_without_progress([*lost, found, local[3], drained, killed, local[4]]) == 1


class Cluster:
    """A controller with one job in a given state; remembers what it was asked to do."""

    def __init__(self, state="RUNNING"):
        self.done = []
        self.state = state

    def __call__(self, argv, stdin=None):
        if "show" in argv:
            text = f"JobId=7 JobState={self.state}\n"
            return Output(stdout=text, stderr="", returncode=0)
        self.done.append(list(argv))
        return Output(stdout="", stderr="Job is no longer pending", returncode=1)


def test_a_refused_requeue_leaves_the_job_to_slurm(tmp_path):
    cluster = Cluster()
    job = JobEnvironment(run=tmp_path, job_id="7_0", restart=2)
    assert requeue.finish(WANTS_REQUEUE, job, runner=cluster) == WANTS_REQUEUE
    assert cluster.done == [["scontrol", "requeue", "7_0"]]


def test_ranks_that_srun_killed_after_the_save_count_as_saved(tmp_path):
    log = EventWriter(tmp_path / "events", "7-0", 1)
    log.write("exit", code=WANTS_REQUEUE)
    log.close()
    job = JobEnvironment(run=tmp_path, job_id="7")
    assert requeue.finish(143, job, runner=Cluster()) == WANTS_REQUEUE
    asked = next(e for e in read_events(tmp_path / "events") if e.event == "requeue_asked")
    assert asked.data["exit_code"] == WANTS_REQUEUE


def test_the_budget_is_read_from_the_run_s_own_log(tmp_path):
    job = JobEnvironment(run=tmp_path, job_id="7")
    for restart in range(MAX_CRASHES):
        log = EventWriter(tmp_path / "events", f"7-{restart}", "batch")
        log.write("requeue_asked", exit_code=137)
        log.close()
    cluster = Cluster()
    assert requeue.finish(137, job, runner=cluster) == 137
    assert cluster.done == []


def test_an_error_of_a_rank_in_this_attempt_ends_the_job(tmp_path):
    log = EventWriter(tmp_path / "events", "7-1", 1)
    log.write("exit", code=1, error="ValueError('lr')")
    log.close()
    cluster = Cluster()
    attempt = JobEnvironment(run=tmp_path, job_id="7", restart=1)
    assert requeue.finish(PEER_LOST, attempt, runner=cluster) == PEER_LOST
    assert cluster.done == []
    later = JobEnvironment(run=tmp_path, job_id="7", restart=2)
    requeue.finish(PEER_LOST, later, runner=cluster)
    assert cluster.done == [["scontrol", "requeue", "7"]]


@pytest.mark.parametrize(
    ("state", "requeued"),
    [
        ("RUNNING RunTime=00:01:00 TimeLimit=1-00:00:00", True),
        ("COMPLETING RunTime=00:01:00 TimeLimit=1-00:00:00", False),
        ("COMPLETING RunTime=00:01:00 TimeLimit=UNLIMITED", False),
        ("CANCELLED RunTime=00:01:00 TimeLimit=1-00:00:00", False),
        ("COMPLETING RunTime=00:01:03 TimeLimit=00:01:00", True),
    ],
)
def test_what_slurm_ends_is_left_to_it_unless_time_ran_out(tmp_path, state, requeued):
    """A cancelled job shows as COMPLETING: to requeue it would bring back what somebody ended."""
    cluster = Cluster(state)
    job = JobEnvironment(run=tmp_path, job_id="7")
    assert requeue.finish(WANTS_REQUEUE, job, runner=cluster) == WANTS_REQUEUE
    assert bool(cluster.done) == requeued


@pytest.mark.parametrize(
    ("told", "began"),
    [
        ([], False),  # srun started nothing
        ([("7-1", "launched")], True),  # no attempt has ever opened a run: its own fault
        ([("7-0", "attempt_start"), ("7-1", "launched")], False),  # the first one could
        ([("7-0", "launched"), ("7-1", "attempt_start")], True),
        ([("7-0", "attempt_start"), ("7-1", "attempt_start")], True),
    ],
)
def test_an_attempt_that_got_less_far_than_earlier_ones_is_not_at_fault(told, began):
    events = [
        Event(t_ns=0, mono_ns=0, event=name, step=None, attempt=attempt, rank="0")
        for attempt, name in told
    ]
    assert requeue.has_begun(events, "7-1") == began
    decision = decide(1, finished=False, failed=None, crashes=0, began=began)
    assert decision.requeue != began
