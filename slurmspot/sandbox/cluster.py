"""A real Slurm cluster on this machine, private to its user.

Its own munge key, database, controller, nodes, ports and sockets: the system's Slurm, if there is
one, is neither needed nor touched. Nothing of it is worth keeping, so everything ends by SIGKILL.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from slurmspot.cluster import command
from slurmspot.errors import NotFoundError, SlurmspotError, UsageError
from slurmspot.sandbox import config, daemons, folders, ports, processes, programs
from slurmspot.sandbox.config import Site
from slurmspot.sandbox.spec import Layout, Spec
from slurmspot.settings import MASTER_ADDR_VAR

_UP = frozenset({"idle", "mixed", "allocated", "completing"})
# Variables by which a shell inside another cluster, or another job, would mislead Slurm's commands.
_FOREIGN = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SACCT_",
    "SINFO_",
    "SQUEUE_",
    "SCONTROL_",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is alive.

    Attributes:
        daemons: by name, whether it runs; a slurmd has its node's name.
        nodes: by name, its state as sinfo prints it; empty while the controller does not answer.
    """

    name: str
    folder: Path
    daemons: Mapping[str, bool]
    nodes: Mapping[str, str]

    @property
    def healthy(self) -> bool:
        """Whether every daemon runs and every node can take jobs."""
        return all(self.daemons.values()) and bool(self.nodes) and not self.down

    @property
    def down(self) -> list[str]:
        """The nodes that can take no job."""
        return [name for name, state in self.nodes.items() if state not in _UP]


