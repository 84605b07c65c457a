"""The last line of a batch script: put the job back into the queue, or let it end.

``python -m slurmspot.job.requeue "$rc"`` runs after the ranks have left, outside any step (a
requeue from inside a step kills the step) and outside any container. Exiting alone would not do:
Slurm 22.05 takes a job that ends within its grace for finished or failed, and later releases hold
it at the sixth time. An explicit ``scontrol requeue`` comes back on every release.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slurmspot.checkpoint import steps
from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.scontrol import JobState
from slurmspot.cluster.spec import Spec
from slurmspot.errors import NotFoundError, SlurmError, SlurmspotError, SlurmUnreachableError
from slurmspot.events import Event, EventWriter, read_events
from slurmspot.hostlist import expand
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment

WANTS_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: checkpointed, try again later
PEER_LOST = 76  # another rank died under a collective; not a fault of this one
MAX_CRASHES = 3  # attempts in a row that were killed without a new step that lasts
_TAKEDOWN_S = 300.0
_CONTROLLER_S = 900.0  # how long to wait for a controller that does not answer
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to requeue, and why."""

    requeue: bool
    exit_code: int
    reason: str


def decide(
    exit_code: int, *, finished: bool, failed: str | None, crashes: int, began: bool = True
) -> Decision:
    """What becomes of a job whose step ended with ``exit_code``.

    Args:
        exit_code: of srun: the highest of all tasks, 128 + n for one killed by signal n.
        finished: the run has written its final checkpoint.
        failed: the error with which a rank of this attempt ended by its own fault.
        crashes: attempts that were killed, since the last commit, before this one.
        began: see :func:`has_begun`. An attempt that has not is taken for the cluster's fault.
    """
    if finished:
        return Decision(False, 0, "the run is complete")
    if exit_code == 0:
        return Decision(False, 0, "the command ended by itself")
    if exit_code == WANTS_REQUEUE:
        return Decision(True, WANTS_REQUEUE, "checkpointed after a notice")
    own = began and exit_code < 128 and exit_code != PEER_LOST
    if failed is not None or own:
        return Decision(
            False, exit_code, failed or f"the command failed with exit code {exit_code}"
        )
    death = _death(exit_code) if began else "the ranks did not get started"
    if crashes >= MAX_CRASHES:
        return Decision(
            False, exit_code, f"{death}; {crashes} attempts before it died without any progress"
        )
    return Decision(True, WANTS_REQUEUE, death)


def has_begun(events: Iterable[Event], attempt: str) -> bool:
    """Whether ``attempt`` has got as far as a run of its own that is at fault would get.

    It has not if srun started no rank at all (Slurm 22.05 gives no step to a job of which it has
    once lost all nodes at the same time), or if no rank opened the run although ranks of earlier
    attempts did: a file system may not be mounted yet, or a module not be loaded on that node.
    """
    opened, launched = set(), set()
    for event in events:
        if event.rank.isdecimal():
            launched.add(event.attempt)
            if event.event == "attempt_start":
                opened.add(event.attempt)
    return attempt in (opened or launched)


def own_failure(exits: Iterable[Event]) -> str | None:
    """The error with which a rank ended by its own fault, or None."""
    for event in exits:
        code = event.data.get("code")
        if code not in (0, None, WANTS_REQUEUE, PEER_LOST):
            return f"rank {event.rank} failed: {event.data.get('error') or f'exit {code}'}"
    return None


def crashes_without_progress(events: Iterable[Event]) -> int:
    """How many attempts in a row were requeued after a kill, with no new step committed between.

    What is committed on the nodes' disks alone may be gone with the next attempt. It counts from
    when it is on the remote tier: a drain brings it there, or the attempt that finds it.
    """
    crashes = 0
    furthest = -1
    for event in events:
        kept = event.event == "commit" and event.data.get("tier") != steps.LOCAL
        if kept and event.step is not None and event.step > furthest:
            furthest = event.step
            crashes = 0
        elif event.event == "requeue_asked":
            crashes += event.data.get("exit_code") != WANTS_REQUEUE
    return crashes


def _death(exit_code: int) -> str:
    if exit_code == PEER_LOST:
        return "a rank was lost"
    try:
        return f"killed by {signal.Signals(exit_code - 128).name}"
    except ValueError:
        return f"killed by signal {exit_code - 128}"


