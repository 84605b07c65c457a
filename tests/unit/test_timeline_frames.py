"""DataFrames: documented columns and types, UTC times, whole contents."""

from __future__ import annotations

from datetime import UTC, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pandas as pd
import pytest
import simulated

from slurmspot.timeline import frames
from slurmspot.timeline.attempts import read_timeline
from slurmspot.timeline.recovery import interruptions

DATA = Path(__file__).parent.parent / "data" / "sacct"


def types(frame):
    return {name: str(dtype) for name, dtype in frame.dtypes.items()}


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_attempts_of_a_capture(release):
    jobs = read_timeline((DATA / release / "sacct-all.txt").read_bytes(), tz=UTC).jobs
    frame = frames.attempts(jobs)
    assert types(frame) == frames.ATTEMPTS
    assert len(frame) == sum(len(job.attempts) for job in jobs)
    deaf = frame[frame["name"] == "train-deaf"].iloc[0]
    assert deaf["kind"] == "preempted"
    assert deaf["start"] == pd.Timestamp(jobs[2].attempts[0].start)
    assert deaf["gpus"] == 8
    assert deaf["gpu_hours"] == pytest.approx(8 * deaf["ran"].total_seconds() / 3600)
    assert frame.loc[frame["name"] == "paused", "suspended"].iloc[0] == timedelta(seconds=5)
    parts = frames.phases(jobs)
    assert types(parts) == frames.PHASES
    assert set(parts["source"]) == {"sacct"}
    waits = parts[parts["phase"] == "queue"]["length"].sum()
    assert waits == frame["queue"].sum()


def test_interruptions_of_a_run():
    run = simulated.run("spot", [("preempt", 50), ("kill", 90)])
    frame = frames.interruptions(interruptions(run.jobs, run.events))
    assert types(frame) == frames.INTERRUPTIONS
    assert list(frame["injected"]) == ["preempt", "kill"]
    assert list(frame["steps_lost"]) == [0, 10]
    assert frame["notice_to_durable"].isna().tolist() == [False, True]
    assert "events" in set(frames.phases(run.jobs)["source"])


def test_frames_without_rows_have_their_types_too():
    assert types(frames.attempts([])) == frames.ATTEMPTS
    assert types(frames.phases([])) == frames.PHASES
    assert types(frames.interruptions([])) == frames.INTERRUPTIONS


def test_times_of_two_offsets_become_utc():
    text = (
        "JobID|State|Submit|Start|End\n"
        "1|COMPLETED|2026-10-25T01:00:00|2026-10-25T01:30:00|2026-10-25T03:30:00\n"
        "2|RUNNING|2026-07-01T01:00:00|2026-07-01T01:30:00|Unknown\n"
    )
    frame = frames.attempts(read_timeline(text, tz=ZoneInfo("Europe/Berlin")).jobs)
    assert frame["ran"].iloc[0] == timedelta(hours=3)
    assert frame["end"].isna().tolist() == [False, True]
    assert frame["gpus"].isna().all()
