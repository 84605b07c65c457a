"""Forks an attempt that freezes before any change it makes to a disk, and one that takes its run.

Run as ``python paused_owner.py FOLDER [EVERY]``, to try every EVERY-th change. The frozen one
wakes up while the other trains on, on the same node: it must change nothing any more, and both
attempts at once must never own the run.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from killed_saver import change_hook, fork

from slurmspot.checkpoint import steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.verify import verify
from slurmspot.errors import FencedError

FENCED = 3


class Branch:
    """A state that tells which attempt has made which step."""

    def __init__(self, restart):
        self.restart = restart
        self.made = torch.full((10_000,), -1)

    def make(self, step):
        self.made[step] = self.restart

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"].clone()


class Attempt:
    """One attempt of the run in ``folder``."""

    def __init__(self, folder, restart, *, tiered):
        self.branch = Branch(restart)
        self.checkpointer = Checkpointer(
            folder / "remote",
            {"branch": self.branch},
            keep=2,
            claim=Claim(job_id="7", restart=restart),
            local=folder / "node" if tiered else None,
            node="n",
        )
        restored = self.checkpointer.restore()
        self.step = restored.step if restored else 0

    def save(self, count, stride=1):
        for _ in range(count):
            self.step += stride
            self.branch.make(self.step)
            self.checkpointer.save(self.step, trigger="period", meta={})
            self.checkpointer.wait()
            self.checkpointer.drain()
            failure = self.checkpointer.failed()
            if failure is not None:
                raise failure


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def freeze_at(count):
    """Freeze before the count-th change of a disk."""
    left = itertools.count(count, -1)

    def hook(_function, _args):
        if next(left) == 0:
            freeze()

    change_hook(hook)


def fenced(work):
    """Do ``work``; end the process in a way of its own if it has lost the run."""
    try:
        work()
    except FencedError:
        os._exit(FENCED)


def is_frozen(child):
    """Wait until a child freezes, or ends well or fenced."""
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return True
    assert os.WIFEXITED(status), status
    assert os.WEXITSTATUS(status) in {0, FENCED}, status
    return False


def ends_with(child):
    """The exit code of a child that has been frozen."""
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), status
    return os.WEXITSTATUS(status)


def committed(folder):
    """Every byte of every checkpoint, and of what the second attempt has on its node."""
    paths = [*folder.glob("remote/step-*/*"), *folder.glob("node/*/owner-00000002-*/*/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def survive(folder, count, *, tiered):
    """Whether the first attempt has frozen at its count-th change, and how it ended then."""
    (folder / "node").mkdir(parents=True)

    def zombie():
        freeze_at(count)
        fenced(lambda: Attempt(folder, 0, tiered=tiered).save(5, stride=2))

    def living():
        attempt = Attempt(folder, 1, tiered=tiered)
        attempt.save(1)
        freeze()
        attempt.save(2)

    first = fork(zombie)
    frozen = is_frozen(first)
    second = fork(living)
    assert is_frozen(second), count
    before = committed(folder)
    had_all = 10 in steps.committed(folder / "remote")
    code = ends_with(first) if frozen else None
    assert code in ({0, FENCED} if had_all else {FENCED}) or not frozen, (count, code)
    assert committed(folder) == before, count
    assert ends_with(second) == 0, count
    newest, older = steps.committed(folder / "remote").values()
    assert all(report.intact for report in verify(folder / "remote"))
    last = Attempt(folder, 2, tiered=tiered)
    made = [restart for restart in last.branch.made.tolist() if restart >= 0]
    assert made == sorted(made), made
    assert made[-3:] == [1, 1, 1], made
    assert steps.step_of(newest) == steps.step_of(older) + 1 == last.step
    assert len(steps.owners(folder / "remote")) == 1
    shutil.rmtree(folder)
    return frozen, code


def freeze_everywhere(root, every, *, tiered):
    """At how many changes an attempt froze; at how many of them it was fenced then."""
    codes = []
    for count in itertools.count(0, every):
        frozen, code = survive(root / str(count), count, tiered=tiered)
        if not frozen:
            return len(codes), codes.count(FENCED)
        codes.append(code)
    return None


def freeze_opening(root):
    """An attempt that freezes while it opens the run, before and after another does."""
    results = []
    for late, other in ((0, 1), (1, 0)):
        for count in itertools.count():
            folder = root / f"{late}-{count}"
            Claim(job_id="6", restart=0).take(folder)

            def open_late(folder=folder, count=count, late=late):
                freeze_at(count)
                fenced(lambda: Claim(job_id="7", restart=late).take(folder).check())

            def open_and_wait(folder=folder, other=other):
                def work():
                    owner = Claim(job_id="7", restart=other).take(folder)
                    freeze()
                    owner.check()
                    owner.desk.joinpath("work").mkdir()

                fenced(work)

            first = fork(open_late)
            if not is_frozen(first):
                results.append(count)
                break
            second = fork(open_and_wait)
            second_frozen = is_frozen(second)
            codes = {late: ends_with(first)}
            codes[other] = ends_with(second) if second_frozen else FENCED
            assert codes == {0: FENCED, 1: 0}, (late, count, codes)
            (desk,) = steps.owners(folder)
            assert desk.name.endswith("-1-7")
            shutil.rmtree(folder)
    return results


if __name__ == "__main__":
    root = Path(sys.argv[1])
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    answer = {
        "tiered": freeze_everywhere(root / "tiered", every, tiered=True),
        "remote": freeze_everywhere(root / "remote", every, tiered=False),
        "opening": freeze_opening(root / "opening"),
    }
    json.dump(answer, sys.stdout)
