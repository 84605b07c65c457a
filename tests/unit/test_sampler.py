"""The data cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmspot.errors import UsageError
from slurmspot.job.sampler import GlobalBatchSampler


def _epochs(world_size, steps, resume_at=(), size=23, seed=3):
    """Samples of each global step, the ranks' shares joined, resuming where told."""
    seen = []

    def ranks(state):
        made = [
            GlobalBatchSampler(size, 6, seed=seed, rank=r, world_size=world_size)
            for r in range(world_size)
        ]
        for sampler in made:
            if state:
                sampler.load_state_dict(state)
        return made

    samplers = ranks(None)
    while len(seen) < steps:
        for shares in zip(*samplers, strict=True):
            seen.append([i for share in shares for i in share])
            for sampler in samplers:
                sampler.advance()
            if len(seen) == steps or len(seen) in resume_at:
                break
        else:
            for sampler in samplers:
                sampler.next_epoch()
        if len(seen) in resume_at:
            resume_at = tuple(set(resume_at) - {len(seen)})
            samplers = ranks(samplers[0].state_dict())
    return seen


@given(
    world_size=st.sampled_from([1, 2, 3, 6]),
    resume_at=st.sets(st.integers(1, 9), max_size=4),
)
def test_any_resumption_on_any_number_of_ranks_sees_the_same_samples(world_size, resume_at):
    assert _epochs(world_size, 10, tuple(resume_at)) == _epochs(1, 10)


def test_an_epoch_holds_no_sample_twice_and_the_next_is_another_order():
    steps = _epochs(1, 6)
    first, second = [i for s in steps[:3] for i in s], [i for s in steps[3:] for i in s]
    assert len(set(first)) == len(first) == 18
    assert first != second


def test_reading_ahead_does_not_move_the_cursor():
    sampler = GlobalBatchSampler(23, 6, seed=None)
    assert list(sampler) == list(sampler) == [list(range(s, s + 6)) for s in (0, 6, 12)]
    assert sampler.state_dict()["cursor"] == 0


def test_a_batch_that_cannot_be_shared_is_refused():
    with pytest.raises(UsageError, match="4 ranks"):
        GlobalBatchSampler(23, 6, seed=0, world_size=4)
    with pytest.raises(UsageError, match="23 samples"):
        GlobalBatchSampler(23, 24, seed=0)


def test_a_cursor_of_another_data_set_is_refused():
    saved = GlobalBatchSampler(23, 6, seed=0).state_dict()
    with pytest.raises(UsageError, match="size 23"):
        GlobalBatchSampler(24, 6, seed=0).load_state_dict(saved)
    with pytest.raises(UsageError, match="seed 0"):
        GlobalBatchSampler(23, 6, seed=1).load_state_dict(saved)
