"""What a soak plans, and what it takes for a success."""

from collections import Counter

from slurmspot.faults.fault import PROFILES, Fault
from slurmspot.study.soak import failings, faults

GOOD = {
    "injected": 10,
    "effective": 10,
    "recovered": 10,
    "digest_equal": True,
    "orphan_processes": 0,
    "nodes_left_down": 0,
}


def test_every_profile_comes_equally_often_each_time_a_little_later():
    planned = [Fault.of(table) for table in faults(3 * len(PROFILES), seed=1)]
    assert Counter(fault.profile for fault in planned) == dict.fromkeys(PROFILES, 3)
    steps = [fault.aim.at_step for fault in planned]
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)


def test_a_seed_draws_the_same_again():
    assert faults(10, seed=1) == faults(10, seed=1)
    assert faults(10, seed=1) != faults(10, seed=2)


def test_a_soak_fails_by_whatever_is_not_as_it_should_be():
    assert failings(GOOD, 10) == []
    for name in GOOD:
        (problem,) = failings({**GOOD, name: 7}, 10)
        assert problem.startswith(f"{name} is 7, not ")
