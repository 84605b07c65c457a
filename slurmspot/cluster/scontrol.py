"""scontrol, squeue and scancel: what slurmspot asks of Slurm, as functions over a Runner."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmspot import settings
from slurmspot.cluster.command import Runner, checked, run
from slurmspot.errors import NotFoundError, SlurmError
from slurmspot.hostlist import expand

_PAIR = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")


def fields(line: str) -> dict[str, str]:
    """One record of ``scontrol --oneliner``: ``Name=value`` pairs whose values may hold spaces."""
    found = list(_PAIR.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {
        match.group(1): line[match.end() : end].strip()
        for match, end in zip(found, ends, strict=True)
    }


def _show(kind: str, names: Sequence[str] = (), *, runner: Runner) -> list[dict[str, str]]:
    argv = ["scontrol", "--oneliner", "show", kind, *names]
    try:
        text = checked(runner, argv)
    except SlurmError as error:
        if "Invalid job id" in (error.why or "") or "not found" in (error.why or ""):
            raise NotFoundError(f"Slurm knows no {kind} {' '.join(names)}", why=error.why) from None
        raise
    return [fields(line) for line in text.splitlines() if _PAIR.match(line)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as the controller sees it now.

    Attributes:
        state: base state (``RUNNING``, ``PENDING``, ``COMPLETED``, ``REQUEUE_HOLD``, …).
        reason: why it is in that state (``BeginTime``, ``Resources``, …).
        nodes: allocated nodes, as Slurm writes the list; empty when there are none.
        restarts: how often it has been requeued.
        out_of_time: it has run for as long as its time limit.
    """

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    partition: str = ""
    restarts: int = 0
    user: str = ""
    name: str = ""
    out_of_time: bool = False

    @property
    def ending(self) -> bool:
        """Whether Slurm has already decided that this attempt ends, for whatever reason."""
        return self.state == "COMPLETING" or self.over

    @property
    def over(self) -> bool:
        """Whether the job has ended and no later attempt is planned."""
        return self.state in {
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "OUT_OF_MEMORY",
            "DEADLINE",
            "BOOT_FAIL",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition; ``tier`` is its PriorityTier, ``gpus`` counts gres/gpu over all its nodes."""

    name: str
    tier: int
    nodes: tuple[str, ...] = field(default=())
    preempt_mode: str = ""
    grace_s: int = 0
    total_nodes: int = 0


def show_job(job_id: str, *, runner: Runner = run) -> JobState:
    """The current state of a job (or array task).

    Raises:
        NotFoundError: the controller has forgotten it (MinJobAge after its end) or never knew it.
        SlurmUnreachableError: the controller does not answer.
    """
    records = _show("job", [job_id], runner=runner)
    if not records:
        raise NotFoundError(f"Slurm knows no job {job_id}")
    record = records[0]
    return JobState(
        job_id=job_id,
        state=record.get("JobState", "UNKNOWN").split(",")[0],
        reason=record.get("Reason", ""),
        nodes=record.get("NodeList", "").replace("(null)", ""),
        partition=record.get("Partition", ""),
        restarts=int(record.get("Restarts", "0") or 0),
        user=record.get("UserId", "").partition("(")[0],
        name=record.get("JobName", ""),
        out_of_time=math.inf > _seconds(record.get("RunTime")) >= _seconds(record.get("TimeLimit")),
    )


def _seconds(text: str | None) -> float:
    """Seconds of ``[days-]hours:minutes:seconds``; infinite for UNLIMITED and what is missing."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text or "")
    if match is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def requeue(job_id: str, *, runner: Runner = run) -> None:
    """Put a running job back into the queue; its processes get SIGTERM, then SIGKILL.

    A heterogeneous job is requeued as a whole, by the id of its leader.
    """
    checked(runner, ["scontrol", "requeue", job_id.partition("+")[0]])


# A node refuses a job whose credential is not newer, in whole seconds, than the moment at which it
# killed the attempt before ("Job credential revoked"), and the job ends FAILED for good. Slurm's
# own backoff of about 121 s keeps clear of that; so does this, with room for clocks that differ.
SAFE_BACKOFF_S = 3


def requeue_hold(job_id: str, *, runner: Runner = run) -> None:
    """Put a running job back into the queue and hold it there until :func:`release`."""
    checked(runner, ["scontrol", "requeuehold", job_id.partition("+")[0]])


def exclude_nodes(job_id: str, nodes: Sequence[str], *, runner: Runner = run) -> None:
    """Keep a pending job off these nodes, and off no others. Its owner may."""
    checked(runner, ["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def lift_backoff(job_id: str, *, runner: Runner = run) -> None:
    """Let a requeued job start in a few seconds instead of after Slurm's backoff (about 121 s)."""
    start = f"StartTime=now+{SAFE_BACKOFF_S}"
    checked(runner, ["scontrol", "update", f"JobId={job_id}", start])


def release(job_id: str, *, runner: Runner = run) -> None:
    """Release a job that Slurm holds after repeated requeues."""
    checked(runner, ["scontrol", "release", job_id])


def partitions(*, runner: Runner = run) -> dict[str, Partition]:
    """All partitions by name."""
    return {
        record["PartitionName"]: Partition(
            name=record["PartitionName"],
            tier=int(record.get("PriorityTier", "1")),
            nodes=expand(record.get("Nodes", "")),
            preempt_mode=record.get("PreemptMode", ""),
            grace_s=int(record.get("GraceTime", "0") or 0),
            total_nodes=int(record.get("TotalNodes", "0") or 0),
        )
        for record in _show("partition", runner=runner)
        if "PartitionName" in record
    }


def node_states(*, runner: Runner = run) -> dict[str, str]:
    """State of every node by name (``IDLE``, ``ALLOCATED``, ``DOWN*``, …)."""
    return {
        record["NodeName"]: record.get("State", "")
        for record in _show("node", runner=runner)
        if "NodeName" in record
    }


def node_gpus(*, runner: Runner = run) -> dict[str, int]:
    """GPUs that each node is configured with, by node name."""
    return {
        record["NodeName"]: sum(
            int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", record.get("Gres", ""))
        )
        for record in _show("node", runner=runner)
        if "NodeName" in record
    }


def set_node_state(node: str, state: str, *, reason: str = "", runner: Runner = run) -> None:
    """Set a node DOWN, DRAIN or RESUME. Needs an operator's rights.

    Raises:
        SlurmError: refused; for an ordinary user it says which command an operator would run.
    """
    argv = ["scontrol", "update", f"NodeName={node}", f"State={state}"]
    if reason:
        argv.append(f"Reason={reason}")
    try:
        checked(runner, argv)
    except SlurmError as error:
        if "Invalid user id" in (error.why or ""):
            raise SlurmError(
                f"you may not set node {node} to {state}",
                why="only an operator or administrator of the cluster may",
                fix=f"ask one to run: {' '.join(argv)}",
            ) from None
        raise


def signal_step(job_id: str, signal: str, *, step: str = "0", runner: Runner = run) -> None:
    """Send a signal to every process of one step."""
    checked(runner, ["scancel", f"--signal={signal}", f"{job_id}.{step}"])


def cancel(job_id: str, *, runner: Runner = run) -> None:
    """Cancel a job."""
    checked(runner, ["scancel", job_id])


def kill_wait_s(*, runner: Runner = run) -> float:
    """Seconds between SIGTERM and SIGKILL on this cluster (``KillWait``)."""
    text = checked(runner, ["scontrol", "show", "config"])
    found = re.search(r"^KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    return float(found.group(1)) if found else settings.DEFAULT_KILL_WAIT_S


def version(*, runner: Runner = run) -> str:
    """Slurm's release, such as ``22.05.8``."""
    return checked(runner, ["scontrol", "--version"]).split()[-1]
