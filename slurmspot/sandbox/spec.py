"""What a sandbox is asked to be, and where it lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slurmspot.errors import UsageError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less the closing zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The cluster to build.

    Attributes:
        name: also the cluster's name in its accounting.
        nodes: how many nodes, ``node0`` to ``node<n-1>``.
        gpus_per_node: GPUs that each node claims.
        cpus_per_node: CPUs that each node claims, whatever the machine has.
        grace_s: seconds between the notice and the end of a preempted spot job (GraceTime).
        kill_wait_s: seconds between SIGTERM and SIGKILL (KillWait).

    Raises:
        UsageError: a value is out of range.
    """

    name: str = "default"
    nodes: int = 4
    gpus_per_node: int = 4
    cpus_per_node: int = 4
    grace_s: int = 15
    kill_wait_s: int = 5

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot name a sandbox",
                why="a name is 1 to 32 of a-z, 0-9, - and _, and starts with a letter or digit",
            )
        for label, value, least, most in (
            ("nodes", self.nodes, 1, 64),
            ("gpus", self.gpus_per_node, 0, 64),
            ("cpus", self.cpus_per_node, 1, 1024),
            ("grace-s", self.grace_s, 0, 86_400),
            ("kill-wait-s", self.kill_wait_s, 1, 3_600),
        ):
            if not least <= value <= most:
                raise UsageError(f"--{label} {value} is not within {least} to {most}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """``node0`` and so on."""
        return tuple(f"node{index}" for index in range(self.nodes))


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one sandbox. Paths only; nothing here reads or writes.

    ::

        sandbox.json          the record: spec, ports, owner
        etc/                  slurm.conf, slurmdbd.conf, gres.conf, cgroup.conf, munge.key
        run/<daemon>/         working folder, state and sockets of one daemon; nobody else works
                              there, so it tells whose a process is
        log/<daemon>.log
        local/<node>/         what a node's own NVMe would hold; dies with the node
        gpu/gpu<i>            character devices that stand for GPUs

    Raises:
        UsageError: the path is too long for the sockets below it, or holds characters that
            Slurm's configuration gives a meaning.
    """

    path: Path

    def __post_init__(self) -> None:
        text = str(self.path)
        if not re.fullmatch(r"/[A-Za-z0-9._/+@-]+", text):
            raise UsageError(
                f"a sandbox cannot live in {text!r}",
                why="Slurm's configuration gives blanks, #, %, [ and , a meaning",
                fix="choose another --folder",
            )
        # The longest is slurmstepd's, named for the node, the job and the step.
        longest = str(self.run("node63") / "node63_4294967295.4294967295")
        if len(longest) > _SOCKET_PATH_BYTES:
            raise UsageError(
                f"{text} is too long a path for a sandbox",
                why=f"its sockets would exceed the {_SOCKET_PATH_BYTES} bytes a path may have",
                fix="choose a shorter --folder, for example under /tmp",
            )

    @property
    def record(self) -> Path:
        """What ``up`` decided, as JSON."""
        return self.path / "sandbox.json"

    @property
    def etc(self) -> Path:
        """All configuration."""
        return self.path / "etc"

    @property
    def conf(self) -> Path:
        """The value of ``SLURM_CONF``."""
        return self.etc / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        """The cluster's secret."""
        return self.etc / "munge.key"

    @property
    def munge_socket(self) -> Path:
        """Where munged listens."""
        return self.run("munged") / "socket"

    @property
    def database_socket(self) -> Path:
        """Where mariadbd listens; it listens nowhere else."""
        return self.run("mariadbd") / "socket"

    @property
    def database_init(self) -> Path:
        """The SQL that mariadbd runs at each start."""
        return self.run("mariadbd") / "init.sql"

    @property
    def logs(self) -> Path:
        """One file for each daemon."""
        return self.path / "log"

    def log(self, daemon: str) -> Path:
        """What ``daemon`` printed."""
        return self.logs / f"{daemon}.log"

    @property
    def failed_logs(self) -> Path:
        """The logs of an ``up`` that failed, beside the folder; the next ``up`` removes them."""
        return self.path.with_name(f"{self.path.name}.failed")

    def run(self, daemon: str) -> Path:
        """Working folder of one daemon; a slurmd's is named for its node."""
        return self.path / "run" / daemon

    def local(self, node: str) -> Path:
        """The folder that stands for the local disk of ``node``."""
        return self.path / "local" / node

    def gpu(self, index: int) -> Path:
        """The character device that stands for GPU ``index`` of every node."""
        return self.path / "gpu" / f"gpu{index}"
