"""What the injector asks of Slurm: one interface, carried out by scontrol or by pyslurm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Output, Runner, checked, run
from slurmspot.cluster.scontrol import JobState, Partition
from slurmspot.errors import SlurmError

PREEMPTOR = "slurmspot-preemptor"
"""Job name of what takes nodes away by preempting."""

_AWAY = frozenset({"DOWN", "DRAIN", "FAIL"})  # what was powered down Slurm powers up by itself


class Backend(Protocol):
    """Slurm, as far as capacity is given and taken.

    Every method raises :class:`~slurmspot.errors.SlurmError` where Slurm refuses,
    :class:`~slurmspot.errors.SlurmUnreachableError` where it does not answer, and
    :class:`~slurmspot.errors.NotFoundError` for a job that it does not know.
    """

    def job(self, job_id: str) -> JobState:
        """The state of a job now."""

    def partitions(self) -> Mapping[str, Partition]:
        """All partitions by name."""

    def node_state(self, node: str) -> str:
        """State of a node (``IDLE``, ``MIXED+DRAIN``, …)."""

    def requeue(self, job_id: str, *, hold: bool = False) -> None:
        """Put a running job back into the queue; with ``hold``, keep it there."""

    def release(self, job_id: str) -> None:
        """Let a held job go."""

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Keep a pending job off these nodes, and off no others."""

    def set_nodes(self, nodes: Sequence[str], state: str, *, reason: str = "") -> None:
        """Set nodes DOWN, DRAIN, RESUME …, all at once: an operator's right."""

    def signal_ranks(self, job_id: str, signal: str) -> None:
        """Send a signal, named without SIG, to every process of the job's ranks."""

    def preempt(self, partition: str, nodes: Sequence[str], hold_s: int) -> str:
        """Submit a job that takes ``nodes`` whole for ``hold_s`` seconds; its id."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job."""


class Scontrol:
    """Slurm's own commands: works on every release."""

    def __init__(self, runner: Runner = run) -> None:
        self._runner = runner

    def job(self, job_id: str) -> JobState:
        """See :class:`Backend`."""
        return scontrol.show_job(job_id, runner=self._runner)

    def partitions(self) -> Mapping[str, Partition]:
        """See :class:`Backend`."""
        return scontrol.partitions(runner=self._runner)

    def node_state(self, node: str) -> str:
        """See :class:`Backend`."""
        return scontrol.node_states(runner=self._runner)[node]

    def requeue(self, job_id: str, *, hold: bool = False) -> None:
        """See :class:`Backend`."""
        (scontrol.requeue_hold if hold else scontrol.requeue)(job_id, runner=self._runner)

    def release(self, job_id: str) -> None:
        """See :class:`Backend`."""
        scontrol.release(job_id, runner=self._runner)

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """See :class:`Backend`."""
        scontrol.exclude_nodes(job_id, nodes, runner=self._runner)

    def set_nodes(self, nodes: Sequence[str], state: str, *, reason: str = "") -> None:
        """See :class:`Backend`."""
        scontrol.set_node_state(",".join(nodes), state, reason=reason, runner=self._runner)

    def signal_ranks(self, job_id: str, signal: str) -> None:
        """See :class:`Backend`."""
        scontrol.signal_step(job_id, signal, runner=self._runner)

    def preempt(self, partition: str, nodes: Sequence[str], hold_s: int) -> str:
        """See :class:`Backend`."""
        argv = [
            "sbatch",
            "--parsable",
            f"--partition={partition}",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            "--exclusive",
            f"--job-name={PREEMPTOR}",
            "--output=/dev/null",
        ]
        return checked(self._runner, argv, stdin=preemptor_script(hold_s)).strip().split(";")[0]

    def cancel(self, job_id: str) -> None:
        """See :class:`Backend`."""
        scontrol.cancel(job_id, runner=self._runner)


def resume(backend: Backend, node: str) -> None:
    """Let a node take jobs again.

    Raises:
        SlurmError: refused, though it cannot take any; one that has come back by itself may be.
    """
    try:
        backend.set_nodes([node], "RESUME")
    except SlurmError:
        if _AWAY.intersection(re.findall(r"[A-Z_]+", backend.node_state(node))):
            raise


def preemptor_script(hold_s: int) -> str:
    """What the preempting job runs."""
    return f"#!/bin/sh\nexec sleep {int(hold_s)}\n"


def dry(runner: Runner, show: Runner) -> Runner:
    """A runner that asks for real but passes every command that changes something to ``show``."""

    def call(argv: Sequence[str], *, stdin: str | None = None) -> Output:
        asks = argv[0] == "scontrol" and "show" in argv[1:3]
        return (runner if asks else show)(argv, stdin=stdin)

    return call
