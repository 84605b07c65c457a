"""What the benchmarks share: figures, facts about the machine, and the disk's own limits."""

from __future__ import annotations

import json
import mmap
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slurmspot.checkpoint.disk import aligned

PIECE_BYTES = 16 << 20
THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured ratio.

    Attributes:
        bar: what it should not exceed; None if it is only told.
        ours: samples, in the order in which they were taken.
        peer: samples of what they are compared with, taken in turn with ours.
    """

    name: str
    bar: float | None
    ours: Sequence[float]
    peer: Sequence[float]
    unit: str = "s"

    @property
    def value(self) -> float:
        """The median of ours over the median of the peer's."""
        return statistics.median(self.ours) / statistics.median(self.peer)

    @property
    def document(self) -> dict[str, Any]:
        """As JSON; ``spread`` has the least and the greatest ratio of any turn."""
        turns = [mine / other for mine, other in zip(self.ours, self.peer, strict=True)]
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "bar": self.bar,
            "met": None if self.bar is None else self.value <= self.bar,
            "spread": [round(min(turns), 4), round(max(turns), 4)],
            "unit": self.unit,
            "ours": [round(one, 5) for one in self.ours],
            "peer": [round(one, 5) for one in self.peer],
        }


def show(figures: Sequence[Figure], facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print all figures, as JSON or as a table."""
    if as_json:
        known = {"schema_version": 1, **facts, "figures": [one.document for one in figures]}
        print(json.dumps(known, indent=2))
        return
    print(f"{'FIGURE':34}{'VALUE':>8}{'BAR':>7}{'SPREAD':>18}{'OURS':>11}{'PEER':>11}")
    for one in figures:
        low, high = one.document["spread"]
        bar = "-" if one.bar is None else f"{one.bar:g}"
        mark = " " if one.bar is None or one.value <= one.bar else "!"
        ours, peer = (f"{statistics.median(x):.4g} {one.unit}" for x in (one.ours, one.peer))
        spread = f"{low:8.3f} to {high:6.3f}"
        print(f"{one.name:34}{one.value:8.3f}{bar:>7}{mark}{spread:>17}{ours:>11}{peer:>11}")


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on, in general words."""
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE / 2**30),
            "kernel": platform.release(),
            "file_system": _file_system(folder),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "load_average": os.getloadavg()[0],
        }
    }


def _file_system(folder: Path) -> str:
    """The type of the file system that ``folder`` is on."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def take_turns(
    repeats: int,
    contenders: Mapping[str, Callable[[], float]],
) -> dict[str, list[float]]:
    """Samples of each contender, one a turn, each turn in another order.

    What a contender leaves to the disk, freed blocks among it, is settled before the next one.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            os.sync()
            samples[name].append(contenders[name]())
    return samples


def timed(work: Callable[[], Any]) -> float:
    """Seconds that ``work`` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def forget(path: Path) -> None:
    """Have the page cache drop a file, or all files below a folder."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def write_direct(path: Path, content: memoryview) -> None:
    """The limit: four threads write aligned memory past the page cache; then fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, len(content))
    _share(len(content), lambda at: os.pwrite(fd, content[at : at + PIECE_BYTES], at))
    os.fsync(fd)
    os.close(fd)


def write_buffered(path: Path, content: memoryview) -> None:
    """The usual way: one thread writes through the page cache; then fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    for at in range(0, len(content), PIECE_BYTES):
        os.pwrite(fd, content[at : at + PIECE_BYTES], at)
    os.fsync(fd)
    os.close(fd)


def read_direct(path: Path, size_bytes: int) -> None:
    """The limit: four threads read past the page cache into memory they use again."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    local = threading.local()

    def read(at: int) -> None:
        if not hasattr(local, "room"):
            local.room = aligned(PIECE_BYTES).data
        os.preadv(fd, [local.room], at)

    _share(size_bytes, read)
    os.close(fd)


def read_buffered(path: Path, room: memoryview) -> None:
    """One thread reads a file through the page cache into ``room``."""
    fd = os.open(path, os.O_RDONLY)
    at = 0
    while at < len(room) and (count := os.preadv(fd, [room[at : at + PIECE_BYTES]], at)):
        at += count
    os.close(fd)


def _share(size_bytes: int, work: Callable[[int], Any]) -> None:
    offsets = iter(range(0, size_bytes, PIECE_BYTES))
    lock = threading.Lock()

    def go() -> None:
        while True:
            with lock:
                at = next(offsets, None)
            if at is None:
                return
            work(at)

    threads = [threading.Thread(target=go) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
