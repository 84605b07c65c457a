"""The batch scripts for those who write their own, submitted as they are to a real cluster."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import await_

from slurmspot.cluster.watch import follow
from slurmspot.events import last_step, read_events
from slurmspot.faults.injector import Injector
from slurmspot.runfolder import RunFolder

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
TINY = ("--channels", "16", "--layers", "1", "--context", "16", "--global-batch", "4")
ONE_RANK = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1")
DEADLINE_S = 180


def submit(folder, template, *argv, steps, **env):
    """Submit a template that trains a small model; the job's id."""
    command = ("python", str(ROOT / "training" / "gpt.py"), *TINY, "--steps", str(steps))
    done = subprocess.run(
        [
            *("sbatch", "--parsable", "--job-name=job", *ONE_RANK, *argv),
            str(ROOT / "sbatch" / f"{template}.sbatch"),
            *(*command, "--step-s", "0.05"),
        ],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURMSPOT_KILL_WAIT_S": "5",
            **env,
        },
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    return done.stdout.strip()


def await_end(job_id, run, output):
    """Follow a job to its end, backoff lifted; what the finished run says."""
    followed = threading.Thread(target=lambda: list(follow(job_id, interval_s=0.3)), daemon=True)
    followed.start()
    followed.join(DEADLINE_S)
    assert not followed.is_alive(), output.read_text()
    assert run.finished.exists(), output.read_text()
    return json.loads(run.finished.read_text())


def attempts(run):
    return {e.attempt for e in read_events(run.events) if e.event == "attempt_start"}


def test_a_preempted_task_of_an_array_comes_back_alone(sandbox, tmp_path):
    """On nodes of their own, so that taking one task's does not take the other's."""
    job_id = submit(tmp_path, "array", "--array=0-1", "--exclusive", steps=100)
    tasks = [f"{job_id}_{index}" for index in range(2)]
    runs = [RunFolder(tmp_path / "runs" / f"job-{task}") for task in tasks]
    await_(lambda: all((last_step(run.events) or 0) >= 3 for run in runs))
    hit = Injector(runs[1]).preempt(hold_s=1)
    assert hit.notice
    ends = [
        await_end(task, run, tmp_path / f"job-{task}.out")
        for task, run in zip(tasks, runs, strict=True)
    ]
    assert [end["step"] for end in ends] == [100, 100]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert attempts(runs[0]) == {f"{tasks[0]}-0"}
    assert attempts(runs[1]) == {f"{tasks[1]}-0", f"{tasks[1]}-1"}


def test_the_two_tier_template_saves_on_the_nodes_and_drains(sandbox, tmp_path):
    first = sandbox.spec.node_names[0]
    local = sandbox.local(first) / "made" / "by it"
    job_id = submit(
        *(tmp_path, "two-tier", f"--nodelist={first}"),
        steps=100,
        SLURMSPOT_LOCAL=str(local).replace(first, "{node}"),
        SLURMSPOT_PERIOD_S="0.5",
    )
    run = RunFolder(tmp_path / "runs" / f"job-{job_id}")
    await_(local.is_dir)

    def committed(tier):
        events = read_events(run.events, steps=False)
        return [e.step for e in events if e.event == "commit" and e.data.get("tier") == tier]

    await_(lambda: committed("local") and committed("remote"))
    assert Injector(run).preempt(hold_s=1).notice
    end = await_end(job_id, run, tmp_path / f"job-{job_id}.out")
    assert end["step"] == 100
    assert attempts(run) == {f"{job_id}-0", f"{job_id}-1"}
    events = read_events(run.events, steps=False)
    assert not [e for e in events if e.event in {"save_failed", "drain_failed"}]
