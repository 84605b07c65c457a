"""Whoever can end a machine for real: the sandbox, or a command of the site's own."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, checked, run
from slurmspot.errors import SlurmspotError, UsageError
from slurmspot.faults.backend import Backend, resume
from slurmspot.sandbox import Sandbox, processes


class Machines(Protocol):
    """Ends machines and starts them again."""

    def vanish(self, node: str) -> object:
        """End it: processes, slurmd and local disk."""

    def revive(self, node: str) -> object:
        """Start it again and make it available to Slurm."""


@runtime_checkable
class CanWarn(Protocol):
    """Machines whose processes can be warned, as Kubernetes warns those of a pod."""

    def warn(self, node: str) -> object:
        """SIGTERM to every process of jobs on it."""


class SandboxMachines:
    """The nodes of a sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def warn(self, node: str) -> None:
        """See :class:`CanWarn`. Slurm's own daemons live on through the grace."""
        found = processes.table()
        owner = processes.owners(found, self._sandbox.layout)
        for process in found:
            if owner.get(process.pid) == node and not process.program.startswith("slurm"):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def vanish(self, node: str) -> None:
        """See :class:`Machines`."""
        self._sandbox.vanish(node)

    def revive(self, node: str) -> None:
        """See :class:`Machines`.

        A ping that fails while slurmd starts leaves the node marked as silent until the next one,
        up to 100 s later; set down and resumed once more, it is asked at once.
        """
        try:
            self._sandbox.revive(node, deadline_s=8.0)
        except SlurmspotError:
            scontrol.set_node_state(node, "DOWN", reason="silent", runner=self._sandbox.run)
            self._sandbox.revive(node)


class Command:
    """Real machines, ended by a command in which ``{node}`` stands for the node's name.

    The machine is expected to be replaced by the site, and Slurm to be told so with RESUME. A
    warning, where there is one, is the command's own affair.

    Raises:
        UsageError: the template is empty or names no node.
    """

    def __init__(self, template: str, backend: Backend, *, runner: Runner = run) -> None:
        try:
            self._words = shlex.split(template)
        except ValueError as error:
            raise UsageError("--terminate-command cannot be read", why=str(error)) from None
        if not any("{node}" in word for word in self._words[1:]):
            raise UsageError(
                f"--terminate-command {template!r} does not say which machine to end",
                fix="put {node} where its name belongs",
            )
        self._backend = backend
        self._runner = runner

    def argv(self, node: str) -> list[str]:
        """The command that ends ``node``; no shell ever sees it."""
        return [word.replace("{node}", node) for word in self._words]

    def vanish(self, node: str) -> None:
        """See :class:`Machines`."""
        checked(self._runner, self.argv(node))

    def revive(self, node: str) -> None:
        """See :class:`Machines`."""
        resume(self._backend, node)


class Printed:
    """Says what would be done to the machines of a sandbox."""

    def __init__(self, show: Runner) -> None:
        self._show = show

    def warn(self, node: str) -> None:
        """See :class:`CanWarn`."""
        self._show(["kill", "-TERM", f"(every process of {node})"])

    def vanish(self, node: str) -> None:
        """See :class:`Machines`."""
        self._show(["kill", "-KILL", f"(every process of {node})"])

    def revive(self, node: str) -> None:
        """See :class:`Machines`."""
        self._show(["slurmd", "-N", node])


def machines_here(env: Mapping[str, str] = os.environ) -> Machines | None:
    """The machines of the sandbox that this process talks to, or None."""
    sandbox = Sandbox.current(env)
    return None if sandbox is None else SandboxMachines(sandbox)


def signal_process(
    job_id: str, node: str, pid: int, number: signal.Signals, *, runner: Runner = run
) -> None:
    """Signal one process of a job on one of its nodes, as the job's owner may."""
    step: Sequence[str] = (
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        "--mem=0",
        "--gres=none",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
    )
    checked(runner, [*step, "kill", f"-{number.name.removeprefix('SIG')}", str(pid)])
