"""Forks savers on two tiers that are killed at every change they make to either disk.

Run as ``python killed_drainer.py FOLDER``. After each kill two ways to go on are tried: on the
same node, and on one whose disk is empty. Neither may lose what was promised on its tier.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path

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


def save_on(folder):
    """Save some steps, the last one on a notice; note what is promised on which tier."""

    def emit(event, step=None, tier=None, **_):
        if event == "commit":
            (folder / f"promised-{tier}").write_text(str(step))

    weights, checkpointer = attempt(folder, 0, emit)
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


def resumed(folder):
    """(step, tier) that the next attempt goes on from."""
    weights, checkpointer = attempt(folder, 1)
    restored = checkpointer.restore()
    if restored is None:
        return 0, None
    assert restored.step == weights.step
    assert not restored.rejected
    return restored.step, restored.tier


def check(trial):
    """Whether the local tier made the difference."""
    moved = trial.with_name(f"{trial.name}-moved")
    shutil.copytree(trial, moved)
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
        shutil.copytree(origin, trial)
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


if __name__ == "__main__":
    root = Path(sys.argv[1])
    saving, from_local = die_saving(root)
    json.dump([saving, die_promoting(root), from_local], sys.stdout)
