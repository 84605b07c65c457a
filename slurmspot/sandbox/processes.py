"""Find the processes of a sandbox, and of one of its nodes, and end them.

Read from ``/proc`` each time, never from a pid file: a pid may have been given to someone else.
Three marks tell whose a process is:

- a daemon, and a slurmstepd, works in its daemon's folder ``run/<daemon>`` (slurmstepd writes its
  title over its environment, so that cannot be asked);
- a task carries ``SLURM_CONF`` and ``SLURMD_NODENAME``;
- whatever else they started is their child, or has the setsid(2) of one of them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmspot.errors import SlurmspotError
from slurmspot.sandbox.spec import Layout

_DAEMONS = ("slurm", "munged", "mariadbd", "mysqld")
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One line of the process table.

    Attributes:
        session: its session's id, the pid of the process that opened it.
        program: file name of the executable.
        cwd: where it works.
        conf: its ``SLURM_CONF``.
        node: its ``SLURMD_NODENAME``.
    """

    pid: int
    parent: int
    session: int
    program: str = ""
    cwd: str = ""
    conf: str = ""
    node: str = ""


def table() -> list[Process]:
    """Every process of this machine that this user may look into; no zombies."""
    numbered = (proc for proc in Path("/proc").iterdir() if proc.name.isdigit())
    return [process for proc in numbered if (process := _read(proc))]


def owners(processes: Iterable[Process], layout: Layout) -> dict[int, str]:
    """Which daemon or node each process of the sandbox at ``layout`` belongs to, by pid."""
    processes = list(processes)
    run, conf = f"{layout.run('')}/", str(layout.conf)
    owner: dict[int, str] = {}
    for process in processes:
        if process.cwd.startswith(run) and process.program.startswith(_DAEMONS):
            owner[process.pid] = process.cwd.removeprefix(run).split("/")[0].split(" ")[0]
        elif process.conf == conf and process.node:
            owner[process.pid] = process.node
    sessions = {
        process.session: owner[process.pid] for process in processes if process.pid in owner
    }
    grew = True
    while grew:
        grew = False
        for process in processes:
            whose = owner.get(process.parent) or sessions.get(process.session)
            if whose and process.pid not in owner:
                owner[process.pid] = whose
                sessions.setdefault(process.session, whose)
                grew = True
    owner.pop(os.getpid(), None)
    return owner


def pids(layout: Layout, whose: str | None = None) -> list[int]:
    """The processes of one daemon or node, or of the whole sandbox."""
    found = owners(table(), layout)
    return [pid for pid, name in found.items() if whose is None or name == whose]


def kill(layout: Layout, whose: str | None = None, *, deadline_s: float = 10.0) -> int:
    """SIGKILL them all, again and again until none is left; how many there were.

    Raises:
        SlurmspotError: some are still there after ``deadline_s``.
    """
    deadline = time.monotonic() + deadline_s
    seen: dict[int, int | None] = {}
    while alive := _signal(pids(layout, whose), seen):
        if time.monotonic() > deadline:
            raise SlurmspotError(
                f"{len(alive)} processes of the sandbox {layout.path} do not end",
                why=f"pids {alive} outlived SIGKILL for {deadline_s:.0f} s",
            )
        time.sleep(_POLL_S)
    return len(seen)


def _signal(found: Iterable[int], seen: dict[int, int | None]) -> list[int]:
    """SIGKILL those found, note them in ``seen``; which of all seen are not gone.

    A process that is ending loses its marks before it lets go of its files, locks and ports, so it
    is not enough that it is found no more.
    """
    for pid in found:
        seen.setdefault(pid, start_ticks(pid))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [pid for pid, ticks in seen.items() if ticks is not None and start_ticks(pid) == ticks]


def start_ticks(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot; None if it is gone.

    Together with the pid it names a process for good.
    """
    fields = _stat(Path("/proc", str(pid)))
    return int(fields[19]) if fields else None


def _stat(proc: Path) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the third (state) on, see proc(5); None if it ended.

    A zombie with threads has not ended: they still hold its files.
    """
    try:
        text = (proc / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    ended = fields[0] in "ZX" and int(fields[17]) <= 1
    return None if ended else fields


def _read(proc: Path) -> Process | None:
    fields = _stat(proc)
    if fields is None:
        return None
    try:
        program = (proc / "exe").readlink().name
        cwd = str((proc / "cwd").readlink())
        environ = (proc / "environ").read_bytes()
    except OSError:  # gone meanwhile, a kernel thread, or someone else's
        program, cwd, environ = "", "", b""
    variables = dict(
        entry.split("=", 1) for entry in os.fsdecode(environ).split("\0") if "=" in entry
    )
    return Process(
        pid=int(proc.name),
        parent=int(fields[1]),
        session=int(fields[3]),
        program=program,
        cwd=cwd,
        conf=variables.get("SLURM_CONF", ""),
        node=variables.get("SLURMD_NODENAME", ""),
    )
