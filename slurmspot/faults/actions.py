"""How each profile takes capacity away: one function for each way in which it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slurmspot.cluster.command import Runner
from slurmspot.cluster.scontrol import JobState, Partition
from slurmspot.errors import SlurmError, SlurmspotError, UsageError
from slurmspot.faults.backend import Backend
from slurmspot.faults.fault import CLOUDS, Fault
from slurmspot.faults.machines import CanWarn, Machines, signal_process
from slurmspot.faults.metadata import MetadataService
from slurmspot.faults.victim import Process, Victim
from slurmspot.hostlist import expand

REASON = "slurmspot inject"


_FELT_S = 15.0  # Amazon's metadata service is asked every five seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What an action works with.

    Attributes:
        nodes: those that are hit.
        process: the rank that is hit, if it is one.
        began_ns: unix time of the action.
        promise: told what is about to be taken and must be given back (``node``, ``hold``,
            ``preemptor``), and its name.
        let_go: releases the ranks that were held for the hit.
        dry: nothing really happens, so nothing is waited for.
    """

    fault: Fault
    job: JobState
    nodes: Sequence[str]
    process: Process | None
    victim: Victim
    backend: Backend
    machines: Machines | None
    runner: Runner
    began_ns: int
    promise: Callable[[str, str], None]
    let_go: Callable[[], None]
    dry: bool = False

    def noticed(self) -> bool:
        """Whether a rank has logged a notice since."""
        events = self.victim.events(since_ns=self.began_ns)
        return any(event.event == "notice" for event in events)

    def taken(self) -> bool:
        """Whether Slurm, or the job itself, has ended the attempt.

        Raises:
            SlurmspotError: the run came to its end without having felt anything.
        """
        if self.dry:
            return True
        events = self.victim.events(since_ns=self.began_ns)
        if any(event.event == "requeue_asked" for event in events):
            return True
        ended = self.victim.ended(self.job)
        too_late = self.victim.finished and self.fault.aim.in_phase != "after-finish"
        if ended and too_late and not self.noticed():
            raise SlurmspotError(
                f"{self.fault.profile} had no effect on job {self.job.job_id}",
                why="the run finished first",
            )
        return ended

    def effective(self) -> bool:
        """Whether the action has had its effect: the attempt was ended, or the node drains."""
        if not self.dry and self.fault.profile == "node-down" and self.fault.node_state != "DOWN":
            word = self.fault.node_state.partition("_")[0]
            return all(word in self.backend.node_state(node) for node in self.nodes)
        return self.taken()

    def occupied(self) -> list[str]:
        """Those of the nodes on which the job runs now, by what Slurm knows."""
        job = self.victim.job()
        return [n for n in self.nodes if job.state == "RUNNING" and n in expand(job.nodes)]

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.sleep_until(lambda: False, seconds)

    def sleep_until(self, true: Callable[[], bool], deadline_s: float) -> None:
        """Let time pass until it becomes true."""
        if not self.dry:
            self.victim.poll(true, deadline_s)

    @contextmanager
    def notices(self) -> Iterator[Callable[[str], None]]:
        """A metadata service, where a node's end can be announced."""
        if self.dry:
            yield lambda _: None
            return
        at = time.time() + self.fault.window
        with MetadataService(self.victim.settings["metadata_url"]) as service:
            yield lambda node: service.warn(node, self.fault.profile, at)

    def struck(self) -> None:
        """The blow has fallen: wait until the job feels it, then let held ranks go."""
        if self.fault.profile != "hang-rank":  # which feels nothing, by its nature
            felt = self.noticed if self.fault.how.notice else lambda: False
            self.victim.poll(lambda: felt() or self.effective(), _FELT_S)
        self.let_go()


def slurm(stage: Stage) -> None:
    """A job of a higher tier takes the nodes."""
    fault, job = stage.fault, stage.job
    higher = preempting(stage.backend.partitions(), job, stage.nodes, fault.partition)
    stage.promise("preemptor", stage.backend.preempt(higher, stage.nodes, fault.hold_s))
    stage.struck()


def requeue(stage: Stage) -> None:
    """Back into the queue; of single nodes, the job is kept off those from then on."""
    stage.backend.requeue(stage.job.job_id)
    if stage.fault.target.kind == "nodes":
        stage.backend.exclude(stage.job.job_id, stage.nodes)
    stage.struck()


def requeue_hold(stage: Stage) -> None:
    """Back into the queue and held there."""
    stage.promise("hold", stage.job.job_id)
    stage.backend.requeue(stage.job.job_id, hold=True)
    stage.struck()
    stage.sleep(stage.fault.hold_s)


def cloud(stage: Stage) -> None:
    """The metadata service announces the end of the machines; then they are gone."""
    end = time.monotonic() + stage.fault.window
    with stage.notices() as announce:
        for node in stage.nodes:
            announce(node)
        stage.struck()
        stage.sleep(end - time.monotonic())
    _end_machines(stage)


