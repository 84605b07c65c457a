"""The injector's backend over pyslurm, which must be built for the cluster's own Slurm release.

Its versions are named for Slurm's: 22.5.x speaks with Slurm 22.05, 24.11.x with 24.11.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.scontrol import JobState, Partition
from slurmspot.errors import NotFoundError, SlurmError, SlurmUnreachableError, UsageError
from slurmspot.faults.backend import PREEMPTOR, preemptor_script
from slurmspot.hostlist import expand

_HETEROGENEOUS = ("heterogeneous_id", "heterogeneous_offset")


def release_of(version: str) -> tuple[int, int]:
    """(22, 5) of Slurm's ``22.05.8`` and of pyslurm's ``22.5.3``."""
    year, month, *_ = version.split(".")
    return int(year), int(month)


def load(*, runner: Runner = run, find: Callable[[str], Any] = importlib.import_module) -> Pyslurm:
    """The backend, if a fitting pyslurm is installed.

    Raises:
        UsageError: it is not, or it is one for another release; says which one is needed.
        SlurmUnreachableError: Slurm's own commands are missing.
    """
    needed = scontrol.version(runner=runner)
    year, month = release_of(needed)
    fix = f"install pyslurm {year}.{month}, built against this cluster's Slurm; or use scontrol"
    try:
        module = find("pyslurm")
    except ImportError as error:
        raise UsageError("pyslurm cannot be loaded", why=str(error), fix=fix) from None
    found = str(module.__version__)
    if release_of(found) != (year, month):
        raise UsageError(f"pyslurm {found} does not fit this cluster's Slurm {needed}", fix=fix)
    return Pyslurm(module)


class Pyslurm:
    """See :class:`slurmspot.faults.backend.Backend`.

    Args:
        module: pyslurm itself, or what stands for it in a test.
    """

    def __init__(self, module: Any) -> None:
        self._slurm = module

    def job(self, job_id: str) -> JobState:
        """See :class:`Backend`."""
        with self._errors(f"job {job_id}"):
            found = self._slurm.Job.load(self._number(job_id))
        return JobState(
            job_id=job_id,
            state=str(found.state).split(",")[0],
            reason=str(found.state_reason or "").replace(" ", "_"),  # as scontrol prints it
            nodes=found.allocated_nodes or "",
            partition=found.partition or "",
            restarts=found.requeue_count or 0,
            user=found.user_name or "",
            name=found.name or "",
        )

    def partitions(self) -> Mapping[str, Partition]:
        """See :class:`Backend`."""
        with self._errors("the partitions"):
            found = self._slurm.Partitions.load()
        return {
            name: Partition(
                name=name,
                tier=one.priority_tier or 0,
                nodes=tuple(expand(one.nodes or "")),
                preempt_mode=str(one.preempt_mode or ""),
                grace_s=one.preemption_grace_time or 0,
                total_nodes=one.total_nodes or 0,
            )
            for name, one in found.items()
        }

    def node_state(self, node: str) -> str:
        """See :class:`Backend`."""
        with self._errors(f"node {node}"):
            return str(self._slurm.Node.load(node).state)

    def requeue(self, job_id: str, *, hold: bool = False) -> None:
        """See :class:`Backend`."""
        with self._errors(f"requeue of job {job_id}"):
            self._slurm.Job(self._number(job_id.partition("+")[0])).requeue(hold=hold)

    def release(self, job_id: str) -> None:
        """See :class:`Backend`."""
        with self._errors(f"release of job {job_id}"):
            self._slurm.Job(self._number(job_id)).release()

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """See :class:`Backend`."""
        with self._errors(f"update of job {job_id}"):
            wish = self._slurm.JobSubmitDescription(excluded_nodes=list(nodes))
            self._slurm.Job(self._number(job_id)).modify(wish)

    def set_nodes(self, nodes: Sequence[str], state: str, *, reason: str = "") -> None:
        """See :class:`Backend`."""
        wish = {"state": state, **({"reason": reason} if reason else {})}
        with self._errors(f"update of nodes {', '.join(nodes)}"):
            self._slurm.Node(",".join(nodes)).modify(self._slurm.Node(**wish))

    def signal_ranks(self, job_id: str, signal: str) -> None:
        """See :class:`Backend`. The ranks are the job's step 0."""
        with self._errors(f"signal to job {job_id}"):
            self._slurm.JobStep(self._number(job_id), 0).send_signal(f"SIG{signal}")

    def preempt(self, partition: str, nodes: Sequence[str], hold_s: int) -> str:
        """See :class:`Backend`."""
        wish = self._slurm.JobSubmitDescription(
            name=PREEMPTOR,
            partitions=partition,
            nodes=len(nodes),
            ntasks=len(nodes),
            required_nodes=list(nodes),
            resource_sharing="no",
            standard_output="/dev/null",
            working_directory="/",
            script=preemptor_script(hold_s),
        )
        with self._errors(f"submission to {partition}"):
            return str(wish.submit())

    def cancel(self, job_id: str) -> None:
        """See :class:`Backend`."""
        with self._errors(f"job {job_id}"):
            self._slurm.Job(self._number(job_id)).cancel()

    def _number(self, job_id: str) -> int:
        """Slurm's own number of an array task (``7_0``) or of a part of a job (``33+1``)."""
        if job_id.isdecimal():
            return int(job_id)
        array = "_" in job_id
        group, place = ("array_id", "array_task_id") if array else _HETEROGENEOUS
        wanted = tuple(int(part) for part in job_id.split("_" if array else "+"))
        for number, job in self._slurm.Jobs.load().items():
            # pyslurm says None for place 0, as it does for tasks that still wait together.
            found = (getattr(job, group), getattr(job, place) or 0)
            if found == wanted and not job.array_tasks_waiting:
                return int(number)
        raise NotFoundError(f"Slurm knows no job {job_id}")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._slurm.RPCError as error:
            words = str(error)
            if "Invalid job id" in words:
                raise NotFoundError(f"Slurm knows no {what}", why=words) from None
            if "Unable to contact" in words or "onnection" in words:
                raise SlurmUnreachableError("Slurm does not answer", why=words) from None
            if "Invalid user id" in words or "permission" in words:
                raise SlurmError(
                    f"{what} is not yours to make",
                    why=words,
                    fix="ask an operator; --dry-run prints the commands that are needed",
                ) from None
            raise SlurmError(f"{what} was refused", why=words) from None
