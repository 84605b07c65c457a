"""The command line as a whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from slurmspot import __version__, cli
from slurmspot.errors import SlurmspotError


def call(*argv, **env):
    return subprocess.run(
        [sys.executable, "-m", "slurmspot", *argv],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )


def test_help_and_import_load_nothing_heavy():
    script = (
        "import sys, slurmspot.cli\n"
        "try: slurmspot.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'numpy', 'h5py', 'submitit'} "
        "& sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize(("path", "command"), list(commands(cli.cli)), ids=str)
def test_every_command_and_option_is_explained(path, command):
    assert command.help, path
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, (path, option.name)


def test_the_list_of_commands_says_what_each_says_of_itself():
    listed = call("--help").stdout
    for name, short in cli.COMMANDS.items():
        assert f"{name} " in listed
        assert short.split(".")[0].split()[0] in listed


def test_the_version():
    assert call("--version").stdout == f"slurmspot, version {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("nonsense",), 2, "No such command"),
        (("launch",), 2, "either a command or --call"),
        (("launch", "--nodes", "many", "--", "true"), 2, "nodes='many'"),
        (("status", "/no/such/run"), 3, "not a run folder"),
        (("watch", "/no/such/run"), 3, "not a run folder"),
        (("verify", "/no/such/run"), 3, "is not a folder\n  do:  give a run folder"),
        (("verify", "/usr/bin"), 3, "no checkpoint in /usr/bin\n  do:  give a run folder"),
        (("export", "/usr/bin", "-o", "x"), 3, "no checkpoint in /usr/bin\n  do:  give"),
        (("launch", "--run", "/proc/run", "--", "true"), 4, "not on PATH"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(tmp_path, argv, code, words):
    done = call(*argv, PATH=str(tmp_path))
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_dry_run_needs_no_cluster(tmp_path):
    done = call("launch", "--dry-run", "--", "python", "train.py", PATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "not checked against a cluster" in done.stderr


def test_a_command_needs_no_dashes_before_it_and_keeps_its_own_options(tmp_path):
    """Options that launch has, too, are the command's once it has begun."""
    command = ("python", "train.py", "--lr", "1", "--keep", "7")
    for argv in (command, ("--", *command)):
        done = call("launch", "--keep", "5", "--dry-run", *argv, PATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert '# every rank runs: "python train.py --lr 1 --keep 7"\n' in done.stdout
        assert "export SLURMSPOT_KEEP=5\n" in done.stdout


def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path):
    """Slurm itself would look for the file again and again, for a minute."""
    missing = str(tmp_path / "slurm.conf")
    done = call("launch", "--", "true", SLURM_CONF=missing)
    assert done.returncode == 4
    assert f"{missing}, which SLURM_CONF names, cannot be read" in done.stderr
    assert "\n  do:  set SLURM_CONF" in done.stderr


def test_an_error_becomes_its_own_exit_code(monkeypatch, capsys):
    def fail(**_):
        raise SlurmspotError("it broke", why="because", fix="mend it")

    monkeypatch.setattr(cli.cli, "main", fail)
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 1
    assert capsys.readouterr().err == "slurmspot: it broke\n  why: because\n  do:  mend it\n"


def test_status_of_a_run_outside_slurm(tmp_path):
    script = (
        "import slurmspot, sys\n"
        "with slurmspot.Run.from_env(folder=sys.argv[1]) as run:\n"
        "    for step, _ in run.steps(range(3)):\n"
        "        run.log(loss=1 / step)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    found = json.loads(call("status", str(tmp_path), "--json").stdout)
    assert found == {
        "schema_version": 1,
        "run": str(tmp_path),
        "complete": True,
        "job_id": None,
        "state": None,
        "attempts": 1,
        "notices": 0,
        "last_step": 3,
        "last_durable_step": 3,
        "failed_saves": 0,
        "phase": None,
        "phase_s": None,
        "steps_at_risk": 0,
        "steps_lost": 0,
        "interruptions": [],
    }
    text = call("status", str(tmp_path)).stdout
    assert "last durable step  3" in text
    assert "complete           true" in text


def test_an_answer_that_cannot_be_written_is_said_in_a_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slurmspot", "--version"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "slurmspot: the output: No space left on device\n"
