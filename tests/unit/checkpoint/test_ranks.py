from functools import partial

import pytest
import rank_scenarios as scenario
import torch
from rank_pool import RankPool

from slurmspot.checkpoint import manifest, steps
from slurmspot.checkpoint.verify import verify


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(3)
    yield pool
    pool.close()


def test_ddp_state_moves_from_two_ranks_to_one_and_to_three(pool, tmp_path):
    saved = pool.run(2, scenario.save, tmp_path, "ddp")
    assert verify(tmp_path)[0].intact
    one = pool.run(1, scenario.restore, tmp_path, "plain")
    three = pool.run(3, scenario.restore, tmp_path, "ddp")
    same = pool.run(2, scenario.restore, tmp_path, "ddp")
    first_digest, first_weights, _ = saved[0]
    for digest, weights, _, restored in one + three + same:
        assert digest == first_digest
        assert weights == first_weights
        assert (restored.step, restored.meta) == (3, {"world": 2})
    # Random states: each rank's own again; nothing for a rank that did not exist.
    assert [answer[2] for answer in same] == [answer[2] for answer in saved]
    assert [answer[2] for answer in three[:2]] == [answer[2] for answer in saved]
    assert [answer[3].fresh for answer in three] == [(), (), ("random",)]
    assert len({answer[2][0] for answer in three}) == 3
    again = pool.run(3, scenario.restore, tmp_path, "ddp")
    assert again[2][2] == three[2][2]


def test_a_plain_checkpoint_loads_into_ddp(pool, tmp_path):
    saved = pool.run(1, scenario.save, tmp_path, "plain")
    for answer in pool.run(2, scenario.restore, tmp_path, "ddp"):
        assert answer[:2] == saved[0][:2]


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3)])
def test_a_step_may_be_saved_again_by_other_ranks_unless_it_is_seen_to_differ(
    pool, tmp_path, kind, size
):
    pool.run(2, scenario.save, tmp_path, kind)
    same = pool.run(size, partial(scenario.save_again, moved=False), tmp_path, kind)
    assert set(same) == {""}
    if size == 2:
        other = pool.run(2, partial(scenario.save_again, moved=True), tmp_path, kind)
        assert all("another state of model/" in problem for problem in other)
    assert pool.run(size, scenario.restore, tmp_path, kind)[0][3].step == 3


@pytest.mark.parametrize("saving", [1, 2, 3])
def test_fsdp_state_reshards_with_its_optimizer(pool, tmp_path, saving):
    saved = pool.run(saving, scenario.save, tmp_path, "fsdp")
    known = manifest.read(tmp_path / "step-00000003")
    assert known.objects["model"].scope == "sharded"
    assert len(known.files) == saving
    held = [sum(one.size_bytes for one in file.datasets) for file in known.files]
    assert min(held) > sum(held) / saving / 2  # each rank writes its share
    assert verify(tmp_path)[0].intact
    for size in (1, 2, 3):
        for digest, weights, _, _ in pool.run(size, scenario.restore, tmp_path, "fsdp"):
            assert digest == saved[0][0]
            assert weights == saved[0][1]
    for digest, weights, on_pages in pool.run(2, scenario.restore_on_pages, tmp_path, "fsdp"):
        assert (digest, weights) == saved[0][:2]
        assert on_pages > 3 * 6  # parameters, each with its two moments, are sharded
    # The same values arrive in a model that is not sharded at all.
    size, kind = (1, "plain") if saving > 1 else (2, "ddp")
    assert pool.run(size, scenario.restore, tmp_path, kind)[0][:2] == saved[0][:2]


@pytest.mark.parametrize("saving", [1, 2, 3])
def test_any_kind_of_model_loads_into_any_other(pool, tmp_path, saving):
    for kind in ("plain", "ddp", "fsdp") if saving == 1 else ("ddp", "fsdp"):
        folder = tmp_path / kind
        saved = pool.run(saving, scenario.save, folder, kind)
        for size, other in ((1, "plain"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp")):
            for digest, weights, _, _ in pool.run(size, scenario.restore, folder, other):
                assert (digest, weights) == saved[0][:2]


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (3, 1)])
def test_a_sharded_tensor_of_any_object_reshards(pool, tmp_path, saving, loading):
    whole = pool.run(saving, scenario.sharded_object, tmp_path, True)[0][0]
    answers = pool.run(loading, scenario.sharded_object, tmp_path, False)
    assert [back for back, _ in answers] == [whole] * loading
    assert sum(rows for _, rows in answers) == 7  # and no rank has had more than its rows


def test_sharded_parameters_are_copied_while_training_goes_on(pool, tmp_path):
    (at_save, late), other = pool.run(2, scenario.familiar_fsdp, tmp_path)
    assert other == (at_save, late)
    assert len(late) == 6
    assert pool.run(2, scenario.restore, tmp_path, "fsdp")[0][0] == at_save


def test_ranks_skip_a_save_alike_though_only_one_of_them_is_busy(pool, tmp_path):
    answers = pool.run(3, scenario.skip_alike, tmp_path)
    assert [begun for begun, _ in answers] == [[True, False, True]] * 3
    assert [busy for _, busy in answers] == [True, False, False]
    assert list(steps.committed(tmp_path)) == [3, 1]


