"""Starting one rank, and calling a function as a program."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from slurmspot.cluster.spec import Spec
from slurmspot.errors import NotFoundError, SlurmspotError, UsageError
from slurmspot.job import rendezvous
from slurmspot.job.call import resolve
from slurmspot.job.rank import RankCommand, distributed_variables
from slurmspot.settings import JobEnvironment

TASK = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}


def test_what_torch_distributed_reads():
    assert distributed_variables(TASK) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
    }
    assert distributed_variables({"PATH": "/bin"}) == {}


def test_the_address_of_rank_0_can_be_given():
    env = {**TASK, "SLURMSPOT_MASTER_ADDR": "10.0.0.1"}
    assert distributed_variables(env)["MASTER_ADDR"] == "10.0.0.1"


def test_all_ranks_try_one_port_first_and_each_attempt_another():
    first = rendezvous.first_choice(TASK)
    assert 20000 <= first < 32000
    assert rendezvous.first_choice({**TASK, "SLURM_PROCID": "0"}) == first
    restarts = [rendezvous.first_choice({**TASK, "SLURM_RESTART_COUNT": str(n)}) for n in range(5)]
    assert len(set(restarts)) == 5
    assert rendezvous.first_choice({**TASK, "SLURM_CONF": "/another/cluster"}) != first


def _begin(*argv, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "slurmspot.job.rank", "--", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **TASK, **env},
    )


def _end(process):
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _rank(*argv, **env):
    return _end(_begin(*argv, **env))


def test_the_command_takes_over_with_its_own_exit_code():
    script = "import os, sys; print(os.getppid(), os.environ['RANK']); sys.exit(7)"
    done = _rank(sys.executable, "-c", script)
    assert done.stdout.split() == [str(os.getpid()), "3"]  # no process in between
    assert done.returncode == 7


MEET = """
import os, socket
port = int(os.environ["MASTER_PORT"])
print(port)
if os.environ["RANK"] == "0":
    try:
        socket.socket().bind(("", port))
    except OSError:
        print("held")  # whoever looks for a free port does not get it
    socket.create_server(("", port)).close()  # asks for SO_REUSEADDR, as torch's store does
    print("listened")
"""


@pytest.fixture
def taken():
    """Somebody else listens on the port that is tried first, and on the two after it."""
    first = rendezvous.first_choice({**os.environ, **TASK})
    with contextlib.ExitStack() as others:
        for port in range(first, first + 3):
            with contextlib.suppress(OSError):  # then it is somebody else's already
                others.enter_context(socket.create_server(("", port)))
        yield range(first, first + 3)


@pytest.mark.parametrize("order", ["01", "10"])
def test_the_ranks_meet_at_a_port_that_is_free(tmp_path, taken, order):
    attempt = tmp_path / "events" / "12-0"
    attempt.mkdir(parents=True)
    (attempt / "srun-0-4711.port").write_text("1\n")  # of an earlier srun
    env = {"SLURMSPOT_RUN": str(tmp_path), "SLURM_STEP_LAUNCHER_PORT": "4712"}
    ranks = {rank: _begin(sys.executable, "-c", MEET, SLURM_PROCID=rank, **env) for rank in order}
    done = {rank: _end(process) for rank, process in ranks.items()}
    assert [one.stderr for one in done.values()] == ["", ""]
    port, *rest = done["0"].stdout.split()
    assert int(port) not in taken
    assert rest == ["held", "listened"]
    assert done["1"].stdout.split() == [port]


def test_a_rank_alone_takes_a_free_port_without_a_run_folder(taken):
    done = _rank(sys.executable, "-c", MEET, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1")
    port, *rest = done.stdout.split()
    assert int(port) not in taken
    assert rest == ["held", "listened"]


def test_a_rank_does_not_wait_for_ever_for_one_that_never_comes(tmp_path):
    job = JobEnvironment(run=tmp_path, job_id="12", rank=1, world_size=2)
    with pytest.raises(SlurmspotError, match="rank 0 has not told its port"):
        rendezvous.agree(TASK, job, wait_s=0)


def test_a_notice_during_start_up_does_not_kill():
    script = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"
    assert _rank(sys.executable, "-c", script).stdout == "alive\n"


def test_a_complete_run_is_not_started_again(tmp_path):
    (tmp_path / "finished.json").write_text("{}")
    done = _rank("false", SLURMSPOT_RUN=str(tmp_path))
    assert done.returncode == 0
    assert "already complete" in done.stderr


def test_a_command_that_does_not_exist():
    done = _rank("no-such-program")
    assert done.returncode == 3
    assert "no-such-program" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_call_becomes_a_program():
    assert RankCommand.of(Spec(command=("a", "b"))).argv == ("a", "b")
    argv = RankCommand.of(Spec(call="os.path:join")).argv
    assert argv == (sys.executable, "-m", "slurmspot.job.call", "os.path:join")
    done = subprocess.run(
        [sys.executable, "-m", "slurmspot.job.call", "builtins:print", "a", "b"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "a b\n"


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("os", UsageError, "module:function"),
        ("os:sep", UsageError, "not callable"),
        ("os:nothing", NotFoundError, "has no nothing"),
        ("no_such_module:main", NotFoundError, "no_such_module"),
    ],
)
def test_a_call_that_cannot_be_made(target, error, words):
    with pytest.raises(error, match=words):
        resolve(target)
