"""The timeline and report commands, on run folders and saved accounts."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
import simulated

from slurmspot.cli import main
from slurmspot.cli.timeline import ranks_text
from slurmspot.cluster.command import Output
from slurmspot.errors import SlurmError
from slurmspot.events import Clock, EventWriter
from slurmspot.report import history
from slurmspot.report.history import History
from slurmspot.runfolder import RunFolder
from slurmspot.timeline.attempts import Timeline

DATA = Path(__file__).parent.parent / "data" / "sacct"
SACCT = DATA / "26.05" / "sacct.txt"


def call(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def seconds(text):
    return datetime.fromisoformat(f"2026-11-29T{text}+00:00").timestamp()


@pytest.fixture
def run(tmp_path):
    """A run folder that submitted job 7, of which array task 0 was preempted once."""
    folder = RunFolder(tmp_path / "run").create()
    now = [0.0]
    clock = Clock(unix_ns=lambda: int(now[0] * 1e9), mono_ns=lambda: int(now[0] * 1e9))

    def log(attempt, *lines):
        writer = EventWriter(folder.events, attempt, 0, clock)
        for time, event, step, data in lines:
            now[0] = seconds(time)
            writer.write(event, step=step, **data)
        writer.close()

    log(
        "7_0-0",
        ("16:08:46.500", "attempt_start", None, {}),
        ("16:08:47.000", "restore_end", None, {}),
        ("16:08:48.000", "first_step", 1, {}),
        ("16:08:50.000", "step", 5, {"loss": 2.0}),
    )
    log(
        "7_0-1",
        ("16:09:13.000", "attempt_start", None, {}),
        ("16:09:14.000", "restore_end", 3, {}),
        ("16:09:20.000", "first_step", 6, {"loss": 1.0}),
        ("16:09:30.000", "step", 12, {"loss": 0.5}),
        ("16:09:31.000", "finished", 12, {"digest": "d"}),
    )
    submitted = int(seconds("16:08:45") * 1e9)
    folder.jobs.write_text(f'{{"job_id": "7", "submitted_ns": {submitted}}}\n{{"job_i')
    return folder


def test_a_file_alone(capsys):
    code, out, _ = call(capsys, "timeline", "--sacct", SACCT, "--json", "--tz", "UTC")
    found = json.loads(out)
    assert code == 0
    assert found["schema_version"] == 1
    assert len(found["jobs"]) == 22
    assert found["rejected_rows"] == []
    assert found["jobs"][2]["attempts"][0]["kind"] == "preempted"


def test_a_file_as_a_table(capsys):
    code, out, _ = call(capsys, "timeline", "14", "--sacct", SACCT)
    assert code == 0
    assert "exp|lr=1e-3|é" in out
    assert "\x1b" not in out


def test_a_base_id_means_all_its_tasks(capsys):
    _, out, _ = call(capsys, "timeline", "7", "--sacct", SACCT, "--json")
    found = [job["job_id"] for job in json.loads(out)["jobs"]]
    assert found == ["7_0", "7_1", "7_2", "7_3"]


def test_rejected_rows_are_told(capsys, tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text(SACCT.read_text() + "99|broken\n")
    code, _, err = call(capsys, "timeline", "--sacct", path)
    assert code == 0
    assert "line 83 was not understood: 2 fields" in err
    _, out, _ = call(capsys, "timeline", "--sacct", path, "--json")
    assert json.loads(out)["rejected_rows"] == [
        {
            "line": 83,
            "reason": "2 fields, where the header names 12",
            "text": "99|broken",
        }
    ]


def test_a_run_joins_accounts_and_events(capsys, run):
    code, out, _ = call(capsys, "timeline", run.path, "--sacct", SACCT, "--json", "--tz", "UTC")
    assert code == 0
    jobs = {job["job_id"]: job for job in json.loads(out)["jobs"]}
    assert set(jobs) == {"7_0", "7_1", "7_2", "7_3"}
    second = jobs["7_0"]["attempts"][1]
    assert [(p["name"], p["seconds"], p["source"]) for p in second["phases"]] == [
        ("backoff", 21.0, "sacct"),
        ("queue", 0.0, "sacct"),
        ("startup", 1.0, "events"),
        ("imports", 1.0, "events"),
        ("repeat", 6.0, "events"),
        ("train", 11.0, "events"),
        ("exit", 1.0, "events"),
        ("teardown", 0.0, "sacct"),
    ]
    assert {p["source"] for p in jobs["7_2"]["attempts"][0]["phases"]} == {"sacct"}


def test_a_run_asks_the_cluster_back_to_its_first_submission(run):
    asked = []

    def runner(argv, *, stdin=None):
        asked.append(argv)
        if argv[0] == "sacctmgr":
            if refused:
                return Output(stdout="", stderr="sacctmgr: error: no right", returncode=1)
            down = "node0|2026-11-29T16:08:50|Unknown|DOWN|reclaimed\n"
            return Output(stdout=down, stderr="", returncode=0)
        text = "JobID State Submit Start End" if "--helpformat" in argv else SACCT.read_text()
        return Output(stdout=text, stderr="", returncode=0)

    refused = False
    found = history.of_run(run, runner=runner)
    assert len(found.timeline.jobs) == 4
    assert "--jobs=7" in asked[1]
    (start,) = [word for word in asked[1] if word.startswith("--starttime=")]
    asked_from = datetime.fromisoformat(start.partition("=")[2]).timestamp()
    assert asked_from == seconds("16:08:45") - 86_400
    assert asked[2][:5] == ["sacctmgr", "--parsable2", "--noheader", "show", "event"]
    assert "node0" in asked[2][5]
    begun = found.timeline.jobs[0].attempts[0].start
    assert found.interruptions[0].moments["node_gone"] == begun + timedelta(seconds=4)
    refused = True
    found = history.of_run(run, runner=runner)
    assert "does not tell when nodes went down (no right)" in found.timeline.notes[-1]
    assert "node_gone" not in found.interruptions[0].moments


def test_a_run_that_was_not_launched_by_us_names_its_jobs_in_its_events(capsys, run):
    run.jobs.unlink()
    code, out, _ = call(capsys, "timeline", run.path, "--sacct", SACCT, "--json", "--tz", "UTC")
    assert code == 0
    found = {job["job_id"]: len(job["attempts"]) for job in json.loads(out)["jobs"]}
    assert found == {"7_0": 2, "7_1": 2, "7_2": 1, "7_3": 1}


def test_a_cluster_without_accounts_is_said(run):
    def runner(argv, *, stdin=None):
        return Output(stdout="", stderr="Slurm accounting storage is disabled", returncode=1)

    with pytest.raises(SlurmError, match="keeps no accounts"):
        history.of_run(run, runner=runner)


def test_a_run_outside_slurm_needs_no_cluster(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    writer = EventWriter(folder.events, "local-0", 0)
    writer.write("attempt_start", host="here")
    writer.write("finished", step=3, digest="d")
    writer.close()
    (job,) = history.of_run(folder).timeline.jobs
    assert [attempt.kind for attempt in job.attempts] == ["completed"]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["timeline"], 2, "nothing to show"),
        (["timeline", "nope"], 3, "neither a run folder nor a job id"),
        (["timeline", "--sacct", "/no/such/file"], 3, "there is no file"),
        (["timeline", "--sacct", DATA], 2, "cannot be read"),
        (["timeline", "--sacct", "/dev/null"], 3, "is empty"),
        (["timeline", "--sacct", __file__], 2, "lacks JobID, State, Submit, Start, End"),
        (["timeline", "--sacct", sys.executable], 2, "lacks JobID"),
        (["timeline", "999", "--sacct", SACCT], 3, "knows no job 999"),
        (["timeline", "--sacct", SACCT, "--tz", "Moon/Far"], 2, "no time zone"),
        (["timeline", "17", "--user", "ann"], 2, "ask the cluster for all their jobs"),
        (["report", "/no/run", "-o", "x.html"], 3, "not a run folder"),
    ],
)
def test_mistakes(capsys, argv, code, words):
    got, out, err = call(capsys, *argv)
    assert got == code
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_a_header_alone_is_nothing(capsys, tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text(SACCT.read_text().partition("\n")[0] + "\n")
    code, _, err = call(capsys, "timeline", "--sacct", path)
    assert code == 3
    assert "holds no job" in err


def test_a_text_that_knows_another_cluster(capsys, run):
    code, _, err = call(capsys, "timeline", run.path, "--sacct", DATA / "22.05" / "sacct.txt")
    assert code == 3
    assert "knows no job of" in err


def test_report(capsys, run, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = call(
        capsys, "report", run.path, "-o", page, "--sacct", SACCT, "--tz", "UTC", "--title", "<Mine>"
    )
    assert (code, err) == (0, f"wrote {page}\n")
    assert "preemption" in out
    assert "Effective saving" in out
    text = page.read_text()
    assert "&lt;Mine&gt;" in text
    assert "preemption" in text


def test_report_as_json_and_without_a_page(capsys, run, tmp_path):
    code, out, err = call(capsys, "report", run.path, "--sacct", SACCT, "--tz", "UTC", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema_version"] == 1
    assert {one["kind"] for one in found["interruptions"]} >= {"preemption"}
    assert {one["run"] for one in found["interruptions"]} == {run.path.name}
    assert "Interruptions" in {one["name"] for one in found["figures"]}


def test_events_that_make_no_sense_do_no_harm(capsys, run, tmp_path):
    log = run.events / "7_0-0" / "0.jsonl"
    nonsense = [
        '{"t_ns": 1e40, "mono_ns": 0, "event": "commit", "step": 3}',
        '{"t_ns": -5, "mono_ns": 0, "event": "step", "step": 3}',
        '{"t_ns": 1796000000000000000, "mono_ns": 0, "event": "step", "step": "three"}',
        '{"t_ns": 1796000000000000000, "mono_ns": 0, "event": "step", "step": 4, "loss": [1]}',
        '{"t_ns": 17, "mono',
    ]
    log.write_text(log.read_text() + "\n".join(nonsense))
    page = tmp_path / "page.html"
    code, _, err = call(capsys, "report", run.path, "-o", page, "--sacct", SACCT, "--tz", "UTC")
    assert (code, err) == (0, f"wrote {page}\n")
    assert "preemption" in page.read_text()


def test_report_with_bad_prices(capsys, run, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("x")
    code, _, err = call(capsys, "report", run.path, "-o", "x.html", "--prices", prices)
    assert code == 2
    assert "price file" in err


def test_help_loads_no_template_engine():
    script = (
        "import sys, slurmspot.cli.report, slurmspot.cli.timeline; "
        "sys.exit(any(m in sys.modules for m in ('jinja2', 'torch', 'pandas', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


EVERYTHING = DATA / "26.05" / "sacct-all.txt"
PRICES = 'as_of = 2026-01-01\ncurrency = "EUR"\n[type.h100]\non_demand = 4\nspot = 1\n'


def test_a_price_that_is_missing_is_named_and_the_rest_reported(capsys, run, tmp_path):
    prices, page = tmp_path / "prices.toml", tmp_path / "page.html"
    prices.write_text(PRICES)
    code, out, err = call(
        *(capsys, "timeline", "--sacct", EVERYTHING, "--cost", "--by", "partition"),
        *("--prices", prices),
    )
    assert code == 1
    assert "there is no price for GPUs of no type" in err
    assert "add [gpu_hour]" in err
    assert "ondemand" in out
    code, out, err = call(
        *(capsys, "report", run.path, "-o", page, "--sacct", SACCT, "--tz", "UTC"),
        *("--prices", prices),
    )
    assert code == 1
    assert "not compared" in out
    assert "no price" in err
    assert "preemption" in page.read_text()
    prices.write_text(PRICES + 'partitions = ["spot", "ondemand"]\n')
    code, out, err = call(
        capsys, "timeline", "--sacct", EVERYTHING, "--cost", "--json", "--prices", prices
    )
    assert (code, err) == (0, "")
    costs = json.loads(out)["costs"]
    assert len(costs) == 22
    for one in costs:
        assert sum(Decimal(amount) for amount in one["amounts"].values()) == Decimal(one["total"])


def test_costs_are_told_with_what_they_assume(capsys):
    code, out, _ = call(capsys, "timeline", "--sacct", SACCT, "--cost", "--by", "user")
    assert code == 0
    for words in ("User", "Useful work", "Effective", "What these figures assume", "0.90 USD"):
        assert words in out


@pytest.mark.parametrize("table", ["attempts", "phases", "interruptions"])
def test_csv(capsys, table, tmp_path):
    code, out, _ = call(
        *(capsys, "timeline", "--sacct", SACCT, "--tz", "UTC"),
        *("--format", "csv", "--table", table),
    )
    assert code == 0
    rows = list(csv.DictReader(out.splitlines()))
    assert len(rows) > 10
    assert {"job_id", "attempt"} <= rows[0].keys()
    path = tmp_path / "table.csv"
    call(
        *(capsys, "timeline", "--sacct", SACCT, "--tz", "UTC"),
        *("--format", "csv", "--table", table, "-o", path),
    )
    assert path.read_text() == out


def test_parquet_asks_for_a_file_and_for_what_writes_it(capsys, tmp_path, monkeypatch):
    argv = ("timeline", "--sacct", SACCT, "--format", "parquet")
    code, _, err = call(capsys, *argv)
    assert (code, "--output" in err) == (2, True)
    assert not (tmp_path / "table.parquet").exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = call(capsys, *argv, "-o", tmp_path / "table.parquet")
    assert (code, "slurmspot[parquet]" in err) == (2, True)


@pytest.mark.parametrize(
    ("kind", "words"), [("running", "still there"), ("failed", "failed"), ("node_fail", "killed")]
)
def test_a_rank_that_said_no_farewell(kind, words):
    run = simulated.run("spot", stop_at=50)
    (attempt,) = run.jobs[0].attempts
    job = run.jobs[0]._replace(attempts=(attempt._replace(kind=kind),))
    found = History(timeline=Timeline(jobs=(job,)), events=run.events)
    assert ranks_text(found, bold=False).splitlines()[1].endswith(f"  {words}")


def test_ranks(capsys, run):
    code, out, _ = call(capsys, "timeline", run.path, "--sacct", SACCT, "--tz", "UTC", "--ranks")
    assert code == 0
    assert "LAST STEP" in out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("7_0-")] == [
        *("killed", "-", "killed", "-"),  # each rank, then each node
    ]
    _, out, _ = call(capsys, "timeline", run.path, "--sacct", SACCT, "--tz", "UTC", "--json")
    assert [part["last_step"] for part in json.loads(out)["ranks"]] == [5, 12]