def kubernetes(stage: Stage) -> None:
    """SIGTERM to all that runs on the nodes, a grace, SIGKILL."""
    end = time.monotonic() + stage.fault.window
    machines: object = stage.machines
    if isinstance(machines, CanWarn):  # elsewhere the command sees to the grace itself
        for node in stage.nodes:
            stage.promise("node", node)
            machines.warn(node)
        stage.struck()
        stage.sleep(end - time.monotonic())
    _end_machines(stage)


def forced(stage: Stage) -> None:
    """The machines are gone, and nobody says so."""
    _end_machines(stage)


def node_down(stage: Stage) -> None:
    """An operator sets the nodes down; a down machine's processes are gone, where we can."""
    fault = stage.fault
    if stage.machines is not None and fault.node_state == "DOWN" and not fault.keep_machine:
        _end_machines(stage)
        return
    for node in stage.nodes:
        stage.promise("node", node)
    try:
        stage.backend.set_nodes(stage.nodes, fault.node_state, reason=REASON)
    except SlurmError as error:
        if "Invalid node state" not in str(error):
            raise
        raise SlurmError(
            f"Slurm refuses to set {', '.join(stage.nodes)} to {fault.node_state}",
            why=f"{error.why}: powering nodes down takes a SuspendProgram and a SuspendTime",
            fix="see `scontrol show config`; or use --state DOWN or DRAIN",
        ) from None
    stage.struck()


def kill(stage: Stage) -> None:
    """SIGKILL to every rank."""
    stage.backend.signal_ranks(stage.job.job_id, "KILL")
    stage.struck()


def kill_rank(stage: Stage) -> None:
    """SIGKILL to one rank."""
    _signal(stage, signal.SIGKILL)


def hang_rank(stage: Stage) -> None:
    """SIGSTOP to one rank: the others wait for it."""
    _signal(stage, signal.SIGSTOP)


ACTIONS: Mapping[str, Callable[[Stage], None]] = {
    "slurm": slurm,
    "requeue": requeue,
    "requeue-hold": requeue_hold,
    **dict.fromkeys(CLOUDS, cloud),
    "kubernetes": kubernetes,
    "forced": forced,
    "node-down": node_down,
    "kill": kill,
    "kill-rank": kill_rank,
    "hang-rank": hang_rank,
}


def preempting(
    known: Mapping[str, Partition], job: JobState, nodes: Sequence[str], wanted: str = ""
) -> str:
    """The partition whose jobs preempt ``job`` on ``nodes``: ``wanted``, or the nearest tier.

    Raises:
        UsageError: there is none.
    """
    tier = known[job.partition].tier
    able = [p for p in known.values() if p.tier > tier and set(nodes) <= set(p.nodes)]
    if not wanted and able:
        return min(able, key=lambda p: p.tier).name
    if wanted in {p.name for p in able}:
        return wanted
    raise UsageError(
        f"partition {wanted or 'of a higher tier'} cannot preempt {job.partition} on {job.nodes}",
        why=f"it must have a PriorityTier above {tier} and hold those nodes",
        fix="see `scontrol show partition`; choose one with --partition",
    )


def check(fault: Fault, machines: Machines | None, settings: Mapping[str, Any]) -> None:
    """Refuse what cannot be done here, before anything is touched.

    Args:
        settings: what the run was launched with.

    Raises:
        UsageError: no way to end machines, no metadata service to stand in for, no watchdog.
    """
    if fault.how.machines and machines is None:
        raise UsageError(
            f"{fault.profile} ends machines, and nobody here can",
            fix="say how with --terminate-command 'PROGRAM … {node}', or try it in a sandbox",
        )
    if fault.profile in CLOUDS and not settings.get("metadata_url"):
        raise UsageError(
            "the run asks its cloud's own metadata service, which no drill can stand in for",
            fix="launch it with metadata_url = 'http://HOST:PORT/%n' and a notice source",
        )
    if fault.profile == "hang-rank" and not settings.get("hang_s"):
        raise UsageError(
            "the run has no watchdog: a rank that hangs would hang for ever",
            fix="launch it with hang_s set",
        )


def _end_machines(stage: Stage) -> None:
    """End the machines; where the job still runs on one after ``detect_s``, tell Slurm.

    One node set down is enough to end the whole attempt, and Slurm finds out about the others when
    they come back. More would do harm on 22.05: when the last node on which a requeued job is
    completing is set down, the job starts again before it has been cleaned up, gets no step
    ("Invalid generic resource"), and its GPUs stay taken until slurmctld is restarted.
    """
    machines = stage.machines
    assert machines is not None  # noqa: S101 - see check()
    for node in stage.nodes:
        stage.promise("node", node)
        machines.vanish(node)
    stage.let_go()
    detect_s = 0.0 if stage.fault.profile == "node-down" else stage.fault.detect_s
    stage.sleep_until(lambda: not stage.occupied(), detect_s)
    for node in stage.occupied()[:1]:
        stage.backend.set_nodes([node], "DOWN", reason=REASON)


def _signal(stage: Stage, number: signal.Signals) -> None:
    process = stage.process
    assert process is not None  # noqa: S101 - a rank is the target, and was found
    signal_process(stage.job.job_id, process.node, process.pid, number, runner=stage.runner)
    stage.struck()
