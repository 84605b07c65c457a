"""What a checkpoint costs a training on a GPU: 8 GiB of state, at most three minutes, JSON out.

    python benchmarks/gpu_checkpoint.py --dir /a/folder/on/a/real/disk

Says "no GPU" and exits with 3 where there is none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _measure import Figure, machine

from slurmspot.checkpoint.checkpointer import Checkpointer

LAYERS_WIDTH = 8192  # one layer has 256 MiB of parameters and 768 MiB of state
LIMIT_S = 170.0
NO_GPU = 3


class Training:
    """Layers of one width under AdamW, on the GPU."""

    def __init__(self, size_gib: float) -> None:
        count = max(1, round(size_gib * 2**30 / (3 * 4 * LAYERS_WIDTH**2)))
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(LAYERS_WIDTH, LAYERS_WIDTH, bias=False) for _ in range(count))
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(512, LAYERS_WIDTH, device="cuda")
        self.passes = 1
        self.step()
        self.size_bytes = 3 * sum(p.nbytes for p in self.model.parameters())

    def step(self) -> None:
        """One step; returns when the GPU has done it."""
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        torch.cuda.synchronize()

    def seconds(self) -> float:
        """What one step takes."""
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin

    def lengthen(self, seconds: float) -> float:
        """Have a step take about so long; return what it takes."""
        once = min(self.seconds() for _ in range(3))
        self.passes = max(1, round(seconds / once))
        return statistics.median(self.seconds() for _ in range(3))


def measure(folder: Path, size_gib: float, repeats: int) -> dict[str, Any]:
    """Stall and step time, ours and DCP's in turn, for as long as there is time."""
    begin = time.perf_counter()
    training = Training(size_gib)
    plain_s = training.lengthen(1.0)
    events: list[tuple[str, dict[str, Any]]] = []
    checkpointer = Checkpointer(
        folder / "run",
        {"model": training.model, "optimizer": training.optimizer},
        keep=1,
        emit=lambda event, **data: events.append((event, data)),
    )
    ours: list[float] = []
    peer: list[float] = []
    persist: list[float] = []
    for turn in range(repeats + 2):  # the first two take memory and learn what moves when
        mine, written = _ours(training, checkpointer, turn + 1)
        theirs = _dcp(training, folder / "dcp")
        if turn >= 2:
            ours.append(max(0.0, mine - plain_s))
            peer.append(max(1e-6, theirs - plain_s))
            persist.append(written)
        spent = time.perf_counter() - begin
        if ours and spent * (turn + 2) / (turn + 1) > LIMIT_S:
            break
    stalls = [data["stall_s"] for event, data in events if event == "snapshot_end"][2:]
    figure = Figure(name="step_added_vs_dcp_async", bar=0.02, ours=ours, peer=peer)
    begin = time.perf_counter()
    checkpointer.restore()
    return {
        "schema_version": 1,
        "gpu": torch.cuda.get_device_name(),
        "state_bytes": training.size_bytes,
        "plain_step_s": plain_s,
        "stall_s": stalls,
        "save_to_durable_s": persist,
        "restore_s": time.perf_counter() - begin,
        "figures": [figure.document],
        **machine(folder),
    }


def _ours(training: Training, checkpointer: Checkpointer, step: int) -> tuple[float, float]:
    """(seconds of the save call and one step, seconds until all was durable)."""
    begin = time.perf_counter()
    checkpointer.save(step, trigger="period", meta={})
    training.step()
    waited = time.perf_counter() - begin
    checkpointer.wait()
    return waited, time.perf_counter() - begin


def _dcp(training: Training, path: Path) -> float:
    """The same for torch's asynchronous save."""
    shutil.rmtree(path, ignore_errors=True)
    begin = time.perf_counter()
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path))
    training.step()
    waited = time.perf_counter() - begin
    future.result()
    return waited


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-gib", type=float, default=8.0, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write: a real disk")
    parser.add_argument("--repeats", type=int, default=5, help="samples, if there is time")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        sys.exit(NO_GPU)
    warnings.filterwarnings("ignore", module="torch")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        print(json.dumps(measure(Path(folder), args.size_gib, args.repeats), indent=2))


if __name__ == "__main__":
    main()
