"""The sandbox is a real cluster: it preempts, loses nodes, gets them back, and leaves nothing."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import await_

from slurmspot.cluster.command import checked
from slurmspot.errors import NotFoundError, SlurmspotError, UsageError
from slurmspot.sandbox import Sandbox, processes
from slurmspot.sandbox.spec import Layout

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]


def submit(sandbox: Sandbox, script: str, *options: str) -> str:
    argv = ["sbatch", "--parsable", "--output=/dev/null", *options]
    return checked(sandbox.run, argv, stdin=f"#!/bin/bash\n{script}\n").strip()


def job_state(sandbox: Sandbox, job: str) -> str:
    return sandbox.run(["squeue", "--noheader", f"--jobs={job}", "--format=%T"]).stdout.strip()


@pytest.fixture
def short() -> Iterator[Callable[..., Sandbox]]:
    """Makes small sandboxes of this test, and takes them down."""
    made: list[Sandbox] = []

    def up(suffix: str, **options: object) -> Sandbox:
        cluster = Sandbox.up(f"t{os.getpid()}-{suffix}", nodes=1, gpus_per_node=1, **options)
        made.append(cluster)
        return cluster

    yield up
    for cluster in made:
        cluster.down()


def assert_gone(layout: Layout) -> None:
    assert processes.pids(layout) == []
    assert not layout.path.exists()
    mounts = Path("/proc/self/mounts").read_text()
    assert str(layout.path) not in mounts


def test_a_job_sees_its_gpus(sandbox: Sandbox) -> None:
    out = checked(
        sandbox.run,
        ["srun", "--nodes=2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES"],
    )
    assert out.split() == ["0,1", "0,1"]


def test_accounting_counts_gpus(sandbox: Sandbox) -> None:
    checked(sandbox.run, ["srun", "--job-name=counted", "--gpus-per-node=3", "true"])

    def counted() -> bool:
        argv = ["sacct", "--allocations", "--noheader", "--name=counted", "--format=AllocTRES%80"]
        return "gres/gpu=3" in sandbox.run(argv).stdout

    await_(counted)


def test_preemption_signals_first_and_the_job_comes_back(sandbox: Sandbox, tmp_path: Path) -> None:
    script = f"""
    echo start >> {tmp_path}/log
    [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
    srun --ntasks=1 bash -c '
        trap "echo USR1 >> {tmp_path}/log; kill %1" USR1
        echo ready >> {tmp_path}/log
        sleep 100 & wait'
    scontrol requeue "$SLURM_JOB_ID"
    sleep 100
    """
    job = submit(sandbox, script, "--signal=USR1@10", "--nodes=4", "--requeue", "--exclusive")
    log = tmp_path / "log"
    await_(lambda: log.exists() and "ready" in log.read_text())
    rival = submit(sandbox, "true", "--partition=ondemand", "--nodes=1", "--exclusive")
    await_(lambda: "USR1" in log.read_text())
    await_(lambda: job_state(sandbox, rival) == "")
    await_(lambda: job_state(sandbox, job) == "PENDING")
    # Not "now": a node does not launch a job again in the second in which it killed it.
    checked(sandbox.run, ["scontrol", "update", f"JobId={job}", "StartTime=now+3"])
    await_(lambda: log.read_text().split() == ["start", "ready", "USR1", "start"])


def test_vanish_takes_processes_and_local_disk_and_revive_brings_the_node_back(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    # One task hides: no environment, and setsid(2).
    task = f"env -i setsid sleep 300 & touch {tmp_path}/$SLURMD_NODENAME; sleep 300"
    script = f"srun bash -c '{task}'"
    submit(sandbox, script, "--nodes=2", "--nodelist=node0,node1", "--no-requeue")
    await_(lambda: len(list(tmp_path.iterdir())) == 2)
    sandbox.local("node1").joinpath("shard").write_bytes(b"x" * 100)
    before = set(processes.pids(sandbox.layout, "node1"))
    assert len(before) >= 4, "slurmd, slurmstepd, the task, the one that hides"

    assert sandbox.vanish("node1") >= len(before)

    assert processes.pids(sandbox.layout, "node1") == []
    assert not before & {process.pid for process in processes.table()}
    assert list(sandbox.local("node1").iterdir()) == []
    assert len(processes.pids(sandbox.layout, "node0")) >= 4, "the other node lives on"
    checked(sandbox.run, ["scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=gone"])
    await_(lambda: sandbox.status().nodes["node1"].startswith("down"))

    sandbox.revive("node1")

    assert sandbox.status().nodes["node1"] == "idle"
    assert checked(sandbox.run, ["srun", "--nodelist=node1", "hostname"])


def test_the_controller_may_die(sandbox: Sandbox) -> None:
    job = submit(sandbox, "sleep 100")
    await_(lambda: job_state(sandbox, job) == "RUNNING")
    # What it has not saved yet it forgets, and then gives the same job ids again.
    saved = sandbox.layout.run("slurmctld") / "job_state"
    running_s = time.time()
    checked(sandbox.run, ["scontrol", "update", f"JobId={job}", "Comment=save"])
    await_(lambda: saved.stat().st_mtime > running_s)
    sandbox.stop_controller()
    assert not sandbox.status().healthy
    sandbox.restart_controller()
    assert sandbox.status().healthy
    assert job_state(sandbox, job) == "RUNNING"


def test_the_accounting_may_die(sandbox: Sandbox) -> None:
    checked(sandbox.run, ["srun", "--job-name=before", "true"])
    argv = ["sacct", "--allocations", "--noheader", "--name=before", "--format=State"]
    await_(lambda: "COMPLETED" in sandbox.run(argv).stdout)
    sandbox.stop_accounting()
    checked(sandbox.run, ["srun", "true"])
    sandbox.restart_accounting()
    assert "COMPLETED" in sandbox.run(argv).stdout


def test_two_at_once_know_nothing_of_each_other(
    sandbox: Sandbox, short: Callable[..., Sandbox]
) -> None:
    other = short("two", grace_s=3, kill_wait_s=2)
    assert "GraceTime=3 " in checked(other.run, ["scontrol", "show", "partition", "spot"])
    assert "KillWait                = 2 sec" in checked(other.run, ["scontrol", "show", "config"])
    other.down()
    assert_gone(other.layout)
    assert sandbox.status().healthy


def test_down_works_on_a_half_dead_cluster_and_twice(short: Callable[..., Sandbox]) -> None:
    cluster = short("half")
    cluster.stop_controller()
    cluster.vanish("node0")
    processes.kill(cluster.layout, "mariadbd")
    cluster.down()
    assert_gone(cluster.layout)
    cluster.down()
    assert_gone(cluster.layout)
    with pytest.raises(NotFoundError):
        Sandbox.open(cluster.spec.name)


def test_a_name_in_use_is_refused_and_stays_up(short: Callable[..., Sandbox]) -> None:
    cluster = short("twice").detach()
    with pytest.raises(UsageError, match="already up"):
        Sandbox.up(cluster.spec.name)
    assert cluster.status().healthy


def run_up(name: str, **options: object) -> subprocess.Popen[str]:
    code = f"from slurmspot.sandbox import Sandbox; Sandbox.up({name!r}, nodes=1, gpus_per_node=1)"
    return subprocess.Popen(
        [sys.executable, "-c", code + "; print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        **options,
    )


def test_what_a_killed_owner_left_is_cleaned_first(short: Callable[..., Sandbox]) -> None:
    name = f"t{os.getpid()}-orphan"
    with run_up(name) as owner:
        assert owner.stdout.readline() == "up\n"
        remains = Sandbox.open(name)
        left = set(processes.pids(remains.layout))
        owner.kill()
    assert left <= set(processes.pids(remains.layout)), "killing the owner left it running"
    again = short("orphan")
    assert not left & set(processes.pids(again.layout))
    assert again.status().healthy


def test_ctrl_c_during_up_leaves_nothing() -> None:
    name = f"t{os.getpid()}-ctrlc"
    with run_up(name, start_new_session=True) as owner:
        layout = Layout(Path(f"/tmp/slurmspot-{os.geteuid()}") / name)
        await_(lambda: "mariadbd" in processes.owners(processes.table(), layout).values())
        os.killpg(owner.pid, signal.SIGINT)
        assert "KeyboardInterrupt" in owner.stderr.read()
        assert owner.wait() != 0
    assert_gone(layout)


def test_a_daemon_that_cannot_start_is_quoted_and_its_logs_are_kept(
    short: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "slurmctld"
    broken.write_text("#!/bin/sh\necho fatal: out of luck\nexit 1\n")
    broken.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(SlurmspotError, match="slurmctld of the sandbox is not ready") as caught:
            short("broken")
    assert "out of luck" in str(caught.value)
    layout = Layout(Path(f"/tmp/slurmspot-{os.geteuid()}") / f"t{os.getpid()}-broken")
    assert_gone(layout)
    assert "out of luck" in (layout.failed_logs / "slurmctld.log").read_text()
    short("broken")
    assert not layout.failed_logs.exists()


def test_the_command_line_from_up_to_down(tmp_path: Path) -> None:
    name = f"t{os.getpid()}-cli"

    def cli(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "slurmspot", "sandbox", *argv],
            capture_output=True,  # would wait for ever if a daemon held the pipes
            text=True,
            check=False,
            timeout=60,
        )

    up = cli("up", "--name", name, "--nodes", "1", "--gpus", "0", "--json")
    try:
        assert up.returncode == 0, up.stderr
        assert json.loads(up.stdout)["nodes"] == {"node0": "idle"}
        assert cli("status", "--name", name).returncode == 0
        ran = cli("exec", "--name", name, "--", "srun", "--quiet", "bash", "-c", "exit 7")
        assert ran.returncode == 7, ran.stderr
    finally:
        down = cli("down", "--name", name)
    assert down.returncode == 0, down.stderr
    assert cli("status", "--name", name).returncode == 3


def test_an_ordinary_user_can_have_one() -> None:
    user = pwd.getpwnam("daemon") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    # Root's Python and this checkout may be out of the user's reach: import first, then become it.
    code = f"""
import os
from slurmspot.cluster.command import checked
from slurmspot.sandbox import Sandbox, processes
os.chdir("/")
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({user.pw_gid})
    os.setuid({user.pw_uid})
with Sandbox.up("t{os.getpid()}-user", nodes=2, gpus_per_node=2) as s:
    task = ["bash", "-c", "echo $CUDA_VISIBLE_DEVICES $UID"]
    print(checked(s.run, ["srun", "--nodes=2", "--gpus-per-node=2", *task]))
    assert s.vanish("node1") >= 1
    s.revive("node1")
    assert s.status().healthy
assert processes.pids(s.layout) == [] and not s.layout.path.exists()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0,1", str(user.pw_uid)] * 2
