"""Ranks, nodes, and clocks that disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_timeline_recovery import event

from slurmspot.timeline.clocks import differences, in_step
from slurmspot.timeline.ranks import by_node, by_rank


def gang(*, ahead=0.0, jitter=(0.0,), code=75):
    """Two nodes with two ranks each; the second node's clock is ``ahead``."""
    events = []
    for rank in range(4):
        skew = ahead if rank >= 2 else 0.0

        def log(at, name, step=None, rank=rank, skew=skew, **data):
            events.append(event("7-0", at, name, step, rank=str(rank), skew=skew, **data))

        log(1, "attempt_start", host=f"n{rank // 2}")
        log(3 + rank, "imports_done")
        log(8, "restore_begin")
        log(9 + rank / 10, "restore_end", 0)
        for number, late in enumerate(jitter):
            step = 10 * (number + 1)
            log(10 + number + late * rank, "snapshot_begin", step)
            log(10.5 + number, "snapshot_end", step, stall_s=0.1)
            written = {"seconds": 0.4, "size_bytes": 1000 * (rank + 1)}
            log(11 + number, "persist_end", step)
            events[-1] = replace(events[-1], data=written)
        log(30, "step", 25 - rank)
        if code is not None or rank:
            log(31, "exit", 25, code=code or 0)
    return events


def test_by_rank_and_by_node():
    ranks = by_rank(gang(jitter=(0.0, 0.01)))
    assert [(part.rank, part.host, part.imports_s) for part in ranks] == [
        ("0", "n0", 2), ("1", "n0", 3), ("2", "n1", 4), ("3", "n1", 5),
    ]  # fmt: skip
    assert ranks[3].restore_s == pytest.approx(1.3)
    assert (ranks[3].stall_s, ranks[3].written_bytes) == (pytest.approx(0.2), 8000)
    first, second = by_node(ranks)
    assert (first.host, first.imports_s, first.written_bytes) == ("n0", 3, 6000)
    assert (second.last_step, second.exit_code) == (23, 75)
    assert by_node(by_rank(gang(code=None)))[0].exit_code is None


@pytest.mark.parametrize("ahead", [30.0, -2.5, 0.2])
def test_a_clock_that_is_off_is_found_and_put_right(ahead):
    events = gang(ahead=ahead, jitter=(0.0, 0.01, 0.0, 0.005, 0.01))
    (found,) = differences(events)
    assert (found.host, found.against, found.moments) == ("n1", "n0", 10)
    assert found.seconds == pytest.approx(ahead, abs=0.05)
    assert found.certain
    assert ("ahead of" if ahead > 0 else "behind") in str(found)
    straight = in_step(events, [found])
    assert not any(one.certain for one in differences(straight))
    assert [e.t_ns for e in straight] == sorted(e.t_ns for e in straight)


def test_what_a_collective_explains_is_no_difference():
    events = gang(jitter=(0.0, 0.4, 0.1, 0.0))
    (found,) = differences(events)
    assert not found.certain
    assert in_step(events, [found]) == events
    assert differences([]) == []


@given(st.floats(-1e4, 1e4), st.lists(st.floats(0, 0.02), min_size=3, max_size=20))
def test_the_estimate_is_within_its_scatter_of_the_truth(ahead, jitter):
    (found,) = differences(gang(ahead=ahead, jitter=jitter))
    assert found.seconds == pytest.approx(ahead, abs=0.0601)


def test_ranks_without_a_node_are_left_as_they_are():
    events = [replace(e, data={}) for e in gang(ahead=9.0)]
    assert differences(events) == []
    assert {part.host for part in by_rank(events)} == {"-"}
