"""Whether a cluster, a Python environment and storage are fit for spot training: all findings."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from slurmspot import filesystem
from slurmspot.cluster.command import Runner, run
from slurmspot.cluster.fitness import examine
from slurmspot.faults.pyslurm import release_of
from slurmspot.findings import Finding, Level, ok, problem, untold, warning
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment

_EXTRAS = {"torch": "[train]", "h5py": "[train]", "numpy": "[train]", "submitit": "", "xxhash": ""}

Find = Callable[[str], Any]
"""Imports a module by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings.

    Attributes:
        reached: whether Slurm answered.
    """

    slurm: tuple[Finding, ...]
    python: tuple[Finding, ...]
    storage: tuple[Finding, ...]
    reached: bool

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of all three, in order."""
        return (*self.slurm, *self.python, *self.storage)

    @property
    def fit(self) -> bool:
        """Whether there is no problem."""
        return all(one.level is not Level.PROBLEM for one in self.findings)

    @property
    def exit_code(self) -> int:
        """0 without a problem, 1 with one, 4 if Slurm could not be reached."""
        if not self.reached:
            return 4
        return 0 if self.fit else 1


def diagnose(
    partition: str,
    job: JobEnvironment,
    *,
    runner: Runner = run,
    find: Find = importlib.import_module,
) -> Diagnosis:
    """Look at everything.

    Args:
        job: names the run folder, which need not exist yet, and the local tier, if there is one.
    """
    seen = examine(partition, runner=runner)
    cluster = seen.cluster
    window_s = job.window_s if cluster is None else cluster.window_s(partition)
    return Diagnosis(
        slurm=seen.findings,
        python=(*environment(find=find), *_pyslurm("" if cluster is None else cluster.version)),
        storage=(
            *run_storage(job.run or Path("runs"), window_s=window_s),
            *local_storage(job),
        ),
        reached=cluster is not None,
    )


def environment(*, find: Find) -> Iterator[Finding]:
    """Whether this interpreter has what a run needs, where the nodes see it."""
    prefix = Path(sys.prefix)
    why = "the ranks run this interpreter, by this path"
    yield filesystem.shared("python", prefix, filesystem.mounted(prefix), why=why)
    least = least_versions(_requirements())
    for name, extra in _EXTRAS.items():
        yield package(name, extra=extra, least=least.get(name, ""), find=find)


def package(name: str, *, extra: str, least: str, find: Find) -> Finding:
    """Whether a package can be imported, and is new enough.

    Args:
        extra: of slurmspot, that brings it.
        least: the oldest version that will do; empty if any will.
    """
    why = "training, checkpoints and submission need it"
    fix = f"pip install 'slurmspot{extra}' into the environment that the ranks run in"
    try:
        module = find(name)
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything
        return problem(name, f"cannot be imported: {error}", why, fix)
    version = _installed(name) or str(getattr(module, "__version__", ""))
    if not _numbers(version):
        return untold(name, f"{version or 'no version'} is told", why, fix)
    if _numbers(version) < _numbers(least):
        return problem(name, f"{version} is older than {least}", why, fix)
    return ok(name, version, why)


def least_versions(requirements: Sequence[str]) -> Mapping[str, str]:
    """The least version of each package that requirements such as ``torch>=2.5`` name."""
    pairs = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", line) for line in requirements)
    return {found[1]: found[2] for found in pairs if found}


def pyslurm(installed: str, cluster: str) -> Finding:
    """Whether an installed pyslurm speaks with this cluster; versions such as 22.5.3, 22.05.8."""
    subject, why = "pyslurm", "`inject --backend pyslurm` needs the one of the cluster's release"
    fix = "install the pyslurm of the cluster's release; scontrol, the default, needs none"
    try:
        fits = release_of(installed) == release_of(cluster)
    except ValueError:
        found = f"of {installed}, with Slurm {cluster or 'unknown'}"
        return untold(subject, found, why, fix)
    if fits:
        return ok(subject, f"{installed} fits Slurm {cluster}", why)
    return warning(subject, f"{installed} does not fit Slurm {cluster}", why, fix)


def run_storage(run: Path, *, window_s: float) -> Iterator[Finding]:
    """The file system of the run folder, or of where it would be made; writes to it."""
    name, folder = "run folder", filesystem.existing(run)
    checkpoint = filesystem.newest_checkpoint(RunFolder(run).checkpoints)
    why = "checkpoints there must outlive the nodes, and all ranks write there"
    yield filesystem.shared(name, folder, filesystem.mounted(folder), why=why)
    yield from _written_to(name, folder, window_s, checkpoint)


def local_storage(job: JobEnvironment) -> Iterator[Finding]:
    """The file system of the local tier on this node, if there is to be one; writes to it."""
    name, folder = "local tier", job.local_folder
    if folder is None:
        return
    if not filesystem.is_there(folder):
        yield _no_local(name, folder, job)
        return
    yield filesystem.own(name, folder, filesystem.mounted(folder))
    yield from _written_to(name, folder, None, None)


def _written_to(
    name: str, folder: Path, window_s: float | None, checkpoint: filesystem.Checkpoint | None
) -> Iterator[Finding]:
    """What is found by writing to a folder; arguments as of :func:`filesystem.pace`."""
    refusal = filesystem.try_out(folder)
    yield filesystem.commits(name, refusal)
    yield filesystem.space(name, filesystem.free_bytes(folder), checkpoint)
    if refusal is None:
        speed = filesystem.measure(folder)
        yield from filesystem.direct_io(name, speed)
        yield filesystem.pace(name, speed, window_s, checkpoint)


def _no_local(name: str, folder: Path, job: JobEnvironment) -> Finding:
    """It must exist on every node; on a login node it need not."""
    why = "where it is missing, periodic checkpoints go to the run folder"
    if job.job_id != "local":
        return problem(name, f"there is no folder {folder}", why, "make it on every node")
    fix = f"look at a node: `srun slurmspot doctor --local {shlex.quote(job.local)}`"
    return untold(name, f"there is no {folder} here, and this may be no compute node", why, fix)


def _pyslurm(cluster: str) -> Iterator[Finding]:
    if installed := _installed("pyslurm"):
        yield pyslurm(installed, cluster)


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _requirements() -> list[str]:
    try:
        return metadata.requires("slurmspot") or []
    except metadata.PackageNotFoundError:
        return []


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
