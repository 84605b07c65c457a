"""The batch scripts for those who write their own, as text and as bash runs them."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurmspot.cli import template
from slurmspot.errors import NotFoundError

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "sbatch").glob("*.sbatch"))
NAMES = ["array", "train", "two-tier"]
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done  # the options: what follows is what a rank runs
exec "$@"
"""
PYTHON = """\
#!/bin/bash
printf '%s|' "$@" run="$SLURMSPOT_RUN" local="$SLURMSPOT_LOCAL"; echo
[[ $2 == slurmspot.job.rank ]] && exit 75
[[ $2 == slurmspot.job.requeue ]] && exit 3
"""


@pytest.fixture
def ran(tmp_path):
    """Run a template with a srun that runs one rank, and a python that says how it was called."""
    for name, script in (("srun", SRUN), ("python", PYTHON)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o700)

    def run(name, *argv, **env):
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        own |= {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            **env,
        }
        return subprocess.run(
            ["bash", str(ROOT / "sbatch" / f"{name}.sbatch"), *argv],
            env={**own, "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "9"},
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )

    return run


def test_the_list_says_what_each_is_for():
    done = CliRunner().invoke(template.command, ["list"])
    header, *lines = done.output.splitlines()
    assert header.split() == ["NAME", "WHAT", "IT", "IS"]
    assert [line.split()[0] for line in lines] == NAMES == [path.stem for path in SCRIPTS]
    assert "A job array that survives preemption: every task" in lines[0]
    assert all(line.endswith(".") for line in lines)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_template_is_shown_byte_for_byte(script):
    done = CliRunner().invoke(template.command, ["show", script.stem])
    assert (done.exit_code, done.output) == (0, script.read_text())


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("tow-tier", "did you mean two-tier? there are: array, train, two-tier"),
        ("x", "there are: array, train, two-tier"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, fix):
    with pytest.raises(NotFoundError, match="no template") as caught:
        template.command(["show", name], standalone_mode=False)
    assert (caught.value.exit_code, caught.value.fix) == (3, fix)


def test_the_only_copy_is_found_where_a_wheel_puts_it(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    ((source, target),) = wheel["sources"].items()
    assert (source, wheel["only-include"]) == ("sbatch", ["slurmspot", "sbatch"])
    (tmp_path / target).mkdir(parents=True)
    assert template.folder(tmp_path / "slurmspot") == tmp_path / target
    assert template.folder(ROOT / "slurmspot") == ROOT / "sbatch"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_template_is_sound_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    subprocess.run(["shellcheck", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_makes_a_job_come_back_is_in_every_template(script):
    lines = [line.partition("  # ")[0].rstrip() for line in script.read_text().splitlines()]
    assert {
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@60",
        "trap : TERM USR1",
        "rc=$?",
    } <= set(lines)
    assert lines[-2:] == ['python -m slurmspot.job.requeue "$rc"', "exit $?"]


@pytest.mark.parametrize("name", NAMES)
def test_a_template_hands_the_ranks_exit_code_to_the_requeue(ran, tmp_path, name):
    local = {"SLURMSPOT_LOCAL": str(tmp_path / "nvme")}
    done = ran(name, "x", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3", **local)
    rank, requeue = done.stdout.splitlines()
    assert rank.startswith("-m|slurmspot.job.rank|--|x|")
    assert requeue.startswith("-m|slurmspot.job.requeue|75|")
    assert done.returncode == 3


def test_a_task_has_a_folder_and_a_command_of_its_own(ran, tmp_path):
    command = ("train.py", "--seed={task}", "two words", "--out", "x{task}y{task}")
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    rank, requeue = ran("array", *command, **task).stdout.splitlines()
    assert "|--|train.py|--seed=3|two words|--out|x3y3|" in rank
    for line in (rank, requeue):
        assert f"|run={tmp_path}/runs/job-7_3|" in line
    rank, _ = ran("array", "x", **task, SLURMSPOT_RUN="/shared/a").stdout.splitlines()
    assert "|run=/shared/a-7_3|" in rank


def test_the_local_folder_is_made_on_the_node(ran, tmp_path):
    local = str(tmp_path / "nvme {node}" / "checkpoints")
    done = ran("two-tier", "a b", SLURMSPOT_LOCAL=local, SLURMD_NODENAME="n1")
    assert (tmp_path / "nvme n1" / "checkpoints").is_dir()
    assert f"|--|a b|run={tmp_path}/runs/job-9|local={local}|" in done.stdout


def test_a_node_without_the_local_disk_trains_all_the_same(ran):
    done = ran("two-tier", "x", SLURMSPOT_LOCAL="/proc/nothing/here", SLURMD_NODENAME="n1")
    assert "mkdir: cannot create directory" in done.stderr
    assert "-m|slurmspot.job.rank|--|x|" in done.stdout
