"""Attempts of the two captures, written out by hand; and any legal history there and back."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmspot.errors import NotFoundError, UsageError
from slurmspot.timeline.attempts import Attempt, read_timeline

DATA = Path(__file__).parent.parent / "data" / "sacct"

# job: (name, [(kind, submit, eligible, start, end, processes gone, gpus, nodes)]), times 16:MM:SS
EXPECTED = {
    "22.05": {
        "16": ("train-gang", [
            ("requeued", "06:27", "06:27", "06:28", "06:34", "06:34", 8, "01"),
            ("cancelled", "06:34", "06:53", "06:54", "06:59", "07:03", 8, "01"),
        ]),
        "17": ("preemptor", [
            ("completed", "06:31", "06:31", "06:34", "06:38", "06:38", 8, "01"),
        ]),
        "18": ("train-deaf", [
            ("preempted", "07:04", "07:04", "07:04", "07:23", "07:28", 8, "01"),
            ("cancelled", "07:28", "07:48", "07:48", "07:52", "07:56", 8, "01"),
        ]),
        "19": ("preemptor", [
            ("completed", "07:08", "07:08", "07:28", "07:32", "07:32", 16, "0123"),
        ]),
        "20": ("train-nodefail", [
            ("node_fail", "07:57", "07:57", "07:57", "08:02", "08:07", 8, "01"),
            ("cancelled", "08:07", "08:14", "08:14", "08:18", "08:23", 8, "01"),
        ]),
        "21": ("train-elastic", [
            ("resized", "08:23", "08:23", "08:23", "08:29", "08:29", 3, "012"),
            ("failed", "08:29", "08:29", "08:29", "08:48", "08:48", 2, "01"),
        ]),
        "22_0": ("sweep", [("failed", "08:49", "08:51", "08:51", "08:55", "08:55", 2, "0")]),
        "22_1": ("sweep", [("failed", "08:49", "08:51", "08:51", "08:55", "08:55", 2, "0")]),
        "22_2": ("sweep", [("completed", "08:49", "08:55", "08:55", "09:15", "09:15", 2, "1")]),
        "22_3": ("sweep", [("completed", "08:49", "08:55", "08:55", "09:15", "09:15", 2, "1")]),
        "25": ("preemptor", [
            ("completed", "08:54", "08:54", "08:55", "08:59", "08:59", 4, "0"),
        ]),
        "27": ("overtime", [("failed", "09:24", "09:24", "09:25", "10:13", "10:13", 1, "0")]),
        "28": ("crash", [("failed", "09:24", "09:24", "09:25", "09:27", "09:27", 1, "0")]),
        "29": ("exp|lr=1e-3|é", [
            ("completed", "09:24", "09:24", "09:25", "09:28", "09:28", 1, "0"),
        ]),
        "30": ("two\nlines", [
            ("completed", "09:24", "09:24", "09:25", "09:28", "09:28", 1, "0"),
        ]),
        "31": ("two-steps", [
            ("completed", "09:24", "09:24", "09:25", "09:30", "09:30", 2, "1"),
        ]),
        "32": ("held", [
            ("requeued", "09:24", "09:24", "09:25", "09:28", "09:28", 1, "1"),
            ("cancelled", "09:28", "09:36", "09:37", "09:40", "09:40", 1, "0"),
        ]),
        "33+0": ("het", [("completed", "09:40", "09:40", "09:41", "09:44", "09:44", 1, "0")]),
        "33+1": ("het", [("completed", "09:40", "09:40", "09:41", "09:44", "09:44", 0, "2")]),
        "35": ("paused", [("completed", "09:40", "09:40", "09:41", "09:53", "09:53", 1, "2")]),
        "36": ("fragile", [("failed", "09:48", "09:48", "10:13", "10:17", "10:17", 16, "0123")]),
        "37": ("preemptor", [
            ("completed", "10:17", "10:17", "10:17", "10:21", "10:21", 16, "0123"),
        ]),
    },
    "26.05": {
        "1": ("train-gang", [
            ("requeued", "06:27", "06:27", "06:28", "06:34", "06:34", 8, "01"),
            ("cancelled", "06:34", "06:36", "06:36", "06:58", "07:02", 8, "23"),
        ]),
        "2": ("preemptor", [
            ("completed", "06:31", "06:31", "06:34", "06:38", "06:38", 8, "01"),
        ]),
        "3": ("train-deaf", [
            ("preempted", "07:03", "07:03", "07:04", "07:24", "07:28", 8, "01"),
            ("cancelled", "07:28", "07:30", "07:32", "07:50", "07:54", 8, "01"),
        ]),
        "4": ("preemptor", [
            ("completed", "07:07", "07:07", "07:28", "07:32", "07:32", 16, "0123"),
        ]),
        "5": ("train-nodefail", [
            ("node_fail", "07:55", "07:55", "07:55", "08:00", "08:04", 8, "01"),
            ("cancelled", "08:04", "08:06", "08:07", "08:15", "08:19", 8, "01"),
        ]),
        "6": ("train-elastic", [
            ("resized", "08:20", "08:20", "08:20", "08:26", "08:26", 3, "012"),
            ("failed", "08:26", "08:26", "08:26", "08:45", "08:45", 2, "01"),
        ]),
        "7_0": ("sweep", [
            ("preempted", "08:46", "08:46", "08:46", "08:51", "08:51", 2, "0"),
            ("completed", "08:51", "09:12", "09:12", "09:32", "09:32", 2, "0"),
        ]),
        "7_1": ("sweep", [
            ("preempted", "08:46", "08:46", "08:46", "08:51", "08:51", 2, "0"),
            ("completed", "08:51", "09:12", "09:12", "09:32", "09:32", 2, "0"),
        ]),
        "7_2": ("sweep", [("completed", "08:46", "08:52", "08:52", "09:12", "09:12", 2, "1")]),
        "7_3": ("sweep", [("completed", "08:46", "08:52", "08:52", "09:12", "09:12", 2, "1")]),
        "10": ("preemptor", [
            ("completed", "08:51", "08:51", "08:52", "08:56", "08:56", 4, "0"),
        ]),
        "12": ("overtime", [("failed", "09:33", "09:33", "09:33", "10:02", "10:02", 1, "0")]),
        "13": ("crash", [("failed", "09:33", "09:33", "09:33", "09:35", "09:35", 1, "0")]),
        "14": ("exp|lr=1e-3|é", [
            ("completed", "09:33", "09:33", "09:33", "09:36", "09:36", 1, "0"),
        ]),
        "15": ("two\nlines", [
            ("completed", "09:33", "09:33", "09:33", "09:36", "09:36", 1, "0"),
        ]),
        "16": ("two-steps", [
            ("completed", "09:33", "09:33", "09:33", "09:39", "09:39", 2, "1"),
        ]),
        "17": ("held", [
            ("requeued", "09:33", "09:33", "09:33", "09:37", "09:37", 1, "1"),
            ("cancelled", "09:37", "09:45", "09:45", "09:49", "09:49", 1, "0"),
        ]),
        "18+0": ("het", [("completed", "09:49", "09:49", "09:49", "09:52", "09:52", 1, "0")]),
        "18+1": ("het", [("completed", "09:49", "09:49", "09:49", "09:52", "09:52", 0, "1")]),
        "20": ("paused", [("completed", "09:49", "09:49", "09:49", "10:01", "10:01", 1, "2")]),
        "21": ("fragile", [
            ("preempted", "09:57", "09:57", "10:03", "10:07", "10:07", 16, "0123"),
        ]),
        "22": ("preemptor", [
            ("completed", "10:07", "10:07", "10:08", "10:12", "10:12", 16, "0123"),
        ]),
    },
}  # fmt: skip


def clock(time: datetime | None) -> str | None:
    return time and f"{time:%M:%S}"


def facts(attempt: Attempt) -> tuple:
    return (
        attempt.kind,
        *map(clock, (attempt.submit, attempt.eligible, attempt.start, attempt.end)),
        clock(attempt.process_exit),
        attempt.gpus,
        "".join(node.removeprefix("node") for node in attempt.nodes),
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("file", ["sacct.txt", "sacct-all.txt", "sacct.json"])
@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_captures_of_real_clusters(release, file, packed):
    data = (DATA / release / file).read_bytes()
    timeline = read_timeline(gzip.compress(data, 1) if packed else data, tz=UTC)
    found = {job.job_id: (job.name, list(map(facts, job.attempts))) for job in timeline.jobs}
    assert found == EXPECTED[release]
    if file != "sacct.json":  # which knows an order of its own
        assert list(found) == list(EXPECTED[release])
    assert not timeline.rejected
    assert not timeline.notes


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_text_and_json_tell_the_same(release):
    text = read_timeline((DATA / release / "sacct-all.txt").read_bytes(), tz=UTC)
    other = read_timeline((DATA / release / "sacct.json").read_bytes())
    jobs = {job.job_id: job for job in text.jobs}
    for job in other.jobs:
        attempts = [a._replace(restarts=None) for a in job.attempts]
        expected = [a._replace(restarts=None) for a in jobs[job.job_id].attempts]
        assert attempts == expected
        assert job.user == jobs[job.job_id].user
    paused = next(job for job in text.jobs if job.name == "paused")
    assert paused.attempts[0].suspended_s == 5


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"{", UsageError, "not JSON"),
        (b"[1]", UsageError, "no list of jobs"),
        (b'{"jobs": 3}', UsageError, "no list of jobs"),
        (b'{"jobs": []}', NotFoundError, "sacct found nothing"),
        (b"\x1f\x8bno", UsageError, ""),
        (gzip.compress(b"JobID|State")[:-9], UsageError, ""),
        (gzip.compress(b""), NotFoundError, "prints a header"),
    ],
)
def test_exports_that_are_none(data, error, words):
    with pytest.raises(error) as caught:
        read_timeline(data)
    assert words in (caught.value.why or "")


@pytest.mark.parametrize("release", ["22.05", "26.05"])
@pytest.mark.parametrize("spoil", [{"time": None}, {"state": {}}, {"job_id": "x"}, {"tres": 1}])
def test_a_job_of_json_that_makes_no_sense_spoils_only_itself(release, spoil):
    found = json.loads((DATA / release / "sacct.json").read_bytes())
    job = next(job for job in found["jobs"] if job["name"] == "crash")
    job.update(spoil)
    timeline = read_timeline(json.dumps(found).encode())
    assert len(timeline.rejected) == 1
    assert len(timeline.jobs) == len(EXPECTED[release]) - 1


def test_the_deaf_job_was_preempted_and_its_processes_gone_five_seconds_later():
    timeline = read_timeline((DATA / "22.05" / "sacct.txt").read_text(), tz=UTC)
    (deaf,) = [job for job in timeline.jobs if job.name == "train-deaf"]
    first, second = deaf.attempts
    assert (first.kind, second.kind) == ("preempted", "cancelled")
    assert (first.process_exit - first.end).total_seconds() == 5
    assert [(p.name, p.seconds, p.source) for p in second.phases] == [
        ("backoff", 20, "sacct"),
        ("queue", 0, "sacct"),
        ("run", 4, "sacct"),
        ("teardown", 4, "sacct"),
    ]


HEADER = "JobID|JobName|State|Submit|Eligible|Start|End|NodeList|AllocTRES|Restarts\n"


def text(*rows: str) -> str:
    return HEADER + "".join(f"{row}\n" for row in rows)


def row(job="5", state="COMPLETED", at=0, *, name="train", restarts="", started=True, ended=True):
    def time(minute):
        return f"2026-01-02T03:{minute:02d}:00"

    start = time(at + 2) if started else "Unknown"
    end = time(at + 5) if ended else "Unknown"
    times = f"{time(at)}|{time(at + 1)}|{start}|{end}"
    return f"{job}|{name}|{state}|{times}|n0|gres/gpu=4|{restarts}"


def kinds(timeline):
    return [[attempt.kind for attempt in job.attempts] for job in timeline.jobs]


def test_an_id_used_again_is_another_job_and_said_so():
    timeline = read_timeline(text(row(at=0), row(at=10)))
    assert kinds(timeline) == [["completed"], ["completed"]]
    assert "job id 5 was used by 2 different jobs" in timeline.notes[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"state": "PREEMPTED"}, {"name": "other"}),
        ({"state": "PREEMPTED", "restarts": "2"}, {"restarts": "0"}),
        ({"state": "NODE_FAIL", "restarts": "0"}, {"restarts": "0"}),
        ({"state": "RUNNING", "ended": False}, {}),
        ({"state": "CANCELLED by 0"}, {}),
    ],
)
def test_ids_used_again(before, after):
    assert len(read_timeline(text(row(at=0, **before), row(at=10, **after))).jobs) == 2


@pytest.mark.parametrize("state", ["PREEMPTED", "REQUEUED", "NODE_FAIL", "RESIZING", "BOOT_FAIL"])
def test_states_that_are_not_the_end(state):
    timeline = read_timeline(text(row(at=10, restarts="1"), row(at=0, state=state, restarts="0")))
    assert len(timeline.jobs) == 1
    assert [attempt.index for attempt in timeline.jobs[0].attempts] == [0, 1]


def test_a_packed_export_with_odd_rows(tmp_path):
    path = tmp_path / "sacct.gz"
    path.write_bytes(gzip.compress(text(row(), row("9.batch"), "x|y", row("6", "BANANA")).encode()))
    with path.open("rb") as file:
        timeline = read_timeline(file)
    assert kinds(timeline) == [["completed"]]
    assert [r.text[:2] for r in timeline.rejected] == ["9.", "x|", "6|"]


def test_a_name_that_looks_like_a_job_makes_none():
    evil = row().replace("|train|", "|evil\n9|root|")
    timeline = read_timeline(text(evil, row("5.batch")))
    assert [(job.job_id, job.name) for job in timeline.jobs] == [("5", "evil\n9|root")]
    assert not timeline.rejected


def test_two_clusters_have_their_own_ids():
    header = HEADER.replace("Restarts", "Cluster")
    body = row(at=0, restarts="a", state="PREEMPTED") + "\n" + row(at=10, restarts="b")
    assert len(read_timeline(header + body).jobs) == 2


def test_pending_running_and_never_started():
    timeline = read_timeline(
        text(
            row("7_[2-5]", "PENDING", started=False, ended=False),
            row("8", "RUNNING", ended=False),
            row("9", "CANCELLED by 1000", started=False),
        )
    )
    pending, running, cancelled = (job.attempts[0] for job in timeline.jobs)
    assert (pending.kind, running.kind, cancelled.kind) == ("pending", "running", "cancelled")
    assert running.process_exit is None
    assert [(p.name, p.seconds) for p in pending.phases] == [("backoff", 60), ("queue", None)]
    assert [p.name for p in running.phases] == ["backoff", "queue", "run"]
    assert [(p.name, p.seconds) for p in cancelled.phases] == [("backoff", 60), ("queue", 240)]


def test_rows_that_are_no_attempt_are_handed_back():
    timeline = read_timeline(text(row(), row("6", "BANANA"), row("9.batch"), row(), row()))
    assert kinds(timeline) == [["completed"]]
    assert [(r.line, r.reason) for r in timeline.rejected] == [
        (3, "BANANA is no job state known here"),
        (4, "a step of no attempt of job 9"),
    ]


def test_json_holds_what_was_promised():
    (job,) = read_timeline(text(row()), tz=UTC).as_json()["jobs"]
    (attempt,) = job["attempts"]
    assert set(job) == {"job_id", "name", "user", "cluster", "attempts"}
    assert attempt["start"] == "2026-01-02T03:02:00+00:00"
    assert attempt["phases"][2] == {
        "name": "run",
        "start": "2026-01-02T03:02:00+00:00",
        "end": "2026-01-02T03:05:00+00:00",
        "seconds": 180.0,
        "source": "sacct",
    }


def test_rows_that_contradict_themselves_are_shown_and_said():
    def cells(job, state, submit, start, end):
        times = [f"2026-01-02T03:{minute:02d}:00" for minute in (submit, submit, start, end)]
        return f"{job}|x|{state}|{'|'.join(times)}|n0||"

    timeline = read_timeline(
        text(
            cells("5", "PREEMPTED", 0, 1, 20),
            cells("5", "COMPLETED", 10, 11, 30),
            cells("6", "COMPLETED", 9, 8, 3),
            cells("7", "COMPLETED", 0, 1, 2),
        ),
        tz=UTC,
    )
    assert kinds(timeline) == [["preempted", "completed"], ["completed"], ["completed"]]
    assert timeline.notes == (
        "job 5, attempt 1 starts 540 s before the one before it ends",
        "job 6, attempt 0 starts 60 s before its submission",
        "job 6, attempt 0 ends 300 s before it starts; it is shown as empty",
    )
    assert all((p.seconds or 0) >= 0 for job in timeline.jobs for p in job.attempts[0].phases)


def test_a_step_belongs_to_the_last_attempt_that_had_started_whatever_the_rows_say():
    rows = [row(at=at, state="REQUEUED") for at in (0, 1, 2)]
    starts = [2, 9, 4]
    for index, (line, start) in enumerate(zip(rows, starts, strict=True)):
        rows[index] = line.replace(f"T03:{index + 2:02d}:00", f"T03:{start:02d}:00", 1)
    step = row("5.0", at=3).replace("T03:08:00", "T03:30:00")
    (job,) = read_timeline(text(*rows, step), tz=UTC).jobs
    assert [clock(attempt.start) for attempt in job.attempts] == ["02:00", "09:00", "04:00"]
    assert clock(job.attempts[2].process_exit) == "30:00"


def test_attempts_that_left_no_row_are_missed():
    timeline = read_timeline(text(row(state="PREEMPTED", restarts="1"), row(at=10, restarts="4")))
    assert timeline.notes == (
        "job 5, attempt 0 is restart 1: 1 before it left no row",
        "job 5, attempt 1 is restart 4: 2 before it left no row",
    )
    assert timeline.jobs[0].attempts[0].released is None  # the next row is not of the next attempt


# --- any legal history, in any field order -----------------------------------------------------

FIELDS = ["JobID", "JobName", "State", "Submit", "Eligible", "Start", "End", "NodeList"]
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
GOES_ON = {"PREEMPTED": "preempted", "REQUEUED": "requeued", "NODE_FAIL": "node_fail"}
ENDS = {
    "COMPLETED": "completed",
    "CANCELLED by 1000": "cancelled",
    "TIMEOUT": "timeout",
    "OUT_OF_MEMORY": "failed",
    "RUNNING": "running",
}
names = st.text(st.sampled_from("ab1| \n,.:-=é<"), max_size=8).filter(
    lambda name: name == name.strip("\n")
)


@st.composite
def histories(draw):
    """Jobs with their true attempts: (id, name, [(kind, submit, eligible, start, end, gone)])."""
    jobs = []
    for number in draw(st.lists(st.integers(1, 999), min_size=1, max_size=3, unique=True)):
        name, job_id = draw(names), str(number) + draw(st.sampled_from(["", "_3", "+1"]))
        states = [
            *draw(st.lists(st.sampled_from(sorted(GOES_ON)), max_size=3)),
            draw(st.sampled_from(sorted(ENDS))),
        ]
        submit, attempts = EPOCH, []
        for state in states:
            gaps = draw(st.tuples(*[st.integers(0, 300)] * 3, *[st.integers(1, 300)] * 2))
            eligible = submit + timedelta(seconds=gaps[0])
            start = eligible + timedelta(seconds=gaps[1])
            end = start + timedelta(seconds=gaps[3])
            gone = end + timedelta(seconds=gaps[4])
            if state == "RUNNING":
                end = gone = None
            attempts.append((state, submit, eligible, start, end, gone))
            submit = gone and gone + timedelta(seconds=gaps[2])
        jobs.append((job_id, name, attempts))
    return jobs


def shown(time):
    return f"{time:%Y-%m-%dT%H:%M:%S}" if time else "Unknown"


@settings(max_examples=150, deadline=None)
@given(histories(), st.permutations(FIELDS), st.sampled_from(["|", ";", ",", "\t"]))
def test_any_legal_history_comes_back_as_itself(history, order, delimiter):
    lines = [delimiter.join(order)]
    expected = []
    for job_id, named, attempts in history:
        # Two readings that are both right are nobody's fault: a comma between two fields that may
        # hold one, and a line that is a record already, its nodes left empty.
        name = named.replace(f"{delimiter}\n", "\n").strip("\n")
        name = name.replace(",", "").strip("\n") if delimiter == "," else name
        truth = []
        for state, submit, eligible, start, end, gone in attempts:
            for suffix, label, begun, until in (
                ("", name, submit, end),
                (".batch", "batch", start, gone),
                (".0", "python3", start, end),
            ):
                times = (begun, begun if suffix else eligible, start, until)
                values = [job_id + suffix, label, state, *map(shown, times), "n[1,3]"]
                cells = dict(zip(FIELDS, values, strict=True))
                lines.append(delimiter.join(cells[field] for field in order))
            truth.append(((GOES_ON | ENDS)[state], submit, eligible, start, end, gone))
        expected.append((job_id, name, truth))
    timeline = read_timeline("\n".join(lines) + "\n", tz=UTC)
    assert not timeline.rejected
    assert [
        (
            job.job_id,
            job.name,
            [(a.kind, a.submit, a.eligible, a.start, a.end, a.process_exit) for a in job.attempts],
        )
        for job in timeline.jobs
    ] == expected
    for job in timeline.jobs:
        for attempt in job.attempts:
            assert all((phase.seconds or 0) >= 0 for phase in attempt.phases)
            for before, after in zip(attempt.phases, attempt.phases[1:], strict=False):
                assert before.end == after.start
        for before, after in pairwise(job.attempts):
            assert before.released == after.submit == before.phases[-1].end
            assert before.phases[-1].name == "release"
        assert job.attempts[-1].released is None


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("5|7._[]+\n\t, CANCELED2026-T:0batchx"), max_size=200))
def test_no_text_breaks_the_reader(body):
    timeline = read_timeline(HEADER + body + "\n")
    assert timeline.jobs or timeline.rejected or not body.strip("\n")
