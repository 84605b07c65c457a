"""A remote tier that fails for a while, and what is done with it meanwhile."""

import errno
import threading

import pytest
import torch

from slurmspot.checkpoint import hdf5, steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import Disk
from slurmspot.checkpoint.ownership import Claim
from slurmspot.errors import CheckpointWriteError, UsageError

DEADLINE_S = 30


class Weights:
    def __init__(self):
        self.tensor = torch.zeros(20_000)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


class Attempt:
    def __init__(self, root, restart=0, *, disk=None, tiered=True):
        (root / "node").mkdir(exist_ok=True)
        self.commits = []
        self.weights = Weights()
        self.checkpointer = Checkpointer(
            root / "remote",
            {"weights": self.weights},
            claim=Claim(job_id="7", restart=restart),
            local=root / "node" if tiered else None,
            node="n",
            disk=disk or Disk(),
            emit=self._note,
        )

    def _note(self, event, **data):
        if event == "commit":
            self.commits.append((data["step"], data["tier"]))

    def save(self, step, trigger="period", **options):
        self.weights.tensor.fill_(step)
        self.checkpointer.save(step, trigger=trigger, meta={}, **options)
        self.checkpointer.wait()


class Failing(Disk):
    """Refuses to write as long as it is told to."""

    def __init__(self, fails):
        self.fails = fails

    def write(self, fd, memory, offset):
        if self.fails():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(fd, memory, offset)


@pytest.mark.parametrize("tiered", [True, False], ids=["two tiers", "one tier"])
def test_what_killed_saves_have_left_makes_room_for_the_next(tmp_path, tiered):
    left = steps.begin(tmp_path / "remote" / "step-00000001")
    attempt = Attempt(tmp_path, disk=Failing(left.exists), tiered=tiered)
    attempt.save(2)
    attempt.checkpointer.drain()
    if tiered:  # this drain has failed, and made room for the next
        assert "No space left" in str(attempt.checkpointer.failed())
        attempt.save(3)
        attempt.checkpointer.drain()
    assert attempt.checkpointer.failed() is None
    assert attempt.commits[-1] == (3 if tiered else 2, "remote")
    assert not left.exists()


def test_a_full_disk_without_leftovers_is_told_of_once(tmp_path):
    full = threading.Event()
    attempt = Attempt(tmp_path, disk=Failing(full.is_set), tiered=False)
    attempt.save(1)
    full.set()
    attempt.checkpointer.save(2, trigger="period", meta={})
    assert "No space left" in str(attempt.checkpointer.failed(within_s=DEADLINE_S))
    with pytest.raises(CheckpointWriteError, match="step 2"):
        attempt.checkpointer.wait()
    full.clear()
    attempt.save(3)
    assert attempt.checkpointer.failed() is None
    assert attempt.commits == [(1, "remote"), (3, "remote")]


def test_the_drain_of_a_step_spares_the_final_save_of_the_same_step(tmp_path, monkeypatch):
    """The drain is past the point where it could be given up, and ends while that is written."""
    committing, writing, drained = (threading.Event() for _ in range(3))
    real = steps.commit

    def commit(*args, **options):
        if threading.current_thread().name == "slurmspot-drain":
            committing.set()
            assert writing.wait(DEADLINE_S)
        real(*args, **options)

    class Slow(Disk):
        def write(self, fd, memory, offset):
            if committing.is_set():  # the final save
                writing.set()
                assert drained.wait(DEADLINE_S)
            return super().write(fd, memory, offset)

    monkeypatch.setattr(steps, "commit", commit)
    attempt = Attempt(tmp_path, disk=Slow())
    note = attempt.checkpointer._local._arrived

    def arrived(*args):
        note(*args)
        drained.set()

    attempt.checkpointer._local._arrived = arrived
    attempt.save(5)
    assert committing.wait(DEADLINE_S)
    attempt.save(5, trigger="final", blocking=True)
    assert list(steps.committed(tmp_path / "remote")) == [5]


@pytest.mark.parametrize("leftovers", [False, True], ids=["alone", "with leftovers"])
def test_a_notice_goes_to_the_local_tier_if_the_remote_one_refuses_it(tmp_path, leftovers):
    full = threading.Event()
    attempt = Attempt(tmp_path, disk=Failing(full.is_set))
    attempt.save(1)
    attempt.checkpointer.drain()
    if leftovers:  # to remove them does not help
        attempt.checkpointer._stale.add(steps.begin(tmp_path / "remote" / "step-00000001"))
    full.set()
    attempt.save(10, trigger="notice", within_s=1e6)  # time enough for the remote tier
    assert attempt.commits[-1] == (10, "local")
    attempt.checkpointer.close()
    assert Attempt(tmp_path, 1).checkpointer.restore().step == 10


def test_a_restore_makes_room_for_what_is_on_the_nodes(tmp_path):
    before = Attempt(tmp_path, disk=Failing(lambda: True))
    before.save(5)
    before.checkpointer.close()
    left = steps.begin(tmp_path / "remote" / "step-00000001")
    after = Attempt(tmp_path, 1, disk=Failing(left.exists))
    assert after.checkpointer.restore().step == 5
    assert after.weights.tensor[0] == 5
    assert not left.exists()


def test_a_full_local_disk_keeps_the_newest_steps(tmp_path, monkeypatch):
    """The remote tier takes nothing, so that all of them are kept as long as there is room."""
    real = hdf5.write

    def write(path, *args):
        if len(list((tmp_path / "node").glob("*/*/step-????????"))) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args)

    monkeypatch.setattr(hdf5, "write", write)
    attempt = Attempt(tmp_path, disk=Failing(lambda: True))
    for step in range(1, 8):
        attempt.save(step)
        attempt.checkpointer.drain()
    assert attempt.commits == [(step, "local") for step in range(1, 8)]
    kept = {path.name for path in (tmp_path / "node").glob("*/*/step-????????")}
    assert {"step-00000006", "step-00000007"} <= kept


def test_a_local_tier_needs_a_claim(tmp_path):
    with pytest.raises(UsageError, match="claim"):
        Checkpointer(tmp_path, {"weights": Weights()}, local=tmp_path)
