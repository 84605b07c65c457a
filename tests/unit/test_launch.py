"""The spec, the batch script that comes of it, and what the cluster is asked beforehand."""

import re
import subprocess

import pytest

from slurmspot.cluster import submit
from slurmspot.cluster.command import Output
from slurmspot.cluster.spec import Spec, build
from slurmspot.cluster.submit import Windows, batch_script, check
from slurmspot.errors import NoSlurmError, UsageError
from slurmspot.runfolder import RunFolder

WINDOWS = Windows(window_s=15, kill_wait_s=5)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text('command = ["a", "b"]\nnodes = 2\nkeep = 9\npartition = "p"\nmem_gb = 1.5\n')
    env = {"SLURMSPOT_LAUNCH_NODES": "3", "SLURMSPOT_LAUNCH_KEEP": "8", "OTHER": "x"}
    spec = build(file=file, env=env, flags={"keep": 7, "qos": None, "command": ()})
    assert spec == Spec(command=("a", "b"), nodes="3", keep=7, partition="p", mem_gb=1.5)


def test_a_command_on_the_command_line_replaces_the_file_s_call(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text('call = "m:f"\n')
    assert build(file=file, env={}, flags={"command": ("x",)}) == Spec(command=("x",))


def test_a_spec_comes_back_from_the_run_folder():
    spec = Spec(command=("a b", "é"), nodes="2-4", setup=("module load x",), mem_gb=2.5)
    assert Spec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "either a command or --call"),
        ({"command": ("x",), "call": "a:b"}, "not both"),
        ({"call": "a"}, "module:function"),
        ({"command": ("x",), "nodes": "0"}, "nodes='0'"),
        ({"command": ("x",), "nodes": "2-"}, "nodes"),
        ({"command": ("x",), "gpus_per_node": -1}, "gpus_per_node=-1"),
        ({"command": ("x",), "keep": 0}, "keep=0"),
        ({"command": ("x",), "period_s": float("nan")}, "period_s=nan"),
    ],
)
def test_a_spec_that_makes_no_sense(values, words):
    with pytest.raises(UsageError, match=words):
        Spec(**values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partitoin = 'x'", "did you mean partition"),
        ("zzz = 1", "valid: account"),
        ("keep = 'many'", "keep='many'"),
        ("keep = true", "keep=True"),
        ("keep = ", "not valid TOML"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path, text, words):
    file = tmp_path / "spec.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        build(file=file, env={}, flags={"command": ("x",)})


def test_keys_of_a_file_may_be_spelled_like_flags_but_only_once(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text("period-s = 60\ngpus_per_node = 2\n")
    spec = build(file=file, env={}, flags={"command": ("x",)})
    assert (spec.period_s, spec.gpus_per_node) == (60, 2)
    file.write_text("period-s = 60\nperiod_s = 70\n")
    with pytest.raises(UsageError, match="sets 'period_s' twice"):
        build(file=file, env={}, flags={"command": ("x",)})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NODEZ", "2", r"'SLURMSPOT_LAUNCH_NODEZ', [\s\S]* did you mean SLURMSPOT_LAUNCH_NODES"),
        ("KEEP", "many", "SLURMSPOT_LAUNCH_KEEP='many', which is not of type int"),
        (
            "KEEP",
            "0",
            r"keep=0 is less than 1\n  why: the environment sets SLURMSPOT_LAUNCH_KEEP=0",
        ),
    ],
)
def test_a_variable_that_makes_no_sense_is_named_as_it_was_set(name, value, words):
    env = {f"SLURMSPOT_LAUNCH_{name}": value}
    with pytest.raises(UsageError) as caught:
        build(env=env, flags={"command": ("x",)})
    assert re.search(words, str(caught.value))


def test_the_batch_script_says_what_the_spec_says(tmp_path):
    folder = RunFolder(tmp_path / "run")
    spec = Spec(
        command=("x",), nodes="2-4", gpus_per_node=2, cpus_per_task=3, mem_gb=1.5, lead_s=30
    )
    lines = batch_script(spec, folder, WINDOWS).splitlines()
    for flag in (
        "--nodes=2-4",
        "--gpus-per-node=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--mem=1536M",
        "--time=1440",
        "--signal=USR1@30",
        "--requeue",
        "--open-mode=append",
        "--partition=spot",
    ):
        assert f"#SBATCH {flag}" in lines
    assert not folder.path.exists()  # nothing is written for a dry run


