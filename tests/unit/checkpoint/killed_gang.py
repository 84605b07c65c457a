"""Forks two ranks on two nodes, kills one at any change of a disk, and takes a node's disk away.

Run as ``python killed_gang.py FOLDER [EVERY]``, to try every EVERY-th change. What is left is
looked at in an independent way first: the next attempt must go on from the newest step of which a
copy of each file verifies, wherever that copy is.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import copied_run
import torch
import torch.distributed as dist
from killed_saver import die_at, fork, was_killed

from slurmspot.checkpoint import manifest, reading, steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import Disk
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.verify import problems_of
from slurmspot.errors import CorruptCheckpointError

SAVES = 3
NODES = ("n0", "n1")
DEADLINE_S = 30


class Part:
    """What one rank has of a state, whose every number is the step."""

    def __init__(self):
        self.tensor = torch.zeros(6000)
        self.is_fresh = False

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]

    def fresh_state(self, _seed):
        self.is_fresh = True


class Attempt:
    """One rank of an attempt, on the node of that name."""

    def __init__(self, folder, restart, node, disk=None):
        self.folder = folder
        self.part = Part()
        self.checkpointer = Checkpointer(
            folder / "remote",
            {"part": self.part},
            per_rank=frozenset({"part"}),
            keep=2,
            claim=Claim(job_id="7", restart=restart),
            local=folder / node,
            node=node,
            disk=disk or Disk(),
            emit=self.note,
        )

    def note(self, event, step=None, tier=None, **_):
        if event == "commit":
            (self.folder / f"promised-{tier}").write_text(str(step))

    def save(self, step):
        self.part.tensor.fill_(step)
        self.checkpointer.save(step, trigger="period", meta={})
        self.checkpointer.wait()
        self.checkpointer.drain()

    def restore(self):
        restored = self.checkpointer.restore()
        step = restored.step if restored else 0
        assert self.part.is_fresh or (self.part.tensor == step).all()
        return step


def start(folder, nodes, work):
    """The process ids of a rank for each of ``nodes`` that does ``work(rank, node)``."""
    store = folder / f"store-{time.monotonic_ns()}"

    def one(rank, node):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=len(nodes)
        )
        work(rank, node)
        dist.destroy_process_group()

    return [fork(lambda rank=rank, node=node: one(rank, node)) for rank, node in enumerate(nodes)]


def end(child):
    """Wait for a rank whose peer was killed; it may fail, but not hang."""
    limit = time.monotonic() + DEADLINE_S
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < limit, "a rank waits for one that is gone"
        time.sleep(0.01)


def quiet():
    """A rank that loses its peer says so at length, which is no news here."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def found(folder, name, step, file):
    """Whether a copy of a data file verifies anywhere."""
    paths = folder.rglob(f"{steps.step_name(step)}*/{name}")
    return any(not reading.read(path.parent, file, {}, whole=True) for path in paths)


def newest(folder):
    """(the newest step that can be had, the newest on the remote tier alone)."""
    committed = steps.committed(folder / "remote")
    remote = max((step for step, path in committed.items() if not problems_of(path)), default=0)
    best = remote
    for path in folder.glob(
        "n?/*/owner-*/step-*"
    ):  # a sealed one that was killed before its commit counts
        with contextlib.suppress(CorruptCheckpointError):
            known = manifest.read(path)
            if all(found(folder, file.name, known.step, file) for file in known.files):
                best = max(best, known.step)
    return best, remote


def promised(folder, tier):
    path = folder / f"promised-{tier}"
    text = path.read_text() if path.exists() else ""
    return int(text) if text else 0


def resume(folder, nodes, restart=1):
    """The step that an attempt on ``nodes`` goes on from; it can save, too."""
    answer = folder / "resumed"

    def work(rank, node):
        attempt = Attempt(folder, restart, node)
        step = attempt.restore()
        attempt.save(step + 1)
        assert attempt.checkpointer.failed() is None
        attempt.checkpointer.close()
        if rank == 0:
            answer.write_text(str(step))

    assert not any(was_killed(child) for child in start(folder, nodes, work))
    return int(answer.read_text())


