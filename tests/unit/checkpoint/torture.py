"""The long form of the tests that nothing fools the checkpoints: ``make torture``.

Prints JSON; exits with 1 if anything was lost, or went unfound.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import damage
import rank_scenarios as scenario
import torch
from rank_pool import RankPool

from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.verify import problems_of
from slurmspot.errors import CheckpointWriteError


def kills(folder, trials):
    """SIGKILL at every change, at every read, and at random moments."""
    script = Path(__file__).with_name("killed_saver.py")
    argv = [sys.executable, str(script), str(folder), str(trials)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    everywhere, anywhere, last_step, _, content = json.loads(done.stdout)
    assert anywhere == trials
    assert content
    return {"at_every_change": everywhere, "at_random": anywhere, "last_step": last_step}


def damages(folder, flips):
    """Each kind of damage, done to the checkpoints of two ranks."""
    pool = RankPool(2)
    try:
        for step in (2, 3):
            pool.run(2, scenario.save, folder, "fsdp", step)
    finally:
        pool.close()
    return {"flips": flips, "unfound": damage.everything(folder, flips)}


class Weights:
    """Something to save."""

    def __init__(self, size):
        self.tensor = torch.randn(size)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def full_disk(folder):
    """Fill a small file system: the last good checkpoint stays, and space freed is used again."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        checkpointer = Checkpointer(folder / "run", {"weights": Weights(1 << 20)}, keep=2)
        checkpointer.save(1, trigger="period", meta={})
        checkpointer.wait()
        refused = 0
        for step in (2, 3):
            checkpointer.save(step, trigger="period", meta={})
            try:
                checkpointer.wait()
            except CheckpointWriteError as error:
                refused += "No space left" in str(error)
        left = sorted(path.name for path in (folder / "run").iterdir())
        assert left == ["step-00000001"], left
        assert problems_of(folder / "run" / "step-00000001") == []
        assert checkpointer.restore().step == 1
        return {"refused": refused, "left": left}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main():
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--flips", type=int, default=10_000)
    args = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        parts = {
            "kills": lambda folder: kills(folder, args.kills),
            "damage": lambda folder: damages(folder, args.flips),
        }
        if os.geteuid() == 0:
            parts["full_disk"] = full_disk
        answer = {}
        for name, part in parts.items():
            sys.stderr.write(f"{name} …\n")
            folder = Path(root) / name
            folder.mkdir()
            answer[name] = part(folder)
    answer["seconds"] = round(time.monotonic() - begin)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    sys.exit(1 if answer["damage"]["unfound"] else 0)


if __name__ == "__main__":
    main()
