"""Every way capacity disappears, at every phase, on a real cluster; and what comes together."""

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from drilling import DEADLINE_S, EVALUATING, ROOT, Trial, await_

from slurmspot.cluster import scontrol
from slurmspot.events import read_events
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.conduct import conduct
from slurmspot.faults.fault import PHASES, Aim, Fault
from slurmspot.faults.injector import Injector
from slurmspot.faults.keeper import Keeper
from slurmspot.faults.record import Record
from slurmspot.job import hold
from slurmspot.runfolder import RunFolder
from slurmspot.study.soak import Drill, failings, orphans, summarise

pytestmark = pytest.mark.cluster

TABLE = ROOT / "docs" / "drills.md"
TEMPLATE = ROOT / "sbatch" / "train.sbatch"

# One node and the gang, each taken by slurm, requeue, cloud, kubernetes and forced (what any of
# them is without its notice); and every phase, each hit once.
CELLS = (
    ("slurm", "gang", "forward"),
    ("requeue", "gang", "restore"),
    ("slurm", "node", "snapshot"),
    ("kubernetes", "node", "warmup"),
    ("requeue", "node", "optimizer"),
    ("cloud-azure", "gang", "evaluation"),
    ("forced", "node", "startup"),
    ("cloud-gcp", "node", "commit"),
    ("forced", "gang", "drain"),
    ("kubernetes", "gang", "persist"),
    ("kill", "gang", "after-finish"),
)


@pytest.fixture(autouse=True)
def may_be_held(monkeypatch):
    monkeypatch.setenv("SLURMSPOT_HOLD", "1")


@pytest.fixture
def alone(sandbox, port, tmp_path):
    """A run of one rank on one node."""
    drill = Drill(steps=150, nodes=1, metadata_port=port)
    trial = Trial(sandbox, drill, tmp_path / "run")
    with Keeper(trial.job_id, interval_s=0.3) as keeper:
        trial.keeper = keeper
        yield trial


def table(outcomes):
    """The table of docs/drills.md: what every test run proves anew."""
    lines = [
        "| profile | target | in phase | notice | hit inside | recovered | final state |",
        "|---|---|---|---|---|---|---|",
    ]
    for (profile, target, phase), outcome in zip(CELLS, outcomes, strict=True):
        seen = outcome.seen
        lines.append(
            f"| `{profile}` | {'one node' if target == 'node' else 'gang'} | `{phase}` "
            f"| {'yes' if seen['notice'] else 'none'} | {'yes' if seen['inside'] else 'NO'} "
            "| by itself | equal |"
        )
    return "\n".join(lines)


def test_every_cell_and_every_phase_ends_like_the_baseline(sandbox, port, baselines, tmp_path):
    assert {phase for _, _, phase in CELLS} == set(PHASES)
    drill = Drill(steps=150, metadata_port=port, command=EVALUATING)
    digest = baselines(drill)
    trial = Trial(sandbox, drill, tmp_path / "run")
    faults = tuple(
        {
            "profile": profile,
            "target": target,
            "in_phase": phase,
            "hold_s": 1,
            "window_s": 8.0,
            "detect_s": 1.0,
        }
        for profile, target, phase in CELLS
    )
    campaign = Campaign(faults=faults, recover_s=DEADLINE_S)
    record, said = Record(tmp_path / "campaign.jsonl", campaign.digest), []

    def hand(wait):
        return Injector(trial.folder, machines=trial.machines, wait=wait)

    with Keeper(trial.job_id, interval_s=0.3) as keeper:
        problems = conduct(campaign, {"run": hand}, record, say=said.append)
        assert problems == [], trial.output()
        final = trial.finish(keeper)
    record.close()
    outcomes = record.outcomes("run")
    assert all(outcome.seen["inside"] for outcome in outcomes), said
    assert final["digest"] == digest
    left, down = orphans(sandbox), sandbox.status().down
    summary = summarise(trial.folder, digest, orphans=left, down=len(down))
    assert failings(summary, len(CELLS)) == [], summary
    found = table(outcomes)
    if os.environ.get("SLURMSPOT_UPDATE_DOCS"):
        head, begin, rest = TABLE.read_text().partition("<!-- table -->\n")
        TABLE.write_text(f"{head}{begin}{found}\n{rest[rest.index('<!-- end -->') :]}")
    assert found in TABLE.read_text()


def test_two_notices_at_once(alone, baselines):
    def preempt():
        alone.until(lambda: alone.events("inject"))
        scontrol.signal_step(alone.job_id, "USR1")

    second = threading.Thread(target=preempt)
    second.start()
    injection = alone.hit("cloud-gcp", aim=Aim(in_phase="forward", at_step=20), window_s=4)
    second.join()
    assert injection.noticed
    assert {e.data["source"] for e in alone.events("notice")} >= {"SIGUSR1"}
    assert alone.finish(alone.keeper)["digest"] == baselines(alone.drill)
    assert alone.interruptions()[0].steps_lost == 0


def test_a_notice_in_the_last_step(alone, baselines):
    last = alone.drill.steps - 1
    assert alone.hit("slurm", aim=Aim(in_phase="optimizer", at_step=last)).inside
    assert alone.finish(alone.keeper)["digest"] == baselines(alone.drill)
    assert alone.events("held")[0].step == last