def check(trial, lost, nodes):
    """Take a node's disk away and go on. Whether half a drain made the difference."""
    folder = trial.with_name(f"{trial.name}-without-{lost}")
    copied_run.copy(trial, folder)
    if lost is not None:
        shutil.rmtree(folder / lost)
        (folder / lost).mkdir()
    expected, remote = newest(folder)
    least = promised(folder, "remote")
    if lost is None:
        least = max(least, promised(folder, "local"))
    assert expected >= least, (trial, lost)
    step = resume(folder, nodes)
    assert step == expected, (trial, lost, step, expected)
    assert newest(folder) == (step + 1, step + 1)
    shutil.rmtree(folder)
    return lost is not None and expected > remote


def die_saving(root, every):
    """(kills, how often a half-drained copy was what saved a step), of either rank."""
    kills = mixed = 0
    worlds = itertools.cycle([["n0", "n1"], ["n1", "n0"], ["n0", "n1", "n0"], ["n1", "n0", "n1"]])
    for victim in (0, 1):
        for count in itertools.count(0, every):
            trial = root / f"{victim}-{count}"
            for node in NODES:
                (trial / node).mkdir(parents=True)

            def work(rank, node, trial=trial, count=count, victim=victim):
                if rank == victim:
                    die_at(count)
                else:
                    quiet()
                attempt = Attempt(trial, 0, node)
                for step in range(1, SAVES + 1):
                    attempt.save(step)

            children = start(trial, NODES, work)
            killed = was_killed(children[victim])
            end(children[1 - victim])
            mixed += sum(check(trial, lost, next(worlds)) for lost in (None, *NODES))
            shutil.rmtree(trial)
            if not killed:
                break
            kills += 1
    return kills, mixed


class Late(Disk):
    """Brings nothing to the remote tier before the other node's file is there, and then dies."""

    def __init__(self, folder, file):
        self.folder = folder
        self.file = file

    def write(self, fd, memory, offset):
        (path,) = self.folder.glob(f"n?/*/owner-*/{steps.step_name(2)}/{self.file}")
        (file,) = (one for one in manifest.read(path.parent).files if one.name == self.file)
        limit = time.monotonic() + DEADLINE_S
        while not any(
            not reading.read(path.parent, file, {}, whole=True)
            for path in self.folder.glob(f"remote/owner-*/*/{self.file}")
        ):
            assert time.monotonic() < limit
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def half_drained(folder, late):
    """Step 1 is on both tiers; of step 2 all but the file of rank ``late``, which is killed."""
    for node in NODES:
        (folder / node).mkdir(parents=True)

    def first(_, node):
        attempt = Attempt(folder, 0, node)
        attempt.save(1)
        attempt.checkpointer.close()

    def second(rank, node):
        quiet()
        disk = Late(folder, f"rank-{1 - late:05d}.h5") if rank == late else None
        attempt = Attempt(folder, 1, node, disk)
        assert attempt.restore() == 1
        attempt.save(2)

    assert not any(was_killed(child) for child in start(folder, NODES, first))
    children = start(folder, NODES, second)
    assert was_killed(children[late])
    end(children[1 - late])


def die_mixing(root, every):
    """Kill either rank at each change while it puts a step together from a node and a drain."""
    kills = 0
    for late in (0, 1):
        origin = root / f"origin-{late}"
        half_drained(origin, late)
        lost = NODES[1 - late]  # what was on it has been drained
        shutil.rmtree(origin / lost)
        (origin / lost).mkdir()
        assert newest(origin) == (2, 1)
        for victim in (0, 1):
            for count in itertools.count(0, every):
                trial = root / f"{late}-{victim}-{count}"
                copied_run.copy(origin, trial)

                def work(rank, node, trial=trial, count=count, victim=victim):
                    if rank == victim:
                        die_at(count)
                    else:
                        quiet()
                    Attempt(trial, 2, node).restore()

                children = start(trial, NODES, work)
                killed = was_killed(children[victim])
                end(children[1 - victim])
                assert resume(trial, NODES, 3) == 2
                shutil.rmtree(trial)
                if not killed:
                    break
                kills += 1
    return kills


def fail_closed(root):
    """The file that nobody has any more: the step before it, however much else is there."""
    for late in (0, 1):
        origin = root / f"closed-{late}"
        half_drained(origin, late)
        lost = NODES[late]
        shutil.rmtree(origin / lost)
        (origin / lost).mkdir()
        assert newest(origin) == (1, 1)
        assert resume(origin, NODES, 2) == 1


if __name__ == "__main__":
    root = Path(sys.argv[1])
    every = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    (root / "mixing").mkdir()
    fail_closed(root)
    answer = {"saving": die_saving(root, every), "mixing": die_mixing(root / "mixing", every)}
    json.dump(answer, sys.stdout)