def test_a_process_may_make_one_checkpointer_after_the_other(pool, tmp_path):
    pool.run(2, scenario.one_after_the_other, tmp_path, 3)
    assert steps.committed(tmp_path).keys() & {1, 2, 3, 101, 102, 103}


def test_resuming_twice_gives_the_same_end(pool, tmp_path):
    pool.run(2, scenario.save, tmp_path, "fsdp")
    first = pool.run(2, scenario.train_on, tmp_path, "fsdp")
    assert pool.run(2, scenario.train_on, tmp_path, "fsdp") == first


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_throwaway_step_leaves_no_trace(pool, tmp_path, kind):
    assert pool.run(2, scenario.hold_and_put_back, tmp_path, kind) == [(True, True, True)] * 2


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_all(pool, tmp_path, full_rank):
    answers = pool.run(2, scenario.disk_full_on_one_rank, tmp_path, full_rank)
    assert answers[0] == answers[1]
    (first, second, third), failures = answers[0]
    assert (first, third) == (None, None)
    assert second[0] == "CheckpointWriteError"
    assert f"rank {full_rank}" in second[1]
    assert failures == 1
    assert [report.step for report in verify(tmp_path) if report.intact] == [3, 1]
    assert not steps.partials(tmp_path)


def test_an_error_on_one_rank_is_heard_by_all(pool, tmp_path):
    answers = pool.run(3, scenario.save_what_one_rank_cannot, tmp_path)
    assert len(set(answers)) == 1
    assert "holder/rank-00002/value" in answers[0][1]


def test_replicas_that_disagree_are_not_reduced_to_one_of_them(pool, tmp_path):
    answers = pool.run(2, scenario.save_holder, tmp_path, False)
    assert answers[0] == answers[1]
    assert "holder differs between rank 0 and rank 1" in answers[0][1]
    assert not steps.committed(tmp_path)


def test_a_users_per_rank_object_comes_back_and_does_not_reshard(pool, tmp_path):
    assert pool.run(2, scenario.save_holder, tmp_path, True) == [None, None]
    assert pool.run(2, scenario.restore_holder, tmp_path) == [(None, 0), (None, 1)]
    for size in (1, 3):
        for error, rank in pool.run(size, scenario.restore_holder, tmp_path):
            assert error[0] == "MismatchedCheckpointError"
            assert f"from 2 to {size} ranks" in error[1]
            assert rank is None


def test_a_mismatch_on_one_rank_loads_nothing_on_any(pool, tmp_path):
    pool.run(1, scenario.save_linear, tmp_path)
    answers = pool.run(2, scenario.restore_another_model_on_one_rank, tmp_path)
    for error, unchanged in answers:
        assert error[0] == "MismatchedCheckpointError"
        assert "saved float32 [2, 3], expected float32 [4, 3]" in error[1]
        assert unchanged


def test_replicas_with_other_parameters_are_refused(pool, tmp_path):
    """Unseeded models differ between ranks without DDP: one copy cannot stand for both."""
    (error, other) = pool.run(2, scenario.save_linear, tmp_path)
    assert error == other
    assert "model differs between" in error[1]


@pytest.mark.parametrize(("saved", "loaded"), [("ddp", "ddp"), ("fsdp", "fsdp")])
def test_plain_dcp_at_another_world_size(pool, tmp_path, saved, loaded):
    weights = pool.run(2, scenario.dcp_save, tmp_path / "c", saved)[0]
    assert verify(tmp_path / "c")[0].intact
    for size in (1, 2, 3):
        for back, note in pool.run(size, scenario.dcp_load, tmp_path / "c", loaded):
            assert back == weights
            assert note == {"lr": 0.1, "shape": (1, 2)}


def test_saving_in_the_background_while_ddp_trains(pool, tmp_path):
    (seen, other) = pool.run(2, scenario.train_while_saving, tmp_path, 8)
    assert seen.keys() == other.keys() == set(range(1, 9))
    assert [(one.step, one.intact) for one in verify(tmp_path)] == [(8, True), (7, True)]
    restored = pool.run(2, scenario.restore, tmp_path, "ddp")
    assert restored[0][0] == seen[8]
    assert torch.tensor(restored[0][1]).isfinite().all()


def test_ranks_that_save_different_steps_are_refused(pool, tmp_path):
    for told in pool.run(2, scenario.save_other_steps, tmp_path):
        assert "rank 0 saves step 10, and rank 1 step 11" in told
    assert not steps.committed(tmp_path)


@pytest.mark.parametrize(
    "period",
    [{"SLURMSPOT_PERIOD_STEPS": "4"}, {"SLURMSPOT_PERIOD_STEPS": "0", "SLURMSPOT_PERIOD_S": "0.1"}],
    ids=["steps", "seconds"],
)
def test_ranks_that_learn_of_a_failed_save_apart_stay_together(pool, tmp_path, period):
    (told, other) = pool.run(2, scenario.learn_of_a_failure_apart, tmp_path, period)
    assert told == other
    assert max(told) == 14
    for step, saved in told.items():
        assert saved == [step, step]


def test_a_local_tier_on_some_ranks_only_is_refused_by_all(pool, tmp_path):
    for told in pool.run(2, scenario.tier_on_one_rank, tmp_path):
        assert "some ranks have a local tier" in told
