"""Take capacity away from a running job, see that it really went, and write it down.

Every action is the real thing: a higher-tier job that Slurm starts by preempting the run, a node
that is gone, a SIGKILL to a rank. An action that has not been *seen* to take effect within its
deadline is an error, and what was taken is given back whatever happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.scontrol import JobState
from slurmspot.errors import NotFoundError, SlurmError, SlurmspotError
from slurmspot.faults import actions
from slurmspot.faults.aiming import Moment, aimed
from slurmspot.faults.backend import Backend, Scontrol, resume
from slurmspot.faults.fault import Fault, Target
from slurmspot.faults.journal import Journal, Silent, owed, read_journal
from slurmspot.faults.machines import Machines
from slurmspot.faults.victim import Victim
from slurmspot.hostlist import expand
from slurmspot.runfolder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What was done to a run.

    Attributes:
        kind: the profile; ``preempt`` for ``slurm``.
        job_id: the job it was aimed at.
        nodes: the nodes that were taken.
        notice: whether the job was to be warned.
        noticed: whether a rank has logged a notice.
        at_step: the last step that the run had made when it was hit; None before the first.
        phase: the phase it was aimed at, if any.
        inside: whether the event log shows that it hit inside that phase; None without one.
        seconds: from the action to its being seen to take effect.
    """

    kind: str
    job_id: str
    nodes: tuple[str, ...]
    notice: bool
    noticed: bool
    at_step: int | None
    phase: str | None
    inside: bool | None
    seconds: float


