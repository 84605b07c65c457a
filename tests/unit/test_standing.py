"""Where a run stands, from its events; status and watch show it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import simulated

from slurmspot.cli import main
from slurmspot.cli.watch import _LiveLine
from slurmspot.cluster.scontrol import JobState
from slurmspot.cluster.watch import Sighting
from slurmspot.report.standing import line, standing
from slurmspot.runfolder import RunFolder

HITS = [("preempt", 50), ("kill", 110)]


@pytest.fixture(scope="module")
def events():
    return simulated.run("spot", HITS, stop_at=150).events


def write(folder, events):
    for event in events:
        path = folder.events / event.attempt / f"{event.rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        whole = {**asdict(event), **event.data}
        with path.open("a") as log:
            log.write(json.dumps({k: v for k, v in whole.items() if k != "data"}) + "\n")


def test_a_run_that_goes_on(events):
    last = max(event.t_ns for event in events) / 1e9 - simulated.T0.timestamp()
    now = standing(events, now=simulated.T0 + timedelta(seconds=last + 7))
    assert (now.attempts, now.notices, now.phase) == (3, 1, "train")
    assert now.phase_s == pytest.approx(7 + 39 * 0.5)
    assert (now.last_step, now.last_durable_step, now.steps_at_risk) == (150, 140, 10)
    assert now.steps_lost == 10
    assert [one.recovered for one in now.interruptions] == [True, True]
    assert line(now) == (
        "train for 26 s · step 150 · 10 not yet durable · 2 interruptions, 10 steps lost"
    )


def test_a_step_on_the_nodes_disks_is_not_durable(events):
    commit = [event for event in events if event.event == "commit"][-1]
    local = replace(commit, step=145, data={**commit.data, "tier": "local"})
    now = standing([*events, local], now=simulated.T0 + timedelta(days=1))
    assert (now.last_durable_step, now.last_local_step, now.steps_at_risk) == (140, 145, 10)


@pytest.mark.parametrize(("restored", "durable"), [(140, 140), (120, 120), (None, None)])
def test_a_step_that_a_restore_did_not_find_is_safe_nowhere(events, restored, durable):
    last = events[-1]
    commit = [event for event in events if event.event == "commit"][-1]
    local = replace(commit, step=145, t_ns=last.t_ns, data={**commit.data, "tier": "local"})
    end = replace(last, event="restore_end", step=restored, t_ns=last.t_ns + 1, data={})
    other_rank = replace(end, rank="1", t_ns=last.t_ns + 3)  # as its clock has it
    again = replace(local, step=(restored or 0) + 5, t_ns=last.t_ns + 2)
    for more, on_nodes in (([], None), ([again, other_rank], again.step)):
        now = standing([*events, local, end, *more], now=simulated.T0 + timedelta(days=1))
        assert (now.last_durable_step, now.last_local_step) == (durable, on_nodes)


def test_an_earlier_job_that_never_opened_the_run_hides_nothing(events):
    early = replace(events[0], t_ns=events[0].t_ns - 60 * 10**9, event="launched", attempt="1-0")
    now = standing([early, *events], now=simulated.T0 + timedelta(days=1))
    assert (now.attempts, now.phase) == (4, "train")
    kinds = [one.kind for one in now.interruptions]
    assert kinds[-2:] == [one.kind for one in standing(events, now=simulated.T0).interruptions]


def test_nothing_yet():
    now = standing([], now=simulated.T0)
    assert (now.attempts, now.phase, now.last_step, now.steps_at_risk) == (0, None, None, None)
    assert line(now) == ""


def test_status(events, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run").create()
    write(folder, events)
    with pytest.raises(SystemExit) as caught:
        main(["status", str(folder.path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0
    first = ["schema_version", "run", "complete", "job_id", "state", "attempts", "notices"]
    assert list(found)[: len(first)] == first
    assert {"last_step", "last_durable_step", "failed_saves"} < found.keys()
    assert (found["phase"], found["steps_lost"], found["steps_at_risk"]) == ("train", 10, 10)
    assert [one["kind"] for one in found["interruptions"]] == ["preemption", "killed"]
    with pytest.raises(SystemExit):
        main(["status", str(folder.path)])
    out = capsys.readouterr().out
    assert "steps at risk      10" in out
    assert "preemption" in out
    assert "\x1b" not in out


def test_watch_writes_a_line_for_each_change(events, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run").create()
    write(folder, events)
    shown = _LiveLine(folder, "17")
    running = Sighting(job=JobState(job_id="17", state="RUNNING", nodes="n[0-1]", restarts=2))
    for sighting in (running, running, Sighting(job=None)):
        shown.update(sighting)
    shown.end()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("job 17: running on n[0-1] after 2 restarts · train for")
    assert lines[1].startswith("job 17: no longer known to Slurm")


def test_on_a_terminal_one_line_is_kept_fresh(events, tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    write(folder, events)
    script = (
        "import sys\n"
        "from slurmspot.cli.watch import _LiveLine\n"
        "from slurmspot.cluster.scontrol import JobState\n"
        "from slurmspot.cluster.watch import Sighting\n"
        "from slurmspot.runfolder import RunFolder\n"
        "shown = _LiveLine(RunFolder.open(sys.argv[1]), '17')\n"
        "for state in ('RUNNING', 'RUNNING', 'PENDING'):\n"
        "    shown.update(Sighting(job=JobState(job_id='17', state=state)))\n"
        "shown.end()\n"
    )
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    argv = [sys.executable, "-c", script, str(folder.path)]
    subprocess.run(argv, stderr=slave, check=True, timeout=60, env=env)
    os.close(slave)
    out = os.read(master, 65536).decode()
    os.close(master)
    assert out.count("\r\x1b[Kjob 17: running · train for") == 2
    assert out.count("\n") == 2  # after the last of each state
    assert "\x1b[1m" not in out
    assert "pending" in out.splitlines()[-1]
