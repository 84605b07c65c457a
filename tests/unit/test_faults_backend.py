"""Both backends ask the same of Slurm: the commands, and the calls to pyslurm, are pinned here."""

import signal
from types import SimpleNamespace

import pytest

from slurmspot.cluster.command import Output
from slurmspot.errors import NotFoundError, SlurmError, SlurmUnreachableError, UsageError
from slurmspot.faults import machines, pyslurm
from slurmspot.faults.backend import Scontrol, dry, resume

PARTITIONS = (
    "PartitionName=spot PriorityTier=1 Nodes=node[0-3] PreemptMode=REQUEUE GraceTime=15"
    " TotalNodes=4\nPartitionName=ondemand PriorityTier=10 Nodes=node[0-3] PreemptMode=OFF"
    " GraceTime=0 TotalNodes=4\n"
)
JOB = (
    "JobId=7 JobName=train UserId=ada(1000) JobState=RUNNING Reason=held_by_user Restarts=2"
    " Partition=spot NodeList=node[0-1]\n"
)


class Commands:
    """Answers what scontrol would and remembers what else it was asked to do."""

    def __init__(self):
        self.done = []

    def __call__(self, argv, stdin=None):
        shown = {"job": JOB, "partition": PARTITIONS, "node": "NodeName=node1 State=MIXED+DRAIN\n"}
        if "show" in argv:
            return Output(stdout=shown[argv[argv.index("show") + 1]], stderr="", returncode=0)
        if argv[:2] == ["scontrol", "--version"]:
            return Output(stdout="slurm-wlm 22.05.8\n", stderr="", returncode=0)
        self.done.append(" ".join(argv))
        return Output(stdout="8;cluster\n", stderr="", returncode=0)


CALLS = []  # what was called on the module that stands for pyslurm


class RPCError(Exception):
    """As pyslurm raises it."""


class Job:
    id, state, state_reason, name, user_name = 7, "RUNNING", "held by user", "train", "ada"
    allocated_nodes, partition, requeue_count = "node[0-1]", "spot", 2
    array_id = array_task_id = heterogeneous_id = heterogeneous_offset = None
    array_tasks_waiting = None

    def __init__(self, job_id):
        self.id = job_id

    @staticmethod
    def load(job_id):
        if job_id == 404:
            raise RPCError("Invalid job id specified")
        return Job(job_id)

    def requeue(self, hold=False):
        CALLS.append(f"Job({self.id}).requeue(hold={hold})")

    def release(self):
        CALLS.append(f"Job({self.id}).release()")

    def cancel(self):
        CALLS.append(f"Job({self.id}).cancel()")

    def modify(self, wish):
        CALLS.append(f"Job({self.id}).modify({wish})")


class Jobs:
    @staticmethod
    def load():
        """Of the array 20 tasks 0 and 1 run; of task 0 pyslurm says None, as of those that wait."""
        waiting, first, task, part = Job(20), Job(22), Job(21), Job(34)
        waiting.array_id, waiting.array_tasks_waiting = 20, "2-9"
        first.array_id = 20
        task.array_id, task.array_task_id = 20, 1
        part.heterogeneous_id, part.heterogeneous_offset = 33, 1
        return {job.id: job for job in (waiting, first, task, part)}


class Described:
    def __init__(self, name="", **wish):
        self.name, self.wish = name, wish

    def __repr__(self):
        return " ".join(f"{k}={v!r}" for k, v in self.wish.items())


class JobSubmitDescription(Described):
    def submit(self):
        CALLS.append(f"submit({self.name} {self})")
        return 8


class Node(Described):
    state = "MIXED+DRAIN"

    @staticmethod
    def load(name):
        return Node(name)

    def modify(self, wish):
        if self.name == "node9":
            raise RPCError("Invalid node name specified")
        if self.name == "node8":
            raise RPCError("Invalid user id")
        if self.name == "node7":
            raise RPCError("Unable to contact slurm controller (connect failure)")
        CALLS.append(f"Node({self.name}).modify({wish})")


