"""The whole line on a real cluster: launched, taken away, back by itself, the same at the end."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import await_

from slurmspot.cluster import scontrol, submit
from slurmspot.cluster.command import run as run_command
from slurmspot.cluster.spec import Spec
from slurmspot.cluster.watch import follow
from slurmspot.events import last_step, read_events
from slurmspot.faults.injector import Injector
from slurmspot.job.rank import RankCommand
from slurmspot.runfolder import RunFolder
from slurmspot.study.demo import demo

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
TINY = ("--channels", "16", "--layers", "1", "--context", "16", "--global-batch", "4")
DEADLINE_S = 180


@pytest.fixture
def cli(sandbox, tmp_path):
    """Run the command line as a user of the cluster would."""

    def call(*argv, **env):
        return subprocess.run(
            [sys.executable, "-m", "slurmspot", *map(str, argv)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            timeout=DEADLINE_S,
            check=False,
        )

    return call


def gpt(*more):
    return (sys.executable, str(ROOT / "training" / "gpt.py"), *TINY, *map(str, more))


class Followed:
    """A launched run that is followed in the background, backoff lifted."""

    def __init__(self, folder, spec):
        self.folder = RunFolder(folder)
        self.job_id = submit.submit(spec, self.folder, submit.check(spec), RankCommand.of(spec))
        self.states = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self):
        for sighting in follow(self.job_id, interval_s=0.3):
            self.states.append(sighting.job.state if sighting.job else None)

    def finish(self):
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), self.states[-5:]
        return json.loads(self.folder.finished.read_text())


def test_the_demo_proves_what_it_should(sandbox, tmp_path, monkeypatch):
    """Four ranks on two nodes; a sandbox of its own beside the tests' one."""
    lines = []
    summary, problems = demo(tmp_path / "demo", say=lines.append)
    assert problems == []
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == summary
    assert [one["injected"] for one in summary["interruptions"]] == ["preempt", "node-down", "kill"]
    assert [one["kind"] for one in summary["interruptions"]] == [
        *["preemption", "node_fail", "killed"]
    ]
    warned, lost, killed = summary["interruptions"]
    assert (warned["notice"], lost["notice"], killed["notice"]) == (True, False, False)
    assert warned["steps_lost"] == 0
    assert 0 < warned["notice_to_durable_s"] <= warned["notice_to_exit_s"] < 20
    assert 0 < lost["steps_lost"] <= 20
    assert 0 < killed["steps_lost"] <= 20
    assert lost["rpo_s"] > 0
    assert all(one["rto_s"] > 0 and one["recovered"] for one in summary["interruptions"])
    assert summary["baseline_digest"] == summary["spot_digest"]
    assert summary["final_loss"]["baseline"] == summary["final_loss"]["spot"] < 3
    assert 0 < summary["gpu_hours"]["baseline"] < summary["gpu_hours"]["spot"]
    report = (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in report
    assert "http" not in report.replace("http://www.w3.org", "")


def test_eight_preemptions_in_a_row(sandbox, tmp_path):
    """A job that merely exited would be held by Slurm 24.11 and later after five."""
    spec = Spec(command=gpt("--steps", 100_000, "--step-s", 0.05), period_s=3600)
    run = Followed(tmp_path / "run", spec)
    injector = Injector(run.folder)
    for number in range(8):
        before = last_step(run.folder.events) or 0
        injector.wait_for_step(before + 3, deadline_s=DEADLINE_S)
        injection = injector.preempt(hold_s=1)
        assert injection.notice, number
    injector.wait_for_step((last_step(run.folder.events) or 0) + 1, deadline_s=DEADLINE_S)
    assert scontrol.show_job(run.job_id).restarts == 8
    assert "REQUEUE_HOLD" not in run.states
    scontrol.cancel(run.job_id)
    events = read_events(run.folder.events)
    restored = {e.attempt: e.step for e in events if e.event == "restore_end"}
    durable = {e.attempt: e.step for e in events if e.event == "commit"}
    for number in range(8):  # each attempt goes on exactly where the one before it saved
        assert restored[f"{run.job_id}-{number + 1}"] == durable[f"{run.job_id}-{number}"]


def test_a_cancelled_run_is_saved_and_stays_cancelled(sandbox, tmp_path):
    spec = Spec(command=gpt("--steps", 100_000, "--step-s", 0.05), period_s=3600)
    run = Followed(tmp_path / "run", spec)
    Injector(run.folder).wait_for_step(3, deadline_s=DEADLINE_S)
    scontrol.cancel(run.job_id)
    await_(lambda: run.states[-1] == "CANCELLED")
    events = read_events(run.folder.events)
    assert {e.attempt for e in events} == {f"{run.job_id}-0"}
    commits = [e for e in events if e.event == "commit"]
    assert commits[-1].data["trigger"] == "notice"


def test_a_broken_checkpoint_makes_the_next_attempt_fall_back(sandbox, tmp_path, cli):
    spec = Spec(command=gpt("--steps", 60, "--step-s", 0.05), period_steps=10)
    run = Followed(tmp_path / "run", spec)
    injector = Injector(run.folder)
    injector.wait_for_step(25, deadline_s=DEADLINE_S)
    scontrol.signal_step(run.job_id, "STOP")  # hold it while the file is spoilt
    newest = max((run.folder.checkpoints).glob("step-????????"))
    data = newest / "rank-00000.h5"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    verified = cli("verify", run.folder.path, "--json")
    assert verified.returncode == 1
    found = json.loads(verified.stdout)
    problems = [p for c in found["checkpoints"] for p in c["problems"]]
    assert not found["intact"]
    assert problems[0]["file"].endswith("rank-00000.h5")
    injector.kill()
    run.finish()
    restored = [e for e in read_events(run.folder.events) if e.event == "restore_end" and e.step]
    assert restored[0].data["rejected"][0]["step"] == int(newest.name[5:])
    assert restored[0].step == int(newest.name[5:]) - 10
    log = next(run.folder.logs.glob("*_0_log.out")).read_text()
    assert f"checkpoint of step {int(newest.name[5:])} was rejected: rank-00000.h5" in log


TAKE = """
import os, signal, socket, sys
from slurmspot.job.rendezvous import first_choice
others = [
    socket.create_server(("", first_choice({**os.environ, "SLURM_STEP_ID": "0"}) + n))
    for n in range(3)
]
print("taken", flush=True)
signal.pause()
"""


def test_a_port_that_is_somebody_elses_is_not_stumbled_over(sandbox, tmp_path):
    """On the first attempt, when nothing tells a taken port from a fault of the command's own."""
    take = tmp_path / "take.py"
    take.write_text(TAKE)
    waits = f"exec 9< <({sys.executable} {take}); read -r said <&9; echo others: $said"
    spec = Spec(command=gpt("--steps", 5), nodes="2", gpus_per_node=2, setup=(waits,))
    run = Followed(tmp_path / "run", spec)
    assert run.finish()["step"] == 5
    assert "others: taken" in "".join(log.read_text() for log in run.folder.logs.glob("*.out"))


def test_a_function_is_launched_waited_for_and_not_run_twice(cli, tmp_path):
    (tmp_path / "my_module.py").write_text(
        "import slurmspot\n"
        "def main():\n"
        "    with slurmspot.Run.from_env() as run:\n"
        "        for step, item in run.steps(range(5)):\n"
        "            print('item', item, flush=True)\n"
    )
    run = tmp_path / "run"
    done = cli(
        *("launch", "--call", "my_module:main", "--run", run, "--wait", "--json"),
        PYTHONPATH=f"{ROOT}:{tmp_path}",
        SLURM_RESTART_COUNT="6",  # as if launched from within another job, itself restarted
        SLURM_ARRAY_JOB_ID="9",
        SLURM_ARRAY_TASK_ID="2",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"] is True
    assert "item 4" in next((run / "logs").glob("*_0_log.out")).read_text()
    job_id = json.loads(done.stdout)["job_id"]
    assert [path.name for path in (run / "events").iterdir()] == [f"{job_id}-0"]
    status = json.loads(cli("status", run, "--json").stdout)
    assert (status["complete"], status["last_step"], status["last_durable_step"]) == (True, 5, 5)
    again = cli("launch", "--call", "my_module:main", "--run", run)
    assert again.returncode == 2
    assert "already complete" in again.stderr
    timeline = json.loads(cli("timeline", run, "--json").stdout)
    assert [[a["kind"] for a in job["attempts"]] for job in timeline["jobs"]] == [["completed"]]


def test_a_run_that_fails_by_its_own_fault_is_not_run_again(cli, tmp_path):
    run = tmp_path / "run"
    done = cli("launch", "--run", run, "--wait", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert done.returncode == 1
    log = next((run / "logs").glob("*_0_log.out")).read_text()
    assert "the command failed with exit code 3: end" in log


def shapes(folder, name, path, hits):
    """Two ranks with data-loader workers through the template; returns how the run ended."""
    script = ROOT / "sbatch" / "train.sbatch"
    command = ("python", str(ROOT / "training" / "shapes.py"), "--steps", "200", "--workers", "1")
    done = subprocess.run(
        ["sbatch", "--parsable", f"--job-name={name}", "--nodes=1", str(script), *command],
        env={**os.environ, "PATH": path, "SLURMSPOT_KILL_WAIT_S": "5"},
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    job_id = done.stdout.strip()
    run = RunFolder(folder / "runs" / f"{name}-{job_id}")
    if hits:
        await_(lambda: (last_step(run.events) or 0) >= 5)
        run.jobs.write_text(json.dumps({"job_id": job_id}) + "\n")
        Injector(run).preempt(hold_s=1)
    for _ in follow(job_id, interval_s=0.3):
        pass
    assert run.finished.exists(), (folder / f"{name}-{job_id}.out").read_text()
    started = {e.attempt for e in read_events(run.events) if e.event == "attempt_start"}
    assert started == {f"{job_id}-{restart}" for restart in range(2 if hits else 1)}
    return json.loads(run.finished.read_text())


def test_the_template_survives_a_preemption_like_launch(sandbox, tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    undisturbed = shapes(tmp_path, "baseline", path, hits=False)
    assert shapes(tmp_path, "spot", path, hits=True) == undisturbed


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("-p", "nope"), "there is no partition 'nope'"),
        (("--gpus-per-node", "9"), "no node of partition spot has more than 4"),
        (("--nodes", "99"), "partition spot has"),
        (("--constraint", "nosuch"), "sbatch refused"),
    ],
)
def test_what_the_cluster_cannot_give(cli, tmp_path, argv, words):
    done = cli("launch", "--run", tmp_path / "run", *argv, "--", "true")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in {1, 2}


def test_injecting_where_there_is_nothing_to_take(cli, tmp_path):
    missing = cli("inject", "kill", tmp_path)
    assert (missing.returncode, "not a run folder" in missing.stderr) == (3, True)
    folder = RunFolder(tmp_path / "run")
    cli("launch", "--run", folder.path, "--wait", "--", "true")
    over = cli("inject", "preempt", folder.path)
    assert over.returncode == 2
    assert "is not running but completed" in over.stderr


def test_a_controller_that_does_not_answer(sandbox, cli, tmp_path):
    sandbox.stop_controller()
    try:
        done = cli("launch", "--run", tmp_path / "run", "--", "true")
    finally:
        sandbox.restart_controller()
    assert done.returncode == 4
    assert "does not answer" in done.stderr
    assert run_command(["scontrol", "ping"]).returncode == 0