def test_a_notice_when_a_rank_is_dead_already(sandbox, port, baselines, tmp_path):
    drill = Drill(steps=100, metadata_port=port)
    trial = Trial(sandbox, drill, tmp_path / "run")
    with Keeper(trial.job_id, interval_s=0.3) as keeper:
        trial.injector.wait_for_step(20, deadline_s=DEADLINE_S)
        killing = threading.Thread(target=trial.hit, args=("kill-rank", "rank:1"))
        killing.start()
        with_it = trial.hit("slurm")
        killing.join()
        assert with_it.kind == "preempt"
        assert trial.finish(keeper)["digest"] == baselines(drill)


def test_a_time_limit_and_a_preemption_together(sandbox, port, baselines, tmp_path):
    drill = Drill(steps=60, nodes=1, metadata_port=port, hang_s=120)
    digest = baselines(drill)
    # Slurm looks every 30 s, and warns at the last look before the time: not in the first half
    # minute, in which the job starts.
    trial = Trial(sandbox, drill, tmp_path / "run", time_min=2, lead_s=60)
    with Keeper(trial.job_id, interval_s=0.3) as keeper:
        hold.ask(trial.folder.hold, "warmup", None)  # the preemption finds it still there

        def warned():
            trial.folder.hold.touch()
            return trial.events("held") and trial.events("notice")

        trial.until(warned)  # of the time limit: nobody else is there yet
        assert trial.hit("slurm").at_step is None
        assert trial.finish(keeper)["digest"] == digest
    assert len(trial.events("notice")) >= 2


def test_the_controller_dies_in_the_middle_of_a_preemption(alone, sandbox, baselines):
    alone.injector.wait_for_step(20, deadline_s=DEADLINE_S)
    preempting = threading.Thread(target=alone.hit, args=("slurm",))
    preempting.start()
    alone.until(lambda: alone.events("notice"))
    sandbox.stop_controller()
    alone.until(lambda: alone.events("commit"))
    sandbox.restart_controller()
    preempting.join()
    assert alone.finish(alone.keeper)["digest"] == baselines(alone.drill)
    assert all(one.recovered for one in alone.interruptions())


def by_hand(argv, options, cwd):
    """Submit through the template for people who write their own batch scripts."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    one_rank = ("--nodes=1", "--gpus-per-node=1", "--ntasks-per-node=1")
    done = subprocess.run(
        ["sbatch", "--parsable", *one_rank, *options, str(TEMPLATE), *map(str, argv)],
        env={**os.environ, "PATH": path, "SLURMSPOT_KILL_WAIT_S": "5"},
        capture_output=True,
        text=True,
        cwd=cwd,
        check=True,
    )
    return done.stdout.strip()


def test_two_tasks_of_an_array_are_taken(sandbox, baselines, port, tmp_path):
    drill = Drill(steps=80, nodes=1, metadata_port=port, command=EVALUATING)
    digest = baselines(drill)
    array = by_hand(
        [*EVALUATING, "--steps", 80, "--step-s", 0.05], ["--array=0-2", "--exclusive"], tmp_path
    )
    tasks = [f"{array}_{number}" for number in range(3)]

    def folder_of(task):
        found = await_(lambda: list((tmp_path / "runs").glob(f"*/events/{task}-0")))
        return RunFolder(found[0].parents[1])

    with ExitStack() as stack:
        keepers = [stack.enter_context(Keeper(task, interval_s=0.3)) for task in tasks]
        folders = [folder_of(task) for task in tasks]
        for task, folder in zip(tasks[:2], folders[:2], strict=True):
            folder.jobs.write_text(json.dumps({"job_id": task}) + "\n")
            injector = Injector(folder)
            injector.wait_for_step(5, deadline_s=DEADLINE_S)
            injector.preempt(hold_s=1)
        assert all(keeper.wait(DEADLINE_S) for keeper in keepers)
    finals = [json.loads(folder.finished.read_text()) for folder in folders]
    assert {final["digest"] for final in finals} == {digest}
    for task, folder in zip(tasks[:2], folders[:2], strict=True):
        started = [e for e in read_events(folder.events) if e.event == "attempt_start"]
        assert {e.attempt for e in started} == {f"{task}-0", f"{task}-1"}


def test_a_part_of_a_heterogeneous_job_is_taken(sandbox, baselines, port, tmp_path):
    """Part 0 trains, part 1 stands for a data server; Slurm requeues them together."""
    drill = Drill(steps=80, nodes=1, metadata_port=port, command=EVALUATING)
    digest = baselines(drill)
    argv = [*EVALUATING, "--steps", 80, "--step-s", 0.05]
    other = [":", "--nodes=1", "--ntasks=1", "--partition=spot", "--requeue"]
    job = by_hand(argv, other, tmp_path)
    folder = RunFolder(tmp_path / "runs" / f"train-{job}").create()
    folder.jobs.write_text(json.dumps({"job_id": job}) + "\n")
    injector = Injector(folder)
    with Keeper(job, interval_s=0.3) as keeper:
        injector.wait_for_step(10, deadline_s=DEADLINE_S)
        assert injector.inject(Fault(profile="requeue")).job_id == job
        assert keeper.wait(DEADLINE_S)
    assert json.loads(folder.finished.read_text())["digest"] == digest
    started = {e.attempt for e in read_events(folder.events) if e.event == "attempt_start"}
    assert len(started) == 2
