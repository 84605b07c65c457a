"""Starting one rank, and calling a function as a program."""

import os
import subprocess
import sys

import pytest

from slurmspot.cluster.spec import Spec
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.job.call import resolve
from slurmspot.job.rank import RankCommand, distributed_variables, master_port

TASK = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12",
}


def test_what_torch_distributed_reads():
    variables = distributed_variables(TASK)
    port = int(variables.pop("MASTER_PORT"))
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
    }
    assert 20000 <= port < 32000
    assert distributed_variables({"PATH": "/bin"}) == {}


def test_the_address_of_rank_0_can_be_given():
    env = {**TASK, "SLURMSPOT_MASTER_ADDR": "10.0.0.1"}
    assert distributed_variables(env)["MASTER_ADDR"] == "10.0.0.1"


def test_all_ranks_derive_one_port_and_each_attempt_another():
    assert master_port(TASK) == master_port({**TASK, "SLURM_PROCID": "0"})
    restarts = [master_port({**TASK, "SLURM_RESTART_COUNT": str(n)}) for n in range(5)]
    assert len(set(restarts)) == 5
    assert master_port({**TASK, "SLURM_CONF": "/another/cluster"}) != master_port(TASK)


def _rank(*argv, **env):
    return subprocess.run(
        [sys.executable, "-m", "slurmspot.job.rank", "--", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **TASK, **env},
        timeout=60,
        check=False,
    )


def test_the_command_takes_over_with_its_own_exit_code():
    script = "import os, sys; print(os.getppid(), os.environ['RANK']); sys.exit(7)"
    done = _rank(sys.executable, "-c", script)
    assert done.stdout.split() == [str(os.getpid()), "3"]  # no process in between
    assert done.returncode == 7


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
