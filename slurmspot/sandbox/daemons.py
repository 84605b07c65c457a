"""The command line of each daemon, and how one is started and waited for."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmspot.errors import SlurmspotError
from slurmspot.sandbox import processes
from slurmspot.sandbox.spec import Layout

_POLL_S = 0.02
_LOG_LINES = 4

# A throw-away database: written through to the page cache at each commit, so that it outlives
# SIGKILL, but never to the disk. `loose` is for what only some releases of MariaDB know.
_DATABASE_OPTIONS = (
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-flush-method=nosync",
    "--innodb-doublewrite=OFF",
    "--innodb-log-file-size=16M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-lock-wait-timeout=900",
    "--innodb-use-native-aio=OFF",
    "--sync-frm=OFF",
    "--skip-log-bin",
    "--loose-innodb-snapshot-isolation=OFF",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """One daemon: its name is that of its working folder, its log, and its processes' mark."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def munged(programs: Mapping[str, str], layout: Layout) -> Daemon:
    """The keeper of the cluster's secret. ``--force``: the folder above may be /tmp."""
    run = layout.run("munged")
    return Daemon(
        name="munged",
        argv=(
            programs["munged"],
            "--foreground",
            "--force",
            f"--socket={layout.munge_socket}",
            f"--key-file={layout.munge_key}",
            f"--pid-file={run}/pid",
            f"--seed-file={run}/seed",
            f"--log-file={layout.log('munged')}",
        ),
    )


def database_setup(programs: Mapping[str, str], layout: Layout, user: str) -> tuple[str, ...]:
    """The command that lays out MariaDB's tables: root without password, on a private socket."""
    return (
        programs["mariadb-install-db"],
        "--no-defaults",
        f"--user={user}",
        f"--datadir={layout.run('mariadbd')}/data",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        *_DATABASE_OPTIONS,
    )


def mariadbd(programs: Mapping[str, str], layout: Layout, user: str) -> Daemon:
    """The database behind the accounting. It listens on no port.

    ``database_init`` makes slurmdbd's database before slurmdbd asks for it. Left to make it itself,
    slurmdbd goes on with a connection on which recent client libraries fail (error 5027, 11.8.9).
    """
    run = layout.run("mariadbd")
    return Daemon(
        name="mariadbd",
        argv=(
            programs["mariadbd"],
            "--no-defaults",
            f"--user={user}",
            f"--datadir={run}/data",
            f"--socket={layout.database_socket}",
            f"--pid-file={run}/pid",
            f"--init-file={layout.database_init}",
            "--skip-networking",
            *_DATABASE_OPTIONS,
        ),
    )


def slurmdbd(programs: Mapping[str, str], layout: Layout) -> Daemon:
    """The accounting daemon. Its client library takes MariaDB's socket from the environment."""
    return Daemon(
        name="slurmdbd",
        argv=(programs["slurmdbd"], "-D"),
        env={"MYSQL_UNIX_PORT": str(layout.database_socket)},
    )


def slurmctld(programs: Mapping[str, str]) -> Daemon:
    """The controller. ``-i``: killed before it saved a part of its state, it starts without it."""
    return Daemon(name="slurmctld", argv=(programs["slurmctld"], "-D", "-i"))


def slurmd(programs: Mapping[str, str], node: str) -> Daemon:
    """One node."""
    return Daemon(name=node, argv=(programs["slurmd"], "-D", "-N", node))


def start(daemon: Daemon, layout: Layout, env: Mapping[str, str]) -> None:
    """Start it with setsid(2), so that no Ctrl-C and no hang-up of ours reaches it.

    ``setsid --fork`` leaves it to init: it holds none of our files and never becomes our zombie.
    """
    run = layout.run(daemon.name)
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    with layout.log(daemon.name).open("ab") as log:
        subprocess.run(
            ["/usr/bin/setsid", "--fork", *daemon.argv],
            cwd=run,
            env={**env, **daemon.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )


def wait_for(
    what: str,
    ready: Callable[[], bool],
    layout: Layout,
    *needs: str,
    deadline_s: float,
) -> None:
    """Poll ``ready`` until it holds.

    Args:
        needs: the daemons it hangs on; when one of them is dead there is no point in waiting.

    Raises:
        SlurmspotError: a daemon died or the deadline passed; ``why`` quotes the logs.
    """
    begin = time.monotonic()
    while not ready():
        waited_s = time.monotonic() - begin
        # The first moment belongs to the start itself: fork, exec, chdir.
        alive = set(processes.owners(processes.table(), layout).values())
        dead = [name for name in needs if name not in alive] if waited_s > 1.0 else []
        if dead or waited_s > deadline_s:
            verdict = f"{', '.join(dead)} ended" if dead else f"waited {deadline_s:.0f} s"
            raise SlurmspotError(
                f"{what} of the sandbox is not ready",
                why="\n       ".join([verdict, *last_words(layout, *(dead or needs))]),
            )
        time.sleep(_POLL_S)


def accepts(path: Path) -> bool:
    """Whether someone accepts connections on the Unix socket at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def last_words(layout: Layout, *names: str) -> list[str]:
    """The last lines of these daemons' logs, errors before chatter."""
    found: list[str] = []
    for name in names:
        log = layout.log(name)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        found.extend((errors or lines)[-_LOG_LINES:])
    return found