def test_no_value_can_become_shell(tmp_path):
    """bash itself parses the script: a hostile name stays a name."""
    folder = RunFolder(tmp_path / "a'; touch pwned; echo '$(touch pwned)")
    script = batch_script(Spec(command=("x",), name="n'; touch pwned"), folder, WINDOWS)
    exports = [line for line in script.splitlines() if line.startswith("export SLURMSPOT_RUN")]
    out = subprocess.run(
        ["bash", "-c", "\n".join([*exports, 'printf %s "$SLURMSPOT_RUN"'])],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert out.stdout == str(folder.path)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not (tmp_path / "pwned").exists()


def test_the_exit_code_of_the_ranks_reaches_the_requeue(tmp_path):
    """The tail of the real script, with srun and python replaced by shell functions."""
    script = batch_script(Spec(command=("x",)), RunFolder(tmp_path), WINDOWS)
    tail = script.partition("# command\n")[2]
    python = submit.sys.executable
    fakes = f"srun() {{ return 75; }}\nfunction {python} {{ echo asked $3; return 4; }}\n"
    done = subprocess.run(["bash"], input=fakes + tail, capture_output=True, text=True, check=False)
    assert done.stdout == "asked 75\n"
    assert done.returncode == 4


PARTITIONS = (
    "PartitionName=spot TotalNodes=2 Nodes=n[0-1] PriorityTier=1 GraceTime=15 PreemptMode=REQUEUE\n"
    "PartitionName=ondemand TotalNodes=2 Nodes=n[0-1] PriorityTier=10 GraceTime=0\n"
)
NODES = "NodeName=n0 Gres=gpu:a100:4(S:0-1) State=IDLE\nNodeName=n1 Gres=(null) State=IDLE\n"


def cluster(argv, stdin=None):
    words = " ".join(argv)
    answers = {
        "show partition": PARTITIONS,
        "show node": NODES,
        "show config": "Foo = 1\nKillWait                = 30 sec\n",
    }
    text = next(answer for question, answer in answers.items() if question in words)
    return Output(stdout=text, stderr="", returncode=0)


def test_the_partition_s_grace_is_the_window():
    assert check(Spec(command=("x",)), runner=cluster) == Windows(window_s=15, kill_wait_s=30)
    on_demand = check(Spec(command=("x",), partition="ondemand"), runner=cluster)
    assert on_demand == Windows(window_s=60, kill_wait_s=30)
    told = Spec(command=("x",), window_s=7, kill_wait_s=3)
    assert check(told, runner=cluster) == Windows(window_s=7, kill_wait_s=3)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"partition": "sopt"}, r"no partition 'sopt'[\s\S]*spot \(tier 1\), ondemand \(tier 10\)"),
        ({"nodes": "2-3"}, "3 nodes .* has 2"),
        ({"gpus_per_node": 5}, "5 GPUs .* more than 4"),
    ],
)
def test_more_than_the_cluster_has(asked, words):
    with pytest.raises(UsageError, match=words):
        check(Spec(command=("x",), **asked), runner=cluster)


def test_without_slurm_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSlurmError, match="not on PATH") as caught:
        check(Spec(command=("x",)))
    assert caught.value.exit_code == 4


def test_a_complete_run_is_not_launched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(submit.shutil, "which", lambda _: "/bin/sbatch")
    folder = RunFolder(tmp_path).create()
    folder.finished.touch()
    with pytest.raises(UsageError, match="already complete"):
        submit.submit(Spec(command=("x",)), folder, WINDOWS, print)


def test_the_jobs_of_a_run_are_those_launched_and_those_that_have_logged(tmp_path):
    folder = RunFolder(tmp_path).create()
    assert submit.job_ids(folder) == []
    for name in ("8-0", "7_1-0", "local-0", "injector"):
        (folder.events / name).mkdir()
    assert set(submit.job_ids(folder)) == {"8", "7_1"}
    folder.jobs.write_text('{"job_id": "8"}\n{"job_id": "9"}\n')
    assert submit.job_ids(folder) == ["7_1", "8", "9"]


def test_the_script_shows_what_every_rank_runs_on_one_line(tmp_path):
    script = batch_script(Spec(command=("a b", "c\nd")), RunFolder(tmp_path), WINDOWS)
    assert """# every rank runs: "'a b' 'c\\nd'"\n""" in script
    assert "wckey" not in script
