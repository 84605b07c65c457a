"""Submit a run through submitit, as a requeueable job that comes back however it was taken.

The batch script is a pure function of the spec, the run folder and what the partition says;
``--dry-run`` prints it and :func:`submit` hands the same text to sbatch.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmspot import settings
from slurmspot.cluster import scontrol
from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.spec import Spec
from slurmspot.errors import NoSlurmError, NotFoundError, SlurmError, UsageError
from slurmspot.runfolder import RunFolder

if TYPE_CHECKING:
    from submitit import SlurmExecutor

_REQUEUE = "slurmspot.job.requeue"
_WATCHDOG = "slurmspot.job.watchdog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How long a notice lasts on this partition, in seconds."""

    window_s: float
    kill_wait_s: float


def check(spec: Spec, *, runner: Runner = run) -> Windows:
    """Ask the cluster whether it can run ``spec`` at all, and how much notice it gives.

    Raises:
        UsageError: no such partition, or more nodes or GPUs than it has.
        SlurmUnreachableError: Slurm does not answer.
    """
    known = scontrol.partitions(runner=runner)
    partition = known.get(spec.partition)
    if partition is None:
        names = ", ".join(f"{p.name} (tier {p.tier})" for p in known.values())
        raise UsageError(
            f"there is no partition {spec.partition!r} on this cluster",
            fix=f"choose one with --partition: {names}",
        )
    if spec.most_nodes > partition.total_nodes:
        raise UsageError(
            f"{spec.most_nodes} nodes were asked for; "
            f"partition {spec.partition} has {partition.total_nodes}"
        )
    gpus = scontrol.node_gpus(runner=runner)
    most = max((gpus.get(node, 0) for node in partition.nodes), default=0)
    if spec.gpus_per_node > most:
        raise UsageError(
            f"{spec.gpus_per_node} GPUs per node were asked for; "
            f"no node of partition {spec.partition} has more than {most}",
            fix=f"use --gpus-per-node {most} and more nodes",
        )
    return Windows(
        window_s=spec.window_s or partition.grace_s or spec.lead_s,
        kill_wait_s=spec.kill_wait_s or scontrol.kill_wait_s(runner=runner),
    )


def offline_windows(spec: Spec) -> Windows:
    """What to assume of a notice where no cluster is asked."""
    return Windows(
        window_s=spec.window_s or spec.lead_s,
        kill_wait_s=spec.kill_wait_s or settings.DEFAULT_KILL_WAIT_S,
    )


def batch_script(spec: Spec, folder: RunFolder, windows: Windows) -> str:
    """The text that sbatch is given."""
    executor = _executor(spec, folder, windows)
    text: str = executor._make_submission_file_text(executor._submitit_command_str, uid="")  # noqa: SLF001 - submitit has no public way to show its script
    return text


def submit(
    spec: Spec,
    folder: RunFolder,
    windows: Windows,
    task: Callable[[], object],
    *,
    runner: Runner = run,
) -> str:
    """Submit ``spec`` and return the job id; ``task`` is called in every rank.

    Raises:
        UsageError: the run is already complete, or a job of it is still queued or running.
        NoSlurmError: there is no sbatch.
        SlurmUnreachableError: the controller does not answer.
        SlurmError: sbatch refused; ``why`` holds its words.
    """
    if shutil.which("sbatch") is None:
        raise NoSlurmError("sbatch is not on PATH", fix="launch from a login node of the cluster")
    if folder.finished.exists():
        raise UsageError(f"{folder.path} is already complete", fix="choose a new run folder")
    _refuse_second_writer(folder, runner)
    folder.create()
    folder.spec.write_text(spec.to_json())
    from submitit.core.utils import FailedJobError  # noqa: PLC0415 - see _executor

    executor = _executor(spec, folder, windows)
    try:
        with _outside_any_job():
            job_id = str(executor.submit(task).job_id)
    except FailedJobError as error:
        words = str(error).strip().splitlines()[-1:]
        raise SlurmError("sbatch refused the job", why=" ".join(words)) from None
    line = {"job_id": job_id, "submitted_ns": time.time_ns(), "partition": spec.partition}
    with folder.jobs.open("a") as jobs:
        jobs.write(json.dumps(line) + "\n")
        jobs.flush()
        os.fsync(jobs.fileno())
    return job_id


@contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide what this process inherited from a job that it runs in.

    sbatch hands its environment on, and Slurm sets these only for some jobs: the first attempt of
    a new job would take the count, or the array index, of the job it was submitted from for its
    own.
    """
    hidden = {
        name: os.environ.pop(name)
        for name in list(os.environ)
        if name.startswith(("SLURM_RESTART_COUNT", "SLURM_ARRAY_", "SLURM_HET_"))
    }
    try:
        yield
    finally:
        os.environ.update(hidden)


def job_ids(folder: RunFolder) -> list[str]:
    """Ids of the jobs of a run, oldest first.

    Those that ``launch`` has noted; of a batch script written by hand, those that have logged.
    """
    lines = folder.jobs.read_text().splitlines() if folder.jobs.exists() else []
    submitted = [str(json.loads(line)["job_id"]) for line in lines if line]
    attempts = sorted(folder.events.glob("[0-9]*-*"), key=lambda path: path.stat().st_mtime_ns)
    logged = [path.name.rpartition("-")[0] for path in attempts]
    by_hand = [job_id for job_id in dict.fromkeys(logged) if job_id not in submitted]
    return [*by_hand, *submitted]


def _refuse_second_writer(folder: RunFolder, runner: Runner) -> None:
    for job_id in job_ids(folder)[-1:]:
        try:
            job = scontrol.show_job(job_id, runner=runner)
        except NotFoundError:
            continue
        if not job.over:
            raise UsageError(
                f"job {job_id} of {folder.path} is still {job.state.lower()}",
                why="two jobs must not write into one run folder",
                fix=f"follow it with `slurmspot watch {folder.path}`, or cancel it first",
            )


def _executor(spec: Spec, folder: RunFolder, windows: Windows) -> SlurmExecutor:
    import submitit  # noqa: PLC0415 - `launch` alone pays for importing it

    # submitit looks for srun in its constructor; what it would submit does not depend on it.
    class Executor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:
            return 1

    executor = Executor(folder=folder.logs)
    executor.update_parameters(**_parameters(spec, folder, windows))
    return executor


def _parameters(spec: Spec, folder: RunFolder, windows: Windows) -> dict[str, object]:
    optional = {
        name: value
        for name in ("account", "qos", "constraint", "exclude", "nodelist")
        if (value := getattr(spec, name))
    }
    if spec.mem_gb:
        optional["mem"] = f"{round(spec.mem_gb * 1024)}M"
    if spec.gpus_per_node:
        optional["gpus_per_node"] = spec.gpus_per_node
    return {
        "job_name": spec.name,
        "partition": spec.partition,
        "time": spec.time_min,
        "ntasks_per_node": spec.ranks_per_node,
        "cpus_per_task": spec.cpus_per_task,
        "stderr_to_stdout": True,
        "wckey": None,  # submitit's own would be refused where only known keys are accepted
        "additional_parameters": {
            "nodes": spec.nodes,
            "requeue": True,
            "signal": f"USR1@{spec.lead_s}",
        },
        "srun_args": [
            # One rank's death ends the step, so that the others do not wait for it for ever.
            "--kill-on-bad-exit=1",
            # From 22.05 on srun no longer takes this over from sbatch.
            f"--cpus-per-task={spec.cpus_per_task}",
        ],
        "setup": [
            f"# every rank runs: {json.dumps(spec.call or shlex.join(spec.command))}",
            *_exports(spec, folder, windows),
            *_TRAP,
            *_watchdog(spec),
            *spec.setup,
        ],
        "teardown": [
            "rc=$?",
            *(["kill $watchdog 2>/dev/null"] if spec.hang_s else []),
            f'{shlex.quote(sys.executable)} -m {_REQUEUE} "$rc"',
            "exit $?",
        ],
        **optional,
    }


# A handler, not an ignored signal: children would inherit the latter. bash runs it only after
# srun has returned, so a SIGTERM at the end of the grace does not stop the requeue.
_TRAP = ("trap : TERM USR1",)


def _watchdog(spec: Spec) -> list[str]:
    if not spec.hang_s:
        return []
    return [f"{shlex.quote(sys.executable)} -m {_WATCHDOG} &", "watchdog=$!"]


def _exports(spec: Spec, folder: RunFolder, windows: Windows) -> list[str]:
    values = {
        settings.RUN_VAR: str(folder.path),
        settings.PERIOD_VAR: f"{spec.period_s:g}",
        settings.PERIOD_STEPS_VAR: str(spec.period_steps),
        settings.KEEP_VAR: str(spec.keep),
        settings.LOCAL_VAR: spec.local,
        settings.WINDOW_VAR: f"{windows.window_s:g}",
        settings.KILL_WAIT_VAR: f"{windows.kill_wait_s:g}",
        settings.NOTICE_VAR: ",".join(spec.notice),
        settings.METADATA_URL_VAR: spec.metadata_url,
        settings.HANG_VAR: f"{spec.hang_s:g}" if spec.hang_s else "",
    }
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items() if value]
