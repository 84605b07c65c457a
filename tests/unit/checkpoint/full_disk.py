"""Saves on a real file system that is too small, mounted for this process alone.

Run as ``unshare --mount python full_disk.py FOLDER`` (by anybody: with ``--map-root-user``). Each
function gives what it has seen; what must hold is asserted on the way.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

from slurmspot.checkpoint import steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.verify import problems_of
from slurmspot.errors import CheckpointWriteError

FULL = "No space left on device"


class Weights:
    """4 MiB, of which a file system of 8 MiB holds one checkpoint and no second."""

    def __init__(self):
        self.tensor = torch.randn(1 << 20)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def small(folder):
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    return folder


def unfinished(folder):
    return [path.name for path in folder.rglob("*.partial-*")]


def save(checkpointer, step):
    """Why it failed, or None."""
    checkpointer.save(step, trigger="period", meta={})
    try:
        checkpointer.wait()
    except CheckpointWriteError as error:
        return error.why
    return None


def one_tier(root):
    """The last good checkpoint stays, and room that is made is used again."""
    folder = small(root)
    checkpointer = Checkpointer(folder / "run", {"weights": Weights()}, keep=1)
    assert save(checkpointer, 1) is None
    refused = [save(checkpointer, step) for step in (2, 3)]
    assert all(FULL in why for why in refused), refused
    assert list(steps.committed(folder / "run")) == [1]
    assert not unfinished(folder)
    assert problems_of(folder / "run" / "step-00000001") == []
    assert checkpointer.restore().step == 1
    subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)
    assert save(checkpointer, 4) is None
    assert list(steps.committed(folder / "run")) == [4]
    return len(refused)


def tiered(root, local, remote, events):
    return Checkpointer(
        remote,
        {"weights": Weights()},
        keep=1,
        claim=Claim(job_id="7", restart=0),
        local=local,
        node="n",
        emit=lambda event, **data: events.append((event, data)),
    )


def commits(events):
    return [(data["step"], data["tier"]) for event, data in events if event == "commit"]


def local_tier(root):
    """The remote tier stands in for a node's disk that is full."""
    local, events = small(root / "node"), []
    (local / "filler").write_bytes(bytes(6 << 20))
    checkpointer = tiered(root, local, root / "remote", events)
    assert save(checkpointer, 1) is None
    (why,) = (data["error"] for event, data in events if event == "save_failed")
    assert FULL in why, why
    assert not unfinished(local)
    (local / "filler").unlink()
    assert save(checkpointer, 2) is None
    checkpointer.drain()
    assert commits(events) == [(1, "remote"), (2, "local"), (2, "remote")]
    return why


def remote_tier(root):
    """What cannot be drained stays on the node, is said, and the next step is drained again."""
    remote, events = small(root / "remote"), []
    (root / "node").mkdir()
    (remote / "filler").write_bytes(bytes(6 << 20))
    checkpointer = tiered(root, root / "node", remote, events)
    assert save(checkpointer, 1) is None
    checkpointer.drain()
    failure = checkpointer.failed()
    assert FULL in failure.why, failure
    assert commits(events) == [(1, "local")]
    assert not unfinished(remote)
    (remote / "filler").unlink()
    assert save(checkpointer, 2) is None
    checkpointer.drain()
    assert checkpointer.failed() is None
    assert commits(events) == [(1, "local"), (2, "local"), (2, "remote")]
    return failure.why


if __name__ == "__main__":
    root = Path(sys.argv[1])
    answer = {one.__name__: one(root / one.__name__) for one in (one_tier, local_tier, remote_tier)}
    json.dump(answer, sys.stdout)