class Sandbox:
    """One cluster: made by :meth:`up`, found again by :meth:`open`, ended by :meth:`down`.

    As a context manager it is taken down at the end of the block.
    """

    def __init__(self, spec: Spec, layout: Layout, first_port: int) -> None:
        self.spec = spec
        self.layout = layout
        self._first_port = first_port

    @cached_property
    def _programs(self) -> dict[str, str]:
        return programs.find()

    # ---------------------------------------------------------------- make, find, end

    @classmethod
    def up(
        cls,
        name: str = "default",
        *,
        nodes: int = 4,
        gpus_per_node: int = 4,
        grace_s: int = 15,
        kill_wait_s: int = 5,
        folder: Path | str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """Bring a cluster up and wait until every node is idle.

        What an earlier cluster of that name left behind, when its owner was killed or the machine
        restarted, is removed first. An interrupted or failed ``up`` leaves nothing but, on
        failure, its logs in ``<folder>.failed``.

        Args:
            folder: where it lives; by default one of this user's own, by name.
            progress: called with a line for each stage.

        Raises:
            UsageError: a value is wrong, or a cluster of that name is alive.
            SlurmUnreachableError: packages are missing.
            SlurmspotError: a daemon did not start; ``why`` quotes its log.
        """
        spec = Spec(
            name=name,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            grace_s=grace_s,
            kill_wait_s=kill_wait_s,
        )
        layout = Layout(Path(folder).absolute() if folder else folders.private_base() / name)
        programs.find()  # before anything is touched
        with folders.locked(layout.path), ports.reserved(config.port_count(spec)) as first_port:
            sandbox = cls(spec, layout, first_port)
            sandbox._clear_remains()
            try:
                sandbox._build(progress or (lambda _line: None))
            except BaseException as error:
                sandbox._remove(keep_logs=isinstance(error, Exception))
                raise
        return sandbox

    @classmethod
    def open(cls, name_or_folder: str | Path = "default") -> Self:
        """The cluster of that name, or in that folder (anything with a ``/``), alive or half dead.

        Raises:
            NotFoundError: there is none.
        """
        text = str(name_or_folder)
        layout = Layout(Path(text).absolute() if "/" in text else folders.private_base() / text)
        record = folders.read_record(layout)
        if record is None:
            raise NotFoundError(
                f"there is no sandbox {text!r}",
                why=f"{layout.record} does not exist",
                fix="bring one up with `slurmspot sandbox up`",
            )
        return cls(Spec(**record["spec"]), layout, record["first_port"])

    @classmethod
    def current(cls, environ: Mapping[str, str]) -> Self | None:
        """The cluster that ``SLURM_CONF`` in ``environ`` belongs to; None if to no sandbox."""
        conf = environ.get("SLURM_CONF", "")
        folder = Path(conf).parent.parent
        if not conf.startswith("/") or not (folder / "sandbox.json").is_file():
            return None
        return cls.open(folder)

    def down(self) -> None:
        """End every process and remove the folder. Does nothing where nothing is left."""
        with folders.locked(self.layout.path):
            self._remove()

    def detach(self) -> Self:
        """Let the cluster live on when this process ends, until someone takes it down."""
        self._write_record(owner=None)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # ---------------------------------------------------------------- use

    @property
    def env(self) -> dict[str, str]:
        """What a client adds to its environment. All nodes share this host and its loopback."""
        return {
            "SLURM_CONF": str(self.layout.conf),
            MASTER_ADDR_VAR: "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def exec(self, argv: Sequence[str]) -> int:
        """Run a command as a client of this cluster, on our own terminal; its exit code."""
        try:
            return subprocess.run(list(argv), env=self._environ(), check=False).returncode
        except OSError as error:
            raise UsageError(f"cannot run {argv[0]}", why=error.strerror) from None

    def run(
        self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0
    ) -> command.Output:
        """A :data:`slurmspot.cluster.command.Runner` whose commands talk to this cluster."""
        drop = [word for name in _foreign(os.environ) for word in ("-u", name)]
        assign = [f"{name}={value}" for name, value in self.env.items()]
        return command.run(["env", *drop, *assign, *argv], stdin=stdin, timeout_s=timeout_s)

    def status(self) -> Status:
        """What of it is alive."""
        alive = set(processes.owners(processes.table(), self.layout).values())
        names = ("munged", "mariadbd", "slurmdbd", "slurmctld", *self.spec.node_names)
        return Status(
            name=self.spec.name,
            folder=self.layout.path,
            daemons={name: name in alive for name in names},
            nodes=self._node_states() if "slurmctld" in alive else {},
        )

    def local(self, node: str) -> Path:
        """The folder that stands for the local disk of ``node``."""
        return self.layout.local(self._known(node))

    # ---------------------------------------------------------------- break and mend

    def vanish(self, node: str) -> int:
        """The machine is gone: every process on it, and all that its local disk held.

        Slurm is told nothing: it finds out by itself after ``SlurmdTimeout`` (300 s), or is told
        with ``scontrol update NodeName=… State=DOWN``.

        Returns:
            how many processes were killed.
        """
        killed = processes.kill(self.layout, self._known(node))
        for folder in (self.layout.local(node), self.layout.run(node)):
            folders.empty(folder)
        return killed

    def revive(self, node: str, *, deadline_s: float = 60.0) -> None:
        """The machine is back, empty: start its slurmd and wait until it can take jobs.

        Until slurmd has registered, what Slurm says of the node is of the one before; and resumed
        before, it would be asked in vain and taken for silent for up to 100 s.

        Raises:
            SlurmspotError: it is not back after ``deadline_s``.
        """
        before_s = -2.0
        if not processes.pids(self.layout, self._known(node)):
            before_s = self._slurmd_started_s(node)
            # Slurm counts whole seconds: within the same one they could not be told apart.
            time.sleep(max(0.0, before_s + 1 - time.time()))
            self._start(daemons.slurmd(self._programs, node))

        def usable() -> bool:
            if self._slurmd_started_s(node) <= before_s:
                return False
            state = self._node_states().get(node, "")
            if state.startswith(("down", "drain", "fail")):
                self.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
            return state in _UP

        self._await(node, usable, node, deadline_s=deadline_s)

    def reset(self, *, deadline_s: float = 60.0) -> None:
        """End every job, at once, and bring every node back to idle.

        Raises:
            SlurmspotError: that takes longer than ``deadline_s``.
        """
        everyone = f"--user={_user_name()}"
        # Pending ones first, lest they start; the others need not wait out KillWait.
        self.run(["scancel", everyone, "--state=PENDING"])
        self.run(["scancel", everyone, "--signal=KILL", "--full"])
        self.run(["scancel", everyone])
        for node, state in self._node_states().items():
            if state not in _UP:
                self.revive(node, deadline_s=deadline_s)

        def calm() -> bool:
            jobs = self.run(["squeue", "--noheader"]).stdout
            return not jobs.strip() and set(self._node_states().values()) == {"idle"}

        self._await("a node", calm, *self.spec.node_names, deadline_s=deadline_s)

    def stop_controller(self) -> None:
        """SIGKILL slurmctld."""
        processes.kill(self.layout, "slurmctld")

    def restart_controller(self) -> None:
        """SIGKILL slurmctld, start it again, and wait until it knows every node's state."""
        self.stop_controller()
        self._start_controller()

        def informed() -> bool:
            return not any("unknown" in state for state in self._node_states().values())

        self._await("a node", informed, "slurmctld")

    def stop_accounting(self) -> None:
        """SIGKILL slurmdbd and the database under it."""
        for name in ("slurmdbd", "mariadbd"):
            processes.kill(self.layout, name)

    def restart_accounting(self) -> None:
        """SIGKILL slurmdbd and its database, start them again, and wait until they answer."""
        self.stop_accounting()
        self._start_accounting()
        self._await_accounting("-n", "show", "cluster")

    # ---------------------------------------------------------------- how

    def _build(self, progress: Callable[[str], None]) -> None:
        layout, spec = self.layout, self.spec
        self._write_record(owner=os.getpid())
        for folder in (
            layout.logs,
            layout.etc,
            layout.run("mariadbd"),
            layout.gpu(0).parent,
            *map(layout.local, spec.node_names),
        ):
            folder.mkdir(mode=0o700, parents=True)
        self._configure()

        progress("starting munge and MariaDB")
        self._start(daemons.munged(self._programs, layout))
        self._set_up_database()
        self._start_accounting()
        self._await("munge", lambda: daemons.accepts(layout.munge_socket), "munged")
        progress(f"starting Slurm with {spec.nodes} nodes")
        for node in spec.node_names:
            self._start(daemons.slurmd(self._programs, node))
        self._await_accounting("-i", "add", "cluster", spec.name)
        self._start_controller()
        self._await("a node", self._all_up, *spec.node_names, "slurmctld")
        progress("up")

    def _configure(self) -> None:
        spec, layout = self.spec, self.layout
        host = socket.gethostname().split(".")[0]
        site = Site(layout=layout, host=host, user=_user_name(), first_port=self._first_port)
        features = programs.features(self._programs, host)
        for name, content in (
            ("slurm.conf", config.slurm_conf(spec, site, features).encode()),
            ("gres.conf", config.gres_conf(spec, site).encode()),
            ("cgroup.conf", config.cgroup_conf(features).encode()),
            ("slurmdbd.conf", config.slurmdbd_conf(site).encode()),
            (layout.munge_key.name, secrets.token_bytes(1024)),
        ):
            folders.write_private(layout.etc / name, content)
        for index in range(spec.gpus_per_node):
            # Slurm asks only that it be a character device, and a link to one needs no root.
            layout.gpu(index).symlink_to("/dev/null")

    def _set_up_database(self) -> None:
        folders.write_private(self.layout.database_init, b"CREATE DATABASE IF NOT EXISTS slurm;\n")
        done = self.run(daemons.database_setup(self._programs, self.layout, _user_name()))
        self.layout.log("mariadb-install-db").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise SlurmspotError(
                "MariaDB of the sandbox could not lay out its tables",
                why="\n       ".join(daemons.last_words(self.layout, "mariadb-install-db")),
            )

    def _start_accounting(self) -> None:
        self._start(daemons.mariadbd(self._programs, self.layout, _user_name()))
        self._await("MariaDB", lambda: daemons.accepts(self.layout.database_socket), "mariadbd")
        self._start(daemons.slurmdbd(self._programs, self.layout))

    def _await_accounting(self, *question: str) -> None:
        def answers() -> bool:
            listening = ports.listening(config.slurmdbd_port(self._first_port))
            return listening and self._answers("sacctmgr", *question)

        self._await("slurmdbd", answers, "slurmdbd", "mariadbd", *self.spec.node_names)

    def _start_controller(self) -> None:
        self._start(daemons.slurmctld(self._programs))
        self._await("slurmctld", self._controller_answers, "slurmctld")

    def _start(self, daemon: daemons.Daemon) -> None:
        daemons.start(daemon, self.layout, self._environ())

    def _await(
        self, what: str, ready: Callable[[], bool], *needs: str, deadline_s: float = 30.0
    ) -> None:
        daemons.wait_for(what, ready, self.layout, *needs, deadline_s=deadline_s)

    def _answers(self, *argv: str) -> bool:
        return self.run(argv, timeout_s=30.0).returncode == 0

    def _controller_answers(self) -> bool:
        return ports.listening(self._first_port) and self._answers("sinfo", "--noheader")

    def _all_up(self) -> bool:
        states = self._node_states()
        return len(states) == self.spec.nodes and _UP.issuperset(states.values())

    def _node_states(self) -> dict[str, str]:
        output = self.run(["sinfo", "--noheader", "--Node", "--partition=spot", "--format=%N %T"])
        return dict(line.split() for line in output.stdout.splitlines() if len(line.split()) == 2)

    def _slurmd_started_s(self, node: str) -> float:
        """Unix time at which the slurmd that registered last was started; -1 without one."""
        shown = self.run(["scontrol", "--oneliner", "show", "node", node]).stdout
        found = re.search(r"SlurmdStartTime=(\d\S+)", shown)
        return datetime.fromisoformat(found[1]).timestamp() if found else -1

    def _known(self, node: str) -> str:
        if node not in self.spec.node_names:
            raise NotFoundError(
                f"the sandbox {self.spec.name!r} has no node {node!r}",
                fix=f"it has {', '.join(self.spec.node_names)}",
            )
        return node

    def _environ(self) -> dict[str, str]:
        own = {
            name: value for name, value in os.environ.items() if name not in _foreign(os.environ)
        }
        return {**own, "PATH": programs.search_path(), **self.env}

    def _write_record(self, *, owner: int | None) -> None:
        record = {
            "format": folders.RECORD_FORMAT,
            "spec": dataclasses.asdict(self.spec),
            "first_port": self._first_port,
            "owner": owner,
            "owner_started": processes.start_ticks(owner) if owner else None,
        }
        folders.write_private(self.layout.record, json.dumps(record, indent=2).encode())

    def _clear_remains(self) -> None:
        """Remove what a cluster without a living owner left here.

        Raises:
            UsageError: it is alive, or the folder holds something else.
        """
        record = folders.read_record(self.layout)
        if record is None and any(self.layout.path.iterdir()):
            raise UsageError(
                f"{self.layout.path} is not empty and holds no sandbox",
                fix="choose another --folder",
            )
        if record is not None and self._is_alive(record):
            owner = record["owner"]
            raise UsageError(
                f"the sandbox {self.spec.name!r} is already up",
                why=f"process {owner} owns it" if owner else f"it lives in {self.layout.path}",
                fix=f"`slurmspot sandbox down --name {self.spec.name}`, or choose another --name",
            )
        self._wipe()

    def _is_alive(self, record: Mapping[str, Any]) -> bool:
        """Its owner lives; or, where it outlives its maker, its controller does."""
        owner = record["owner"]
        if owner is None:
            return bool(processes.pids(self.layout, "slurmctld"))
        started: int | None = record["owner_started"]
        return started is not None and processes.start_ticks(owner) == started

    def _wipe(self, *, keep_logs: bool = False) -> None:
        processes.kill(self.layout)
        shutil.rmtree(self.layout.failed_logs, ignore_errors=True)
        if keep_logs and self.layout.logs.is_dir():
            self.layout.logs.rename(self.layout.failed_logs)
        folders.empty(self.layout.path)

    def _remove(self, *, keep_logs: bool = False) -> None:
        self._wipe(keep_logs=keep_logs)
        self.layout.path.rmdir()
        with suppress(OSError):  # other sandboxes still live beside it
            folders.private_base().rmdir()


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UsageError(
            f"uid {os.geteuid()} has no name on this machine",
            why="Slurm knows its users by name",
            fix="add it to /etc/passwd, or run as a user that has a name",
        ) from None


def _foreign(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(_FOREIGN)]
