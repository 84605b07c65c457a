"""Forks savers on two tiers that are killed at every change they make to either disk.

Run as ``python killed_drainer.py FOLDER [TRIALS [SEED]]``. After each kill two ways to go on are
tried: on the same node, and on one whose disk is empty. Neither may lose what was promised on its
tier. Then one run is killed at TRIALS random moments.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import copied_run
from killed_saver import Weights, die_at, fork, was_killed

from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.verify import verify

SAVES = 3


def attempt(folder, restart, emit=lambda *_, **__: None):
    weights = Weights()
    checkpointer = Checkpointer(
        folder / "remote",
        {"weights": weights},
        keep=2,
        claim=Claim(job_id="7", restart=restart),
        local=folder / "node",
        node="n",
        emit=emit,
    )
    return weights, checkpointer


def noting(folder):
    """Notes what is promised on which tier."""

    def emit(event, step=None, tier=None, **_):
        if event == "commit":
            (folder / f"promised-{tier}").write_text(str(step))

    return emit


def save_on(folder):
    """Save some steps, the last one on a notice."""
    weights, checkpointer = attempt(folder, 0, noting(folder))
    for step in range(1, SAVES + 1):
        weights.step = step
        weights.tensor.fill_(step)
        if step < SAVES:
            checkpointer.save(step, trigger="period", meta={})
        else:
            checkpointer.save(step, trigger="notice", meta={}, within_s=0)
        checkpointer.wait()
    checkpointer.drain()


def promised(folder, tier):
    path = folder / f"promised-{tier}"
    text = path.read_text() if path.exists() else ""
    return int(text) if text else 0


def resumed(folder, restart=1):
    """(step, tier) that the next attempt goes on from."""
    weights, checkpointer = attempt(folder, restart)
    restored = checkpointer.restore()
    if restored is None:
        return 0, None
    assert restored.step == weights.step
    assert not restored.rejected
    return restored.step, restored.tier


def check(trial):
    """Whether the local tier made the difference."""
    moved = trial.with_name(f"{trial.name}-moved")
    copied_run.copy(trial, moved)
    shutil.rmtree(moved / "node")
    (moved / "node").mkdir()
    step, _ = resumed(moved)
    assert step >= promised(moved, "remote"), (step, trial)
    step, tier = resumed(trial)
    assert step >= max(promised(trial, "local"), promised(trial, "remote")), (step, trial)
    for folder in (trial, moved):
        if (folder / "remote").exists():
            assert all(report.intact for report in verify(folder / "remote"))
        shutil.rmtree(folder)
    return tier == "local"


def die_saving(root):
    from_local = 0
    for count in itertools.count():
        trial = root / f"at-{count}"
        (trial / "node").mkdir(parents=True)

        def work(trial=trial, count=count):
            die_at(count)
            save_on(trial)

        killed = was_killed(fork(work))
        from_local += check(trial)
        if not killed:
            return count, from_local
    return None


def die_promoting(root):
    """Kill the attempt that brings a local step to the remote tier, at each of its changes."""
    origin = root / "origin"
    (origin / "node").mkdir(parents=True)
    save_on(origin)
    for path in (origin / "remote").glob("step-*"):
        shutil.rmtree(path)
    for count in itertools.count():
        trial = root / f"promoting-{count}"
        copied_run.copy(origin, trial)
        (trial / "promised-remote").unlink()

        def work(trial=trial, count=count):
            die_at(count)
            resumed(trial)

        killed = was_killed(fork(work))
        step, _ = resumed(trial)
        assert step == SAVES
        assert all(report.intact for report in verify(trial / "remote"))
        shutil.rmtree(trial)
        if not killed:
            return count
    return None


def die_anywhere(folder, trials, seed):
    """Kill attempt after attempt of one run at a random moment; how often it began anew from disk.

    What the next one goes on from is never less than what was promised before.
    """
    (folder / "node").mkdir(parents=True)
    generator = random.Random(seed)
    from_local = 0

    def work(restart, saves=1000):
        weights, checkpointer = attempt(folder, restart, noting(folder))
        checkpointer.restore()
        for _ in range(saves):
            weights.step += 1
            weights.tensor.fill_(weights.step)
            checkpointer.save(weights.step, trigger="period", meta={})
            checkpointer.wait()

    begin = time.monotonic()
    assert not was_killed(fork(lambda: work(0, 5)))
    usual_s = time.monotonic() - begin  # on this machine, as busy as it is
    for trial in range(trials):
        child = fork(lambda restart=2 * trial + 2: work(restart))
        time.sleep(generator.uniform(0, usual_s))
        os.kill(child, signal.SIGKILL)
        assert was_killed(child)
        least = max(promised(folder, "local"), promised(folder, "remote"))
        step, tier = resumed(folder, 2 * trial + 3)
        assert step >= least, (step, least)
        from_local += tier == "local"
    return from_local, step


if __name__ == "__main__":
    root = Path(sys.argv[1])
    trials, seed = int(sys.argv[2]) if len(sys.argv) > 2 else 20, int((sys.argv[3:] or [1])[0])
    saving, from_local = die_saving(root)
    promoting = die_promoting(root)
    anywhere = die_anywhere(root / "anywhere", trials, seed)
    json.dump([saving, promoting, from_local, anywhere], sys.stdout)