def finish(exit_code: int, job: JobEnvironment, *, runner: Runner = run) -> int:
    """Carry the decision out; return the batch script's exit code."""
    folder = None if job.run is None else RunFolder(job.run)
    events = [] if folder is None else read_events(folder.events, steps=False)
    exits = [e for e in events if e.event == "exit" and e.attempt == job.attempt]
    if any(event.data.get("code") == WANTS_REQUEUE for event in exits):
        # All ranks have saved; when the first one leaves, srun may kill the others before they do.
        exit_code = WANTS_REQUEUE
    decision = decide(
        exit_code,
        finished=folder is not None and folder.finished.exists(),
        failed=own_failure(exits),
        crashes=crashes_without_progress(events),
        began=folder is None or has_begun(events, job.attempt),
    )
    _say(f"{decision.reason}: {'requeue' if decision.requeue else 'end'}")
    if not decision.requeue:
        return decision.exit_code
    try:
        now = _patiently(lambda: scontrol.show_job(job.job_id, runner=runner))
        if now.ending and not now.out_of_time:
            # Cancelled, and a requeue would bring back what somebody has ended; or preempted or
            # its node lost, and then Slurm itself requeues it.
            _say("Slurm is ending this attempt already: left to it")
            return decision.exit_code
        avoiding = doomed_nodes(events, job.attempt)
        if folder is not None:
            log = EventWriter(folder.events, job.attempt, "batch")
            log.write("requeue_asked", exit_code=exit_code, avoiding=avoiding)
            log.close()
        _patiently(lambda: scontrol.requeue(job.job_id, runner=runner))
        if avoiding or _avoided_before(events):
            _keep_off(avoiding, now, folder, runner)
    except (SlurmError, NotFoundError) as error:
        # Slurm itself requeues a job that it has preempted or whose node it has lost; then this
        # one comes too late, or is refused because the job is on its way out already.
        _say(str(error))
        return decision.exit_code
    return _wait_for_takedown(decision.exit_code)


def doomed_nodes(events: Iterable[Event], attempt: str) -> list[str]:
    """Nodes whose machine goes away, by a notice of which Slurm knows nothing."""
    mine = [event for event in events if event.attempt == attempt]
    hosts = {e.rank: str(e.data.get("host")) for e in mine if e.event == "attempt_start"}
    warned = {e.rank for e in mine if e.event == "notice" and e.data.get("machine")}
    return sorted({hosts[rank] for rank in warned & hosts.keys()})


def _avoided_before(events: Iterable[Event]) -> bool:
    asked = [event for event in events if event.event == "requeue_asked"]
    return bool(asked and asked[-1].data.get("avoiding"))


def _keep_off(
    nodes: Sequence[str], job: JobState, folder: RunFolder | None, runner: Runner
) -> None:
    """Let the next attempt start elsewhere, if there is an elsewhere; undo the last such wish."""
    excluded = ""
    if folder is not None and folder.spec.exists():
        excluded = Spec.from_json(folder.spec.read_text()).exclude
    partition = scontrol.partitions(runner=runner).get(job.partition)
    others = set(partition.nodes if partition else ()) - {*expand(excluded), *nodes}
    if len(others) < len(expand(job.nodes)):
        # Excluded all the same, the job would wait for ever, even once the machine is replaced.
        _say(f"{', '.join(nodes)} will go away, but there is no other node to go to")
        nodes = ()
    scontrol.exclude_nodes(job.job_id, [*expand(excluded), *nodes], runner=runner)
    if nodes:
        _say(f"keeping off {', '.join(nodes)}, which will go away")


_T = TypeVar("_T")


def _patiently(ask: Callable[[], _T]) -> _T:
    """Ask until the controller answers: it may be restarted while a job leaves.

    A job that gave up would exit, and count as failed once the controller is back.
    """
    end = time.monotonic() + _CONTROLLER_S
    while True:
        try:
            return ask()
        except SlurmUnreachableError:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_S)


def _wait_for_takedown(exit_code: int) -> int:
    """Stay until Slurm ends the batch script: a job that exits first may count as finished."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_TAKEDOWN_S)
    return exit_code


def _say(text: str) -> None:
    sys.stderr.write(f"slurmspot: {text}\n")
    sys.stderr.flush()


def main() -> None:
    """Read the step's exit code from the command line and this job from the environment."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the requeue itself must not be cut short
    if len(sys.argv) != 2 or not sys.argv[1].isdigit():
        _say("usage: python -m slurmspot.job.requeue EXIT_CODE_OF_SRUN")
        sys.exit(2)
    try:
        sys.exit(finish(int(sys.argv[1]), JobEnvironment.read(os.environ)))
    except SlurmspotError as error:
        _say(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
