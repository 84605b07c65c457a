"""Forks savers that are killed or race each other, and reports what they left behind.

Run as ``python killed_saver.py FOLDER [TRIALS [SEED]]``; imports once, forks for every trial.
Three ways to die: at the n-th change that a saver makes to the disk, for every n there is (half of
a write is done when it dies in one); at the n-th read of a restore; and at a random moment of it
all.
"""

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from slurmspot.checkpoint.checkpointer import Checkpointer

SIZE = 20_000
SAVES = 3


class Weights:
    """A state whose every number is the step, so that a mixture of two steps shows."""

    def __init__(self):
        self.step = 0
        self.tensor = torch.zeros(SIZE)

    def state_dict(self):
        return {"step": self.step, "tensor": self.tensor, "more": self.tensor[:10]}

    def load_state_dict(self, state):
        self.step, self.tensor = state["step"], state["tensor"].clone()
        assert set(state["tensor"].tolist()) == {float(self.step)}
        assert set(state["more"].tolist()) == {float(self.step)}


def fresh(folder):
    weights = Weights()
    return weights, Checkpointer(folder, {"weights": weights}, keep=2)


def restore(folder):
    weights, checkpointer = fresh(folder)
    restored = checkpointer.restore()
    assert restored is None or (restored.step == weights.step and not restored.rejected)
    return weights, checkpointer


def save_on(folder, saves, begin=restore):
    """Save ``saves`` further steps; tell the parent of each when it is durable."""
    weights, checkpointer = begin(folder)
    for _ in range(saves):
        weights.step += 1
        weights.tensor.fill_(weights.step)
        checkpointer.save(weights.step, trigger="period", meta={})
        checkpointer.wait()
        (folder / "promised").write_text(str(weights.step))


def change_hook(hook):
    """Call ``hook(function, args)`` before every change that this process makes to a disk."""

    def wrap(function):
        def changed(*args, **options):
            hook(function, args)
            return function(*args, **options)

        return changed

    for name in ("pwritev", "ftruncate", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, wrap(getattr(os, name)))


def die_at(count):
    """Make the count-th change of the disk the last thing this process does."""
    left = itertools.count(count, -1)
    real_pwritev = os.pwritev

    def hook(function, args):
        if next(left) == 0:
            if function is real_pwritev:
                fd, (data, *_), offset = args
                os.pwrite(fd, data[: len(data) // 8192 * 4096], offset)
            os.kill(os.getpid(), signal.SIGKILL)

    change_hook(hook)


def fork(work):
    """The process id of a child that does ``work`` and ends."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        work()
        code = 0
    finally:
        os._exit(code)
    return child


def was_killed(child):
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def step_after(folder, promised_before):
    """The step that a new attempt finds: never less than what was promised, never wrong."""
    promise = folder / "promised"
    text = promise.read_text() if promise.exists() else ""
    promised = int(text) if text else promised_before
    weights, _ = restore(folder)
    assert weights.step >= promised, (weights.step, promised)
    return weights.step


def die_everywhere(folder):
    for count in itertools.count():
        trial = folder / f"at-{count}"
        trial.mkdir()

        def work(trial=trial, count=count):
            die_at(count)
            save_on(trial, SAVES)

        killed = was_killed(fork(work))
        step_after(trial, 0)
        if not killed:
            return count
        save_on(trial, 1)  # and the next attempt can save
    return None


def die_reading(folder):
    """Kill a restore at each of its reads; the checkpoint is none the worse for it."""
    folder.mkdir()
    save_on(folder, 1)
    for count in itertools.count():

        def work(count=count):
            left = itertools.count(count, -1)
            real = os.preadv

            def read(*args):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            os.preadv = read
            restore(folder)

        killed = was_killed(fork(work))
        assert step_after(folder, 1) == 1
        if not killed:
            return count
    return None


def die_anywhere(folder, trials, seed):
    folder.mkdir()
    generator = random.Random(seed)
    begin = time.monotonic()
    assert not was_killed(fork(lambda: save_on(folder, 2 * SAVES)))
    usual_s = time.monotonic() - begin  # on this machine, as busy as it is
    deaths, step = 0, step_after(folder, 0)
    for _ in range(trials):
        child = fork(lambda: save_on(folder, 100))
        time.sleep(generator.uniform(0, usual_s))
        os.kill(child, signal.SIGKILL)
        deaths += was_killed(child)
        step = step_after(folder, step)
    save_on(folder, 1)
    return deaths, step, sorted(path.name for path in folder.glob("step-*"))


def race(folder, writers):
    """Several processes save the same steps at once; whether all of them were content.

    Without a claim, who comes later takes what an earlier one has begun for left over: none begins
    before all have looked.
    """
    folder.mkdir()
    all_there = multiprocessing.get_context("fork").Barrier(writers)

    def begin(folder):
        found = fresh(folder)
        all_there.wait(60)
        return found

    children = [fork(lambda: save_on(folder, 15, begin)) for _ in range(writers)]
    killed = [was_killed(child) for child in children]
    assert step_after(folder, 15) == 15
    return not any(killed)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    everywhere = die_everywhere(root)
    assert die_reading(root / "reading") > 0
    trials, seed = int(sys.argv[2]) if len(sys.argv) > 2 else 25, int((sys.argv[3:] or [1])[0])
    anywhere, last_step, left = die_anywhere(root / "anywhere", trials, seed)
    content = race(root / "race", writers=3)
    json.dump([everywhere, anywhere, last_step, left, content], sys.stdout)