class JobStep:
    def __init__(self, job_id, step_id):
        self.name = f"JobStep({job_id}, {step_id})"

    def send_signal(self, number):
        CALLS.append(f"{self.name}.send_signal({number})")


class Partition:
    def __init__(self, tier, mode, grace_s):
        self.priority_tier, self.preempt_mode = tier, mode
        self.preemption_grace_time, self.nodes, self.total_nodes = grace_s, "node[0-3]", 4


class Partitions:
    @staticmethod
    def load():
        return {
            "spot": Partition(1, "REQUEUE", 15),
            "ondemand": Partition(10, "OFF", None),
        }


def module(version="22.5.3"):
    """Stands for the module pyslurm 22.5: its names, and what is called on them, in order."""
    CALLS.clear()
    names = (Job, Jobs, JobStep, JobSubmitDescription, Node, Partitions, RPCError)
    return SimpleNamespace(__version__=version, **{name.__name__: name for name in names})


@pytest.fixture(params=["scontrol", "pyslurm"])
def backend(request):
    if request.param == "scontrol":
        commands = Commands()
        backend = Scontrol(commands)
        backend.done = commands.done
    else:
        backend = pyslurm.load(runner=Commands(), find=lambda _: module())
        backend.done = CALLS
    return backend


def test_both_see_the_same(backend):
    job = backend.job("7")
    assert (job.job_id, job.state, job.nodes, job.partition) == (
        "7",
        "RUNNING",
        "node[0-1]",
        "spot",
    )
    assert (job.restarts, job.user, job.name, job.reason) == (2, "ada", "train", "held_by_user")
    spot, ondemand = (backend.partitions()[name] for name in ("spot", "ondemand"))
    assert (spot.tier, spot.nodes[0], len(spot.nodes)) == (1, "node0", 4)
    assert (spot.preempt_mode, spot.grace_s, ondemand.grace_s) == ("REQUEUE", 15, 0)
    assert backend.node_state("node1") == "MIXED+DRAIN"


def test_both_are_asked_to_do_the_same(backend):
    backend.requeue("7")
    backend.requeue("7", hold=True)
    backend.release("7")
    backend.exclude("7", ["node0", "node1"])
    backend.set_nodes(["node0", "node1"], "DOWN", reason="drill")
    backend.set_nodes(["node0"], "RESUME")
    backend.signal_ranks("7", "KILL")
    backend.cancel("7")
    assert backend.preempt("ondemand", ["node0", "node1"], 5) == "8"
    if isinstance(backend, Scontrol):
        assert backend.done == [
            "scontrol requeue 7",
            "scontrol requeuehold 7",
            "scontrol release 7",
            "scontrol update JobId=7 ExcNodeList=node0,node1",
            "scontrol update NodeName=node0,node1 State=DOWN Reason=drill",
            "scontrol update NodeName=node0 State=RESUME",
            "scancel --signal=KILL 7.0",
            "scancel 7",
            (
                "sbatch --parsable --partition=ondemand --nodes=2 --nodelist=node0,node1"
                " --exclusive --job-name=slurmspot-preemptor --output=/dev/null"
            ),
        ]
    else:
        assert backend.done == [
            "Job(7).requeue(hold=False)",
            "Job(7).requeue(hold=True)",
            "Job(7).release()",
            "Job(7).modify(excluded_nodes=['node0', 'node1'])",
            "Node(node0,node1).modify(state='DOWN' reason='drill')",
            "Node(node0).modify(state='RESUME')",
            "JobStep(7, 0).send_signal(SIGKILL)",
            "Job(7).cancel()",
            (
                "submit(slurmspot-preemptor partitions='ondemand' nodes=2 ntasks=2"
                " required_nodes=['node0', 'node1'] resource_sharing='no'"
                " standard_output='/dev/null' working_directory='/'"
                " script='#!/bin/sh\\nexec sleep 5\\n')"
            ),
        ]


