"""One attempt owns a run; what an earlier one still has in hand comes to nothing."""

import os
import shutil

import pytest
from run_script import answer_of

from slurmspot.checkpoint import manifest, steps
from slurmspot.checkpoint.manifest import Manifest
from slurmspot.checkpoint.ownership import Claim
from slurmspot.errors import CheckpointWriteError, FencedError


def take(folder, restart=0, job_id="7"):
    return Claim(job_id=job_id, restart=restart).take(folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_has_one_desk_and_keeps_its_name(tmp_path):
    folder = tmp_path / "deep" / "checkpoints"
    first = take(folder, job_id="7_1")
    second = take(folder, restart=3, job_id="33+1/x")
    assert (second.turn, second.run) == (first.turn + 1, first.run)
    assert names(folder) == [second.desk.name]
    assert take(folder, job_id="8").run == first.run
    assert take(tmp_path / "other").run != first.run


def test_what_the_former_owner_has_left_is_moved_to_the_next(tmp_path):
    first = take(tmp_path)
    partial = steps.begin(tmp_path / "step-00000001", first.desk)
    (partial / "rank-00000.h5").write_text("x")
    second = take(tmp_path, 1)
    assert names(second.desk) == [partial.name]
    assert (second.desk / partial.name / "rank-00000.h5").read_text() == "x"


def test_requests_that_hung_on_open_folders_come_to_nothing(tmp_path):
    """As a file server sees them: by handle, so that no path needs to be found any more."""
    owner = take(tmp_path)
    partial = steps.begin(tmp_path / "step-00000002", owner.desk)
    (tmp_path / "step-00000001").mkdir()
    desk = os.open(owner.desk, os.O_RDONLY)
    folder = os.open(tmp_path, os.O_RDONLY)
    take(tmp_path, 1)
    with pytest.raises(FileNotFoundError):  # to commit
        os.rename(partial.name, "step-00000002", src_dir_fd=desk, dst_dir_fd=folder)
    with pytest.raises(FileNotFoundError):  # to remove
        os.rename("step-00000001", "gone", src_dir_fd=folder, dst_dir_fd=desk)
    with pytest.raises(FileNotFoundError):  # to begin
        os.mkdir("again", dir_fd=desk)
    assert steps.committed(tmp_path).keys() == {1}
    os.close(desk)
    os.close(folder)


def test_who_has_lost_the_run_is_told_to_whom(tmp_path):
    first = take(tmp_path, 0)
    first.check()
    take(tmp_path, 1)
    with pytest.raises(FencedError) as caught:
        first.check()
    assert caught.value.why == "attempt 7-1 has taken it over"


def test_of_two_starts_of_a_job_the_later_wins_and_of_two_jobs_the_last(tmp_path):
    third = take(tmp_path, 3)
    with pytest.raises(FencedError, match="no longer owns"):
        take(tmp_path, 2)
    third.check()
    assert names(tmp_path) == [third.desk.name]
    again = take(tmp_path, 3)  # the same start may, and takes over
    with pytest.raises(FencedError):
        third.check()
    other = take(tmp_path, 0, job_id="5")
    with pytest.raises(FencedError):
        again.check()
    other.check()


def test_an_earlier_start_that_is_just_opening_does_not_fence_the_owner(tmp_path):
    owner = take(tmp_path, 1)
    (tmp_path / owner.desk.name.replace("-00000001-", "-00000002-").replace("-1-7", "-0-7")).mkdir()
    owner.check()
    later = take(tmp_path, 2)
    assert later.turn == 3
    assert names(tmp_path) == [later.desk.name]


def test_a_desk_that_somebody_removed_is_missed_and_nobody_is_blamed(tmp_path):
    owner = take(tmp_path)
    other = take(tmp_path / "other")
    steps.begin(tmp_path / "other" / "step-00000001", other.desk)
    owner.desk.rmdir()
    owner.check()
    with pytest.raises(CheckpointWriteError, match="is gone"):
        owner.dismiss(other)


def test_a_cluster_that_numbers_its_jobs_anew_can_go_on(tmp_path):
    former = take(tmp_path, 3)
    with pytest.raises(FencedError, match="numbers its jobs anew") as told:
        take(tmp_path, 0)
    assert str(former.desk) in told.value.fix
    shutil.rmtree(former.desk)
    take(tmp_path, 0).check()


def test_other_names_are_nobodys_desk(tmp_path):
    for name in ("owner-1", "owner-00000009-x-y-0-7", "owner-00000009.partial-1"):
        (tmp_path / name).mkdir()
    assert take(tmp_path).turn == 1


def test_a_turn_is_above_those_of_the_checkpoints_too(tmp_path):
    """A desk can be lost, or checkpoints alone be copied."""
    for step, turn in ((1, 8), (2, 3)):
        folder = tmp_path / steps.step_name(step)
        folder.mkdir()
        known = Manifest(step=step, world_size=1, files=(), metadata={"turn": turn})
        (folder / manifest.NAME).write_bytes(manifest.dump(known))
    (tmp_path / "step-00000003").mkdir()
    assert take(tmp_path).turn == 9
    assert take(tmp_path, 1).turn == 10


def test_what_is_no_folder_is_nobodys_desk(tmp_path):
    for number, name in enumerate(("file", "link", "loop")):
        path = tmp_path / f"owner-0000000{number}-aaaaaaaa-aaaaaaaaaaaaaaaa-0-{name}"
        if name == "file":
            path.touch()
        else:
            path.symlink_to(tmp_path if name == "link" else path)
    owner = take(tmp_path)
    owner.check()
    assert owner.turn == 1


def test_an_attempt_that_freezes_anywhere_changes_nothing_once_another_has_the_run(memory):
    answer = answer_of("paused_owner.py", memory, 7)
    for kind, least in (("tiered", 20), ("remote", 10)):
        frozen, fenced = answer[kind]
        assert frozen > least
        assert fenced > frozen / 2  # the others had committed all they wanted to: see survive
    assert min(answer["opening"]) >= 4