class Injector:
    """Injects faults into one run.

    Args:
        folder: the run; with ``job_id``, any folder to keep the journal in.
        backend: how to talk to Slurm; default: its commands.
        machines: how to end a machine for real; None leaves it to Slurm.
        job_id: hit this job, whatever it is and whose it is, instead of the run's own.
        any_job: hit the run's job even if it is another user's.
        deadline_s: how long to wait for an effect, beyond the grace that Slurm gives.
        dry: go through the motions: the runner, the backend and the machines only say what they
            would do, and nothing is written.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        backend: Backend | None = None,
        machines: Machines | None = None,
        job_id: str | None = None,
        any_job: bool = False,
        runner: Runner = run,
        deadline_s: float = 60.0,
        dry: bool = False,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder = folder
        self._backend = backend or Scontrol(runner)
        self._machines = machines
        self._runner = runner
        self._deadline_s = deadline_s
        self._dry = dry
        self._victim = Victim(folder, self._backend, job_id=job_id, any_job=any_job, wait=wait)

    def inject(self, fault: Fault, *, deadline_s: float = 3600.0) -> Injection:
        """Wait for the fault's moment, carry it out, see its effect, and give back what it took.

        Args:
            deadline_s: how long to wait for the moment.

        Raises:
            UsageError: there is nothing to take, or it cannot be done here; nothing was touched.
            SlurmspotError: the moment did not come, or the effect was not seen.
        """
        actions.check(fault, self._machines, self._victim.settings)
        with aimed(self._victim, self._backend, fault.aim, deadline_s=deadline_s) as moment:
            return self._carry_out(fault, moment)

    def preempt(self, *, partition: str = "", hold_s: int = 5) -> Injection:
        """A higher-tier job takes all nodes of the gang, and gives them back after ``hold_s``."""
        return self.inject(Fault(profile="slurm", partition=partition, hold_s=hold_s))

    def node_down(self, node: str | None = None) -> Injection:
        """One node is gone, without notice; it comes back once Slurm has taken the job off it.

        Args:
            node: default: the last node of the job, which does not run the batch script.
        """
        target = Target(kind="nodes", names=(node,) if node else ())
        return self.inject(Fault(profile="node-down", target=target))

    def kill(self) -> Injection:
        """SIGKILL to every rank: no notice, and the nodes stay."""
        return self.inject(Fault(profile="kill"))

    def wait_for_step(self, step: int, *, deadline_s: float = 3600.0) -> None:
        """Return once the run has made ``step``.

        Raises:
            SlurmspotError: it ended, or the deadline passed, before.
        """
        self._victim.expect(
            lambda: (self._victim.last_step or 0) >= step,
            deadline_s,
            f"step {step} to be reached",
            though_finished=False,
        )

    def await_training(self, deadline_s: float) -> bool:
        """Wait until the present attempt has made a step: True; or the run has finished: False.

        Raises:
            SlurmspotError: neither within ``deadline_s``, or the job ended for good.
        """
        return self._victim.await_training(deadline_s)

    def undo(self) -> list[str]:
        """Give back what an injector that died had taken: nodes, held jobs; cancel its own jobs.

        Returns:
            a sentence for each.
        """
        self._folder.hold.unlink(missing_ok=True)
        journal = Journal(self._folder.events)
        try:
            return self._give_back_all(journal, owed(read_journal(self._folder.events)))
        finally:
            journal.close()

    def _carry_out(self, fault: Fault, moment: Moment) -> Injection:
        job = moment.job
        nodes = fault.target.pick(expand(job.nodes))
        process = self._victim.rank(job, fault.target.count) if fault.how.ranks else None
        grace_s = self._grace_s(fault, job)
        notice = fault.how.notice and (fault.profile != "slurm" or grace_s > 0)
        journal = Silent() if self._dry else Journal(self._folder.events)
        taken: list[tuple[str, str]] = []

        def promise(what: str, name: str) -> None:
            if (what, name) not in taken:
                journal.promise(what, name)
                taken.append((what, name))

        at_step = self._victim.last_step
        began, began_ns = time.monotonic(), time.time_ns()
        stage = actions.Stage(
            fault=fault,
            job=job,
            nodes=nodes,
            process=process,
            victim=self._victim,
            backend=self._backend,
            machines=self._machines,
            runner=self._runner,
            began_ns=began_ns,
            promise=promise,
            let_go=moment.release,
            dry=self._dry,
        )
        journal.write(
            "inject",
            step=at_step,
            kind=fault.kind,
            job_id=job.job_id,
            nodes=nodes,
            notice=notice,
            phase=moment.phase,
            fault=asdict(fault),
        )
        observed = False
        try:
            actions.ACTIONS[fault.profile](stage)
            observed = self._victim.poll(stage.effective, self._deadline_s + grace_s)
        finally:
            seconds = time.monotonic() - began
            noticed, inside = stage.noticed(), moment.inside(began_ns)
            journal.write(
                "inject_observed",
                kind=fault.kind,
                observed=observed,
                noticed=noticed,
                inside=inside,
                seconds=seconds,
            )
            try:
                self._give_back_all(journal, taken)
            finally:
                journal.close()
        if not observed:
            raise SlurmspotError(
                f"{fault.profile} was not seen to take effect on job {job.job_id}",
                why=f"waited {seconds:.0f} s",
                fix=f"see `slurmspot status {self._folder.path}`",
            )
        return Injection(
            kind=fault.kind,
            job_id=job.job_id,
            nodes=nodes,
            notice=notice,
            noticed=noticed,
            at_step=at_step,
            phase=moment.phase,
            inside=inside,
            seconds=seconds,
        )

    def _grace_s(self, fault: Fault, job: JobState) -> float:
        if fault.profile == "slurm":
            return float(self._backend.partitions()[job.partition].grace_s)
        if fault.profile == "hang-rank":
            return float(self._victim.settings["hang_s"])
        return fault.window

    def _give_back_all(self, journal: Journal, taken: Iterable[tuple[str, str]]) -> list[str]:
        """What cannot be given back keeps none of the others from it, and stays promised."""
        told, failed = [], []
        for what, name in taken:
            try:
                told.append(self._give_back(journal, what, name))
            except SlurmspotError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return told

    def _give_back(self, journal: Journal, what: str, name: str) -> str:
        if what == "node":
            told = f"node {name} is back"
            if self._machines is None:
                resume(self._backend, name)
            else:
                self._machines.revive(name)
        elif what == "hold":
            told = f"job {name} is released"
            with suppress(NotFoundError, SlurmError):  # it has ended, or is not held any more
                self._backend.release(name)
        else:
            told = f"job {name} has ended"
            with suppress(NotFoundError, SlurmError):
                self._backend.cancel(name)
        journal.keep(what, name)
        return told
