"""What the controller says, and following a job by it."""

import pytest

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Output, checked
from slurmspot.cluster.watch import follow
from slurmspot.errors import NoSlurmError, NotFoundError, SlurmError, SlurmUnreachableError


def answering(stdout="", stderr="", returncode=0):
    def runner(argv, stdin=None):
        runner.asked.append(list(argv))
        return Output(stdout=stdout, stderr=stderr, returncode=returncode)

    runner.asked = []
    return runner


JOB = (
    "JobId=16 JobName=a b=c UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A Priority=1 "
    "Account=(null) QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
    "Restarts=2 BatchFlag=1 ExitCode=0:0 Partition=spot NodeList=node[0-1] BatchHost=node0\n"
)


def test_a_job_as_the_controller_sees_it():
    job = scontrol.show_job("16", runner=answering(JOB))
    assert job == scontrol.JobState(
        job_id="16",
        state="RUNNING",
        reason="None",
        nodes="node[0-1]",
        partition="spot",
        restarts=2,
        user="ada",
        name="a b=c",
    )
    assert not job.over


def test_values_may_hold_spaces_and_equal_signs():
    line = "A=1 B=two words C= Gres/x=y Trailing="
    assert scontrol.fields(line) == {
        "A": "1",
        "B": "two words",
        "C": "",
        "Gres/x": "y",
        "Trailing": "",
    }


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "REQUEUED", "RESIZING", "COMPLETING"])
def test_states_that_are_not_the_end(state):
    assert not scontrol.JobState(job_id="1", state=state).over


def test_an_unknown_job():
    runner = answering(stderr="slurm_load_jobs error: Invalid job id specified", returncode=1)
    with pytest.raises(NotFoundError, match="no job 9"):
        scontrol.show_job("9", runner=runner)


def test_a_controller_that_does_not_answer():
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    with pytest.raises(SlurmUnreachableError, match="does not answer") as caught:
        checked(answering(stderr=words, returncode=1), ["scontrol", "ping"])
    assert caught.value.exit_code == 4
    assert words in str(caught.value)


def test_an_ordinary_user_is_told_what_an_operator_would_run():
    runner = answering(stderr="slurm_update error: Invalid user id", returncode=1)
    with pytest.raises(SlurmError, match="NodeName=n1 State=DOWN Reason=drill"):
        scontrol.set_node_state("n1", "DOWN", reason="drill", runner=runner)


def test_gpus_of_a_node_are_not_counted_twice():
    nodes = (
        "NodeName=a Gres=gpu:a100:4(S:0-1),shard:8 State=IDLE\n"
        "NodeName=b Gres=gpu:2 State=IDLE\nNodeName=c Gres=(null) State=DOWN*\n"
        "NodeName=d Gres=gpu:a100:2,gpu:h100:1 State=IDLE\n"
    )
    assert scontrol.node_gpus(runner=answering(nodes)) == {"a": 4, "b": 2, "c": 0, "d": 3}
    assert scontrol.node_states(runner=answering(nodes))["c"] == "DOWN*"


def test_a_heterogeneous_job_is_requeued_by_its_leader():
    runner = answering()
    scontrol.requeue("33+1", runner=runner)
    assert runner.asked == [["scontrol", "requeue", "33"]]


UNCONFIGURED = """\
scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
scontrol: error: fetch_config: DNS SRV lookup failed
scontrol: error: _establish_config_source: failed to fetch config
scontrol: fatal: Could not establish a configuration source
"""


def test_a_machine_without_a_cluster_is_not_told_of_its_resolver():
    with pytest.raises(NoSlurmError) as caught:
        checked(answering(stderr=UNCONFIGURED, returncode=1), ["scontrol", "show", "node"])
    assert str(caught.value).startswith(
        "this machine does not know its Slurm cluster\n"
        "  why: Could not establish a configuration source\n"
        "  do:  run this on a login node, or set SLURM_CONF"
    )


class Job:
    """A controller whose job goes through the states given."""

    def __init__(self, *states):
        self.states = list(states)
        self.actions = []

    def __call__(self, argv, stdin=None):
        if argv[:4] != ["scontrol", "--oneliner", "show", "job"]:
            self.actions.append(list(argv[1:]))
            return Output(stdout="", stderr="", returncode=0)
        state = self.states.pop(0)
        if state is None:
            return Output(stdout="", stderr="Invalid job id specified", returncode=1)
        if state == "nowhere":
            return Output(stdout="", stderr=UNCONFIGURED, returncode=1)
        if state == "down":
            return Output(stdout="", stderr="Unable to contact slurm controller", returncode=1)
        return Output(stdout=f"JobId=5 JobName=x {state}\n", stderr="", returncode=0)


def _follow(job):
    return [
        (s.job.state if s.job else None, s.action)
        for s in follow("5", runner=job, wait=lambda _: 0)
    ]


def test_a_job_is_followed_through_its_interruptions():
    job = Job(
        "JobState=PENDING Reason=BeginTime Restarts=0",  # the user's own --begin is respected
        "JobState=RUNNING Reason=None Restarts=0",
        "JobState=PREEMPTED Reason=None Restarts=1",
        "down",
        "JobState=PENDING Reason=BeginTime Restarts=1",
        "JobState=PENDING Reason=BeginTime Restarts=1",  # lifted already: again would put it off
        "JobState=RUNNING Reason=None Restarts=1",
        "JobState=PENDING Reason=BeginTime Restarts=2",
        "JobState=REQUEUE_HOLD Reason=job_requeued_in_held_state Restarts=2",  # somebody's wish
        "JobState=REQUEUE_HOLD Reason=launch_failure_limit_exceeded_requeued_held Restarts=6",
        "JobState=COMPLETED Reason=None Restarts=6",
    )
    assert [state for state, _ in _follow(job)] == [
        *["PENDING", "RUNNING", "PREEMPTED", "UNKNOWN", "PENDING", "PENDING", "RUNNING", "PENDING"],
        *["REQUEUE_HOLD", "REQUEUE_HOLD", "COMPLETED"],
    ]
    lift = ["update", "JobId=5", "StartTime=now+3"]
    assert job.actions == [lift, lift, ["release", "5"]]


def test_a_job_is_not_waited_for_where_there_is_no_cluster():
    """Later on it is an outage: where the configuration comes from the controller, it fails so."""
    with pytest.raises(NoSlurmError):
        _follow(Job("nowhere"))
    running, over = "JobState=RUNNING Reason=None", "JobState=COMPLETED Reason=None"
    states = [state for state, _ in _follow(Job(running, "nowhere", over))]
    assert states == ["RUNNING", "UNKNOWN", "COMPLETED"]


def test_a_job_that_slurm_has_forgotten_is_over():
    assert _follow(Job("JobState=RUNNING Reason=None Restarts=0", None))[-1] == (None, "")
