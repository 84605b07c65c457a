"""Disks that are full, over their quota, or slow."""

import errno
import os
import threading
import time

import pytest
from run_script import answer_of
from weights import Weights

from slurmspot.checkpoint import steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import Disk
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.verify import problems_of
from slurmspot.errors import CheckpointWriteError

DEADLINE_S = 30


class Run:
    """A checkpointer on one tier or two; ``log`` has the events."""

    def __init__(self, root, disk, *, tiered=False):
        self.log = []
        self.root = root
        self.remote = root / "remote"
        if tiered:
            (root / "node").mkdir()
        self.checkpointer = Checkpointer(
            self.remote,
            {"weights": Weights(100_000)},
            claim=Claim(job_id="7", restart=0),
            local=root / "node" if tiered else None,
            node="n",
            disk=disk,
            emit=lambda event, **data: self.log.append((event, data)),
        )

    def save(self, step, trigger="period", **options):
        return self.checkpointer.save(step, trigger=trigger, meta={}, **options)

    def at(self, event, step):
        """Where in the log an event stands."""
        found = [
            i for i, (one, data) in enumerate(self.log) if (one, data["step"]) == (event, step)
        ]
        return found[0]

    def commits(self):
        return [(data["step"], data["tier"]) for event, data in self.log if event == "commit"]

    def unfinished(self):
        return list(self.root.rglob("*.partial-*"))


class Refusing(Disk):
    """Takes what is written up to a limit."""

    def __init__(self, code):
        self.code = code
        self.refuses = False

    def write(self, fd, memory, offset):
        if self.refuses:
            super().write(fd, [memory[0][: len(memory[0]) // 2]], offset)
            raise OSError(self.code, os.strerror(self.code))
        return super().write(fd, memory, offset)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_no_more_costs_a_checkpoint_and_no_other(tmp_path, code):
    disk = Refusing(code)
    run = Run(tmp_path, disk)
    run.save(1)
    run.checkpointer.wait()
    disk.refuses = True
    run.save(2)
    with pytest.raises(CheckpointWriteError, match="step 2 could not be saved") as caught:
        run.checkpointer.wait()
    assert os.strerror(code) in caught.value.why
    assert list(steps.committed(run.remote)) == [1]
    assert not run.unfinished()
    assert run.checkpointer.restore().step == 1
    disk.refuses = False
    run.save(3)
    run.checkpointer.wait()
    assert list(steps.committed(run.remote)) == [3, 1]
    assert all(not problems_of(path) for path in steps.committed(run.remote).values())


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_a_remote_tier_that_takes_no_more_leaves_the_step_on_the_node(tmp_path, code):
    disk = Refusing(code)
    disk.refuses = True
    run = Run(tmp_path, disk, tiered=True)
    run.save(1)
    run.checkpointer.wait()
    run.checkpointer.drain()
    failure = run.checkpointer.failed()
    assert os.strerror(code) in failure.why
    assert run.commits() == [(1, "local")]
    assert not run.unfinished()
    disk.refuses = False
    run.save(2)
    run.checkpointer.wait()
    run.checkpointer.drain()
    assert run.commits() == [(1, "local"), (2, "local"), (2, "remote")]


def test_real_file_systems_that_are_full(tmp_path):
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    under = ["unshare", *user, "--mount"]
    answer = answer_of("full_disk.py", tmp_path, under=under, timeout_s=120)
    assert answer["one_tier"] == 2
    assert "No space left" in answer["local_tier"]
    assert "No space left" in answer["remote_tier"]


class Gate(Disk):
    """Takes nothing until it is opened."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()

    def write(self, fd, memory, offset):
        self.reached.set()
        assert self.opened.wait(DEADLINE_S)
        return super().write(fd, memory, offset)


def test_a_save_waits_for_a_disk_that_is_slower_than_training(tmp_path):
    gate = Gate()
    run = Run(tmp_path, gate)
    run.save(1)
    assert gate.reached.wait(DEADLINE_S)
    held = run.checkpointer.staging_bytes
    assert held >= run.checkpointer._parts["weights"].thing.tensor.nbytes
    assert not run.save(2, may_skip=True)
    returned = threading.Event()
    saver = threading.Thread(target=lambda: (run.save(3), returned.set()))
    saver.start()
    assert not returned.wait(0.3)  # it cannot, as long as the first is not written
    gate.opened.set()
    saver.join(DEADLINE_S)
    assert returned.is_set()
    run.checkpointer.wait()
    assert run.at("commit", 1) < run.at("snapshot_end", 3)
    assert run.checkpointer.staging_bytes == held
    assert run.commits() == [(1, "remote"), (3, "remote")]


def test_a_slow_remote_tier_takes_no_memory_however_many_steps_wait_for_it(tmp_path):
    gate = Gate()
    run = Run(tmp_path, gate, tiered=True)
    run.save(1)
    assert gate.reached.wait(DEADLINE_S)
    held, threads = run.checkpointer.staging_bytes, threading.active_count()
    for step in range(2, 12):
        run.save(step)
        run.checkpointer.wait()
    assert run.checkpointer.staging_bytes == held
    assert threading.active_count() <= threads
    gate.opened.set()
    run.checkpointer.drain()
    assert [step for step, tier in run.commits() if tier == "remote"] == [1, 11]


class Slow(Disk):
    """Takes a third of a second for anything."""

    def write(self, fd, memory, offset):
        time.sleep(1 / 3)
        return super().write(fd, memory, offset)


def test_a_notice_goes_where_a_measured_slow_disk_lets_it(tmp_path):
    run = Run(tmp_path, Slow(), tiered=True)
    run.save(1)
    run.checkpointer.wait()
    run.checkpointer.drain()
    run.save(2, trigger="notice", within_s=0.6)  # less than twice what the disk has taken
    run.checkpointer.wait()
    assert run.commits()[2:3] == [(2, "local")]
    run.checkpointer.drain()
    run.save(3, trigger="notice", within_s=1e6)
    run.checkpointer.wait()
    assert [commit for commit in run.commits() if commit[0] == 3] == [(3, "remote")]
