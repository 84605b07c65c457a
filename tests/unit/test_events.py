"""The event log under kills, torn lines and full disks."""

import json
import os

from slurmspot.events import Clock, EventWriter, Thinning, last_step, read_events


def _clock(*times):
    left = list(times)
    return Clock(unix_ns=lambda: left[0], mono_ns=lambda: left.pop(0))


def test_what_is_written_comes_back_in_order_of_time(tmp_path):
    late = EventWriter(tmp_path, "1-0", 1, _clock(30))
    early = EventWriter(tmp_path, "1-0", 0, _clock(10, 20))
    late.write("commit", step=3, tier="remote")
    early.write("attempt_start", job_id="1")
    early.write("first_step", step=1)
    events = read_events(tmp_path)
    assert [(e.event, e.step, e.rank, e.t_ns) for e in events] == [
        ("attempt_start", None, "0", 10),
        ("first_step", 1, "0", 20),
        ("commit", 3, "1", 30),
    ]
    assert events[2].data == {"tier": "remote"}


def test_a_torn_last_line_is_skipped_and_the_next_writer_goes_on(tmp_path):
    first = EventWriter(tmp_path, "1-0", 0)
    first.write("first_step", step=1)
    first.close()
    log = tmp_path / "1-0" / "0.jsonl"
    log.write_bytes(log.read_bytes() + b'{"t_ns":5,"mono_ns":5,"eve')
    second = EventWriter(tmp_path, "1-0", 0)
    second.write("commit", step=2)
    second.close()
    assert [e.event for e in read_events(tmp_path)] == ["first_step", "commit"]


def test_every_truncation_of_a_log_reads_as_a_prefix(tmp_path):
    writer = EventWriter(tmp_path, "1-0", 0)
    for step in range(4):
        writer.write("commit", step=step)
    log = tmp_path / "1-0" / "0.jsonl"
    whole = log.read_bytes()
    for size in range(len(whole)):
        log.write_bytes(whole[:size])
        steps = [e.step for e in read_events(tmp_path)]
        assert steps == list(range(len(steps)))


def test_foreign_lines_are_skipped(tmp_path):
    (tmp_path / "1-0").mkdir()
    lines = ["[]", "null", "7", '{"event":"x"}', '{"t_ns":"a","mono_ns":1,"event":"x"}', "\xff"]
    (tmp_path / "1-0" / "0.jsonl").write_text("\n".join(lines))
    assert read_events(tmp_path) == []


def test_the_beat_knows_the_last_step_before_a_kill(tmp_path):
    writer = EventWriter(tmp_path, "1-0", 0)
    for step in (41, 42):
        writer.beat(step)
    other = EventWriter(tmp_path, "1-1", 0)
    other.beat(7)
    assert last_step(tmp_path) == 42
    assert last_step(tmp_path, before_attempt="1-0") == 7
    assert last_step(tmp_path / "none") is None
    assert [(e.event, e.step, e.attempt) for e in read_events(tmp_path)] == [
        ("step", 42, "1-0"),
        ("step", 7, "1-1"),
    ]


def test_the_many_steps_can_be_left_out(tmp_path):
    writer = EventWriter(tmp_path, "1-0", 0)
    writer.write("step", step=1)
    writer.write("commit", step=1)
    writer.beat(2)
    assert [e.event for e in read_events(tmp_path, steps=False)] == ["commit"]
    assert [e.event for e in read_events(tmp_path)] == ["step", "commit", "step"]


def test_a_full_disk_is_counted_and_does_not_stop_the_run(tmp_path):
    writer = EventWriter(tmp_path, "1-0", 0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._log)
    writer.write("commit", step=1)
    assert writer.dropped == 1


def test_an_event_can_be_stamped_with_the_time_it_happened(tmp_path):
    writer = EventWriter(tmp_path, "1-0", 0)
    writer.write("notice", at=(5, 6), source="SIGUSR1")
    line = json.loads((tmp_path / "1-0" / "0.jsonl").read_text())
    assert (line["t_ns"], line["mono_ns"]) == (5, 6)


def _kept(times):
    thinning = Thinning()
    return [step for step, t in enumerate(times, 1) if thinning.keeps(step, int(t * 1e9))]


def test_steps_are_thinned_to_round_numbers():
    assert _kept([2.0 * step for step in range(5)]) == [2, 3, 4, 5]
    assert _kept([0.11 * step for step in range(55)]) == [10, 20, 30, 40, 50]
    assert _kept([0.004 * step for step in range(2000)]) == [500, 1000, 1500, 2000]


def test_two_attempts_log_the_same_steps():
    whole = _kept([0.11 * step for step in range(200)])
    thinning = Thinning()
    resumed = [s for s in range(87, 201) if thinning.keeps(s, int(0.11 * s * 1e9))]
    assert resumed == [step for step in whole if step > 87]


def test_thinning_wakes_up_when_steps_become_slow():
    times = [0.01 * step for step in range(1000)] + [10 + 60 * step for step in range(300)]
    assert _kept(times)[-10:] == list(range(1291, 1301))
