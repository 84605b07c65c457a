"""Whose a process is, told from a process table."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurmspot.errors import SlurmUnreachableError
from slurmspot.sandbox import ports, processes, programs
from slurmspot.sandbox.processes import Process, owners
from slurmspot.sandbox.spec import Layout

LAYOUT = Layout(Path("/tmp/s/x"))
CONF = "/tmp/s/x/etc/slurm.conf"


def daemon(pid: int, name: str, program: str) -> Process:
    return Process(pid=pid, parent=1, session=pid, program=program, cwd=f"/tmp/s/x/run/{name}")


def test_daemons_are_known_by_where_they_work() -> None:
    table = [
        daemon(10, "slurmctld", "slurmctld-wlm"),
        daemon(11, "node0", "slurmd"),
        daemon(12, "mariadbd/data", "mariadbd"),
        daemon(13, "node1 (deleted)", "slurmstepd-wlm"),
    ]
    assert owners(table, LAYOUT) == {10: "slurmctld", 11: "node0", 12: "mariadbd", 13: "node1"}


def test_a_shell_that_stands_in_the_folder_is_nobodys() -> None:
    assert owners([daemon(10, "node0", "bash"), daemon(11, "node0", "tail")], LAYOUT) == {}


def test_a_task_is_known_by_its_environment_and_a_client_is_spared() -> None:
    task = Process(pid=20, parent=1, session=20, program="python3", conf=CONF, node="node2")
    client = Process(pid=21, parent=1, session=21, program="pytest", conf=CONF)
    foreign = Process(pid=22, parent=1, session=22, conf="/etc/slurm/slurm.conf", node="node2")
    assert owners([task, client, foreign], LAYOUT) == {20: "node2"}


def test_what_hides_is_found_by_its_parents_and_its_session() -> None:
    step = daemon(30, "node0", "slurmstepd")
    child = Process(pid=31, parent=30, session=31)
    grandchild = Process(pid=32, parent=31, session=32)
    orphan = Process(pid=33, parent=1, session=32)
    stranger = Process(pid=34, parent=1, session=34)
    table = [orphan, grandchild, child, step, stranger]
    assert owners(table, LAYOUT) == dict.fromkeys((30, 31, 32, 33), "node0")


def test_two_sandboxes_are_told_apart() -> None:
    other = Layout(Path("/tmp/s/xy"))
    assert owners([daemon(10, "node0", "slurmd")], other) == {}


def test_we_never_count_ourselves() -> None:
    me = Process(pid=os.getpid(), parent=1, session=1, conf=CONF, node="node0")
    assert owners([me], LAYOUT) == {}


def test_the_table_shows_this_process_and_no_zombie() -> None:
    pids = {process.pid for process in processes.table()}
    assert os.getpid() in pids
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        assert child.stdout.read() == b""  # it has closed its files: it is ending
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and left a zombie
        assert child.pid not in {process.pid for process in processes.table()}
        assert processes.start_ticks(child.pid) is None
    assert processes.start_ticks(os.getpid()) is not None


def test_reserved_ports_are_free_for_our_daemons_and_taken_for_others() -> None:
    with ports.reserved(3) as first, ports.reserved(3) as second:
        assert not set(range(first, first + 3)) & set(range(second, second + 3))
        for port in range(first, first + 3):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen()
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("", port))


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnreachableError) as caught:
        programs.find(str(tmp_path))
    assert caught.value.exit_code == 4
    assert "apt-get install --no-install-recommends mariadb-server munge " in str(caught.value)
