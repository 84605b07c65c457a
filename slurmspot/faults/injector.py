"""Take capacity away from a running job, see that it really went, and write it down.

Every action is the real thing: a higher-tier job that Slurm starts by preempting the run, a node
that is gone, a SIGKILL to every rank. An action that has not been *seen* to take effect within its
deadline is an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, checked, run
from slurmspot.cluster.scontrol import JobState
from slurmspot.cluster.submit import job_ids
from slurmspot.errors import NotFoundError, SlurmspotError, UsageError
from slurmspot.events import EventWriter, last_step
from slurmspot.hostlist import expand
from slurmspot.runfolder import RunFolder
from slurmspot.sandbox import Sandbox

_POLL_S = 0.2


class Machines(Protocol):
    """Whoever can end a machine for real and start it again."""

    def vanish(self, node: str) -> object:
        """End the machine: processes, slurmd and local disk."""

    def revive(self, node: str) -> object:
        """Start it again and make it available to Slurm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What was done to a run.

    Attributes:
        kind: ``preempt``, ``node-down`` or ``kill``.
        job_id: the job it was aimed at.
        nodes: the nodes that were taken.
        notice: whether the job was warned.
        at_step: the last step that the run had made when it was hit; None before the first.
        seconds: from the action to its being seen to take effect.
    """

    kind: str
    job_id: str
    nodes: tuple[str, ...]
    notice: bool
    at_step: int | None
    seconds: float


class Injector:
    """Injects faults into one run.

    Args:
        folder: the run, with a job that is running now.
        machines: how to end a machine for real; None leaves it to Slurm (``State=DOWN`` alone).
        deadline_s: how long to wait for an effect, beyond the grace that Slurm gives.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        machines: Machines | None = None,
        runner: Runner = run,
        deadline_s: float = 60.0,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder = folder
        self._machines = machines
        self._runner = runner
        self._deadline_s = deadline_s
        self._wait = wait

    def wait_for_step(self, step: int, *, deadline_s: float = 3600.0) -> None:
        """Return once the run has made ``step``.

        Raises:
            SlurmspotError: it ended, or the deadline passed, before.
        """
        self._await(
            lambda: (last_step(self._folder.events) or 0) >= step,
            deadline_s,
            f"step {step} to be reached",
            or_over=True,
        )

    def preempt(self, *, partition: str | None = None, hold_s: int = 5) -> Injection:
        """A higher-tier job takes all nodes of the gang, and gives them back after ``hold_s``."""
        job = self._running()
        known = scontrol.partitions(runner=self._runner)
        nodes = expand(job.nodes)
        higher = _preempting_partition(known, job, nodes, partition)
        grace_s = known[job.partition].grace_s
        argv = [
            "sbatch",
            "--parsable",
            f"--partition={higher}",
            f"--nodes={len(nodes)}",
            f"--nodelist={job.nodes}",
            "--exclusive",
            "--job-name=slurmspot-preemptor",
            "--output=/dev/null",
        ]
        script = f"#!/bin/sh\nexec sleep {int(hold_s)}\n"

        def act() -> None:
            checked(self._runner, argv, stdin=script)

        return self._inject("preempt", job, nodes, act, notice=grace_s > 0, extra_s=grace_s)

    def node_down(self, node: str | None = None) -> Injection:
        """One node is gone, without notice; it comes back once Slurm has taken the job off it.

        Args:
            node: default: the last node of the job, which does not run the batch script.
        """
        job = self._running()
        nodes = expand(job.nodes)
        node = nodes[-1] if node is None else node
        if node not in nodes:
            raise NotFoundError(
                f"job {job.job_id} does not run on {node}", fix=f"choose one of: {job.nodes}"
            )

        def act() -> None:
            if self._machines is not None:
                self._machines.vanish(node)
            scontrol.set_node_state(node, "DOWN", reason="slurmspot inject", runner=self._runner)

        try:
            return self._inject("node-down", job, [node], act, notice=False)
        finally:
            self._bring_back(node)

    def kill(self) -> Injection:
        """SIGKILL to every rank: no notice, and the nodes stay."""
        job = self._running()
        before = self._requeues_asked()

        def act() -> None:
            scontrol.signal_step(job.job_id, "KILL", runner=self._runner)

        return self._inject(
            "kill",
            job,
            expand(job.nodes),
            act,
            notice=False,
            seen=lambda: self._requeues_asked() > before,
        )

    def _inject(
        self,
        kind: str,
        job: JobState,
        nodes: Sequence[str],
        act: Callable[[], None],
        *,
        notice: bool,
        extra_s: float = 0.0,
        seen: Callable[[], bool] = lambda: False,
    ) -> Injection:
        journal = EventWriter(self._folder.events, "injector", os.getpid())
        began = time.monotonic()
        at_step = last_step(self._folder.events)
        journal.write(
            "inject", step=at_step, kind=kind, job_id=job.job_id, nodes=list(nodes), notice=notice
        )
        observed = False
        try:
            act()
            self._await(
                lambda: seen() or self._taken(job),
                self._deadline_s + extra_s,
                f"{kind} to take effect on job {job.job_id}",
            )
            observed = True
        finally:
            seconds = time.monotonic() - began
            journal.write("inject_observed", kind=kind, observed=observed, seconds=seconds)
            journal.close()
        return Injection(
            kind=kind,
            job_id=job.job_id,
            nodes=tuple(nodes),
            notice=notice,
            at_step=at_step,
            seconds=seconds,
        )

    def _running(self) -> JobState:
        ids = job_ids(self._folder)
        if not ids:
            raise NotFoundError(f"{self._folder.path} has no job", fix="launch it first")
        job = scontrol.show_job(ids[-1], runner=self._runner)
        if job.state != "RUNNING":
            raise UsageError(
                f"job {job.job_id} is not running but {job.state.lower()}",
                why="there is nothing to take away",
                fix=f"see `slurmspot status {self._folder.path}`",
            )
        return job

    def _taken(self, job: JobState) -> bool:
        now = scontrol.show_job(job.job_id, runner=self._runner)
        return now.state != "RUNNING" or now.restarts > job.restarts

    def _requeues_asked(self) -> int:
        logs = self._folder.events.glob("*/batch.jsonl")
        return sum(log.read_bytes().count(b'"requeue_asked"') for log in logs)

    def _bring_back(self, node: str) -> None:
        if self._machines is not None:
            self._machines.revive(node)
        else:
            scontrol.set_node_state(node, "RESUME", runner=self._runner)

    def _await(
        self, true: Callable[[], bool], deadline_s: float, what: str, *, or_over: bool = False
    ) -> None:
        end = time.monotonic() + deadline_s
        while not true():
            if or_over and self._folder.finished.exists():
                raise SlurmspotError(f"the run finished while waiting for {what}")
            if time.monotonic() > end:
                raise SlurmspotError(
                    f"waited {deadline_s:.0f} s in vain for {what}",
                    fix=f"see `slurmspot status {self._folder.path}`",
                )
            self._wait(_POLL_S)


def _preempting_partition(
    known: Mapping[str, scontrol.Partition], job: JobState, nodes: Sequence[str], wanted: str | None
) -> str:
    tier = known[job.partition].tier
    able = [p for p in known.values() if p.tier > tier and set(nodes) <= set(p.nodes)]
    if wanted is None and able:
        return min(able, key=lambda p: p.tier).name
    if wanted in {p.name for p in able}:
        return str(wanted)
    raise UsageError(
        f"partition {wanted or 'of a higher tier'} cannot preempt {job.partition} on {job.nodes}",
        why=f"it must have a PriorityTier above {tier} and hold those nodes",
        fix="see `scontrol show partition`; choose one with --partition",
    )


def machines_here(env: Mapping[str, str] = os.environ) -> Machines | None:
    """The sandbox this process talks to, which can end its machines for real; else None."""
    return Sandbox.current(env)
