"""Loads a large state into tensors that are there already, and tells the memory it took.

Run as ``python little_memory.py FOLDER {save | load SHARE}``: SHARE is the memory that may be
taken, over the state's size; 0 means whatever the machine and its control groups have left.
"""

import json
import sys
from pathlib import Path

import torch

from slurmspot.checkpoint import loading
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.memory import available_bytes
from slurmspot.checkpoint.objects import parts
from slurmspot.checkpoint.ranks import Ranks

TENSORS = 16
SIZE_BYTES = 24 << 20


class Layers(torch.nn.Module):
    """384 MiB in tensors of 24 MiB, whose values tell them apart."""

    def __init__(self, factor):
        super().__init__()
        for i in range(TENSORS):
            value = torch.full((SIZE_BYTES // 4,), float(factor * (i + 1)))
            self.register_parameter(f"layer{i}", torch.nn.Parameter(value))


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def load(folder, share):
    model = Layers(0)
    total = TENSORS * SIZE_BYTES
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = status("VmRSS")
    loading.load(
        folder / "step-00000001",
        parts({"model": model}),
        ranks=Ranks(None),
        per_rank=frozenset(),
        available_bytes=(lambda: int(share * total)) if share else available_bytes,
    )
    taken = status("VmHWM") - before
    for i, parameter in enumerate(model.parameters()):
        assert bool((parameter == i + 1).all())
    return taken / total


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if sys.argv[2] == "save":
        checkpointer = Checkpointer(folder, {"model": Layers(1)})
        checkpointer.save(1, trigger="final", meta={})
        checkpointer.wait()
    else:
        json.dump(load(folder, float(sys.argv[3])), sys.stdout)