def test_pyslurm_finds_array_tasks_and_parts_of_jobs():
    backend = pyslurm.Pyslurm(module())
    backend.release("20_0")
    backend.release("20_1")
    backend.release("33+1")
    backend.requeue("33+1")  # as a whole, by its leader
    assert CALLS == [
        "Job(22).release()",
        "Job(21).release()",
        "Job(34).release()",
        "Job(33).requeue(hold=False)",
    ]
    with pytest.raises(NotFoundError):
        backend.release("20_2")


def test_what_pyslurm_is_refused():
    backend = pyslurm.Pyslurm(module())
    with pytest.raises(NotFoundError, match="Slurm knows no job 404"):
        backend.job("404")
    with pytest.raises(SlurmError, match="update of nodes node9 was refused"):
        backend.set_nodes(["node9"], "DOWN")
    with pytest.raises(SlurmError, match="ask an operator"):
        backend.set_nodes(["node8"], "DOWN")
    with pytest.raises(SlurmUnreachableError):
        backend.set_nodes(["node7"], "DOWN")


def test_a_pyslurm_of_another_release_says_which_is_needed():
    with pytest.raises(
        UsageError, match=r"25.11.0 does not fit this cluster's Slurm 22.05.8"
    ) as no:
        pyslurm.load(runner=Commands(), find=lambda _: module("25.11.0"))
    assert "install pyslurm 22.5," in str(no.value)


def test_without_pyslurm_its_backend_says_so():
    def find(_):
        raise ImportError("libslurm.so.38: cannot open shared object file")

    with pytest.raises(UsageError, match="pyslurm cannot be loaded") as no:
        pyslurm.load(runner=Commands(), find=find)
    assert "libslurm.so.38" in str(no.value)


def test_a_dry_runner_asks_but_does_nothing():
    real, shown = Commands(), []

    def show(argv, stdin=None):
        shown.append(argv)
        return Output(stdout="JOBID", stderr="", returncode=0)

    backend = Scontrol(dry(real, show))
    assert backend.job("7").state == "RUNNING"
    backend.requeue("7")
    backend.set_nodes(["node0"], "DOWN")
    assert real.done == []
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("state", "back"),
    [
        ("IDLE", True),
        ("MIXED+NOT_RESPONDING", True),
        ("IDLE+POWERING_DOWN", True),
        ("DOWN*+NOT_RESPONDING", False),
        ("ALLOCATED+DRAIN", False),
    ],
)
def test_a_node_that_has_come_back_by_itself_need_not_be_resumed(state, back):
    def run(argv, stdin=None):
        if "show" in argv:
            return Output(stdout=f"NodeName=n1 State={state}\n", stderr="", returncode=0)
        return Output(stdout="", stderr="Invalid node state specified", returncode=1)

    if back:
        resume(Scontrol(run), "n1")
    else:
        with pytest.raises(SlurmError, match="Invalid node state"):
            resume(Scontrol(run), "n1")


# ---------------------------------------------------------------- machines


def test_a_terminate_command_is_a_list_of_words_and_never_a_shell():
    done = []

    def run(argv, stdin=None):
        done.append(list(argv))
        return Output(stdout="", stderr="", returncode=0)

    template = "aws ec2 terminate --name '{node}; rm -rf /' --tag={node}"
    ends = machines.Command(template, Scontrol(run), runner=run)
    ends.vanish("n1")
    ends.revive("n1")
    assert done == [
        ["aws", "ec2", "terminate", "--name", "n1; rm -rf /", "--tag=n1"],
        ["scontrol", "update", "NodeName=n1", "State=RESUME"],
    ]
    assert not isinstance(ends, machines.CanWarn)


@pytest.mark.parametrize("template", ["", "stop-it", "{node}", "say 'unclosed {node}"])
def test_a_terminate_command_must_name_the_machine(template):
    with pytest.raises(UsageError, match="--terminate-command"):
        machines.Command(template, Scontrol())


def test_a_rank_is_signalled_from_a_step_of_its_own():
    commands = Commands()
    machines.signal_process("7", "node1", 4242, signal.SIGSTOP, runner=commands)
    assert commands.done == [
        (
            "srun --jobid=7 --overlap --mem=0 --gres=none --nodes=1 --ntasks=1 --nodelist=node1"
            " kill -STOP 4242"
        )
    ]
