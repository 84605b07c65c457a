"""Save, and leave Python without a word: ``left_open.py FOLDER``."""

import sys
import time
from pathlib import Path

import torch

from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import Disk


class Slow(Disk):
    """Takes half a second until anything is durable."""

    def sync(self, fd):
        time.sleep(0.5)
        super().sync(fd)


torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
checkpointer = Checkpointer(Path(sys.argv[1]), {"model": model}, disk=Slow())
checkpointer.save(1, trigger="period", meta={})
