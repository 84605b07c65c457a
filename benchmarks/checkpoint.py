"""The checkpoint engine beside its peers, in the same run and in turn.

    python benchmarks/checkpoint.py --size-mib 512 --dir /a/folder/on/a/real/disk --json

Every figure is a ratio of medians: ours over a peer's, or over what the disk can do. Everything
that is timed includes fsync where it writes; reads are cold unless the name says otherwise.
docs/benchmarks.md tells what each figure means.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _measure import (
    Figure,
    forget,
    machine,
    read_buffered,
    read_direct,
    show,
    take_turns,
    timed,
    write_buffered,
    write_direct,
)
from safetensors.torch import save_file

from slurmspot.checkpoint import host
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import aligned
from slurmspot.checkpoint.storage import Hdf5StorageReader, Hdf5StorageWriter
from slurmspot.checkpoint.verify import verify

TMPFS = Path("/dev/shm")
TENSORS = 16
PERIOD_S = 10.0
STEP_S = 0.5
WARM_UP = 3


class Holder:
    """A registered object around some tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors."""
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take others."""
        self.tensors = state


class Kept:
    """What each contender wrote last, which stays until its next one is complete.

    Blocks and pages that have just been freed are quicker to get than others; and with ours the
    checkpoint before has to stay.

    Attributes:
        paths: by the contender's name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.paths: dict[str, Path] = {}

    def new(self, name: str) -> Path:
        """Where a contender writes next; nothing is there."""
        self._count += 1
        return self._folder / f"{name}-{self._count}"

    def complete(self, name: str, path: Path) -> None:
        """``path`` is written, and what came before it may go."""
        earlier, self.paths[name] = self.paths.get(name), path
        if earlier is not None:
            shutil.rmtree(earlier) if earlier.is_dir() else earlier.unlink()


class Files:
    """One state, and each engine's way to write it to a folder and to read it back."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.folder = folder
        self.size_bytes = size_mib << 20
        count = self.size_bytes // 4 // TENSORS
        self.state = {f"layer-{i}": torch.randn(count) for i in range(TENSORS)}
        self.room = {name: torch.zeros_like(one) for name, one in self.state.items()}
        # The limit's memory is aligned and on huge pages, as no tensor's is.
        self.content = aligned(self.size_bytes).data
        self.content[:] = b"".join(host.content(one) for one in self.state.values())
        self.checkpointer = Checkpointer(
            folder / "run", {"model": Holder(self.state)}, keep=1, emit=self._note
        )
        self.step = 0
        self.committed = 0.0
        self._kept = Kept(folder)
        self.paths = self._kept.paths

    def _write(self, name: str, work: Callable[[Path], Any]) -> float:
        """Time ``work`` on a new path."""
        path = self._kept.new(name)
        taken = timed(lambda: work(path))
        self._kept.complete(name, path)
        return taken

    def _note(self, event: str, **_: Any) -> None:
        if event == "commit":
            self.committed = time.perf_counter()

    def save(self) -> float:
        """Call to durable, as after a notice: nothing trains on, so that nothing is copied."""
        return self._save(blocking=True)

    def save_behind(self) -> float:
        """The same, with a copy of all of it before the call returns, as training might go on."""
        return self._save(blocking=False)

    def _save(self, *, blocking: bool) -> float:
        self.step += 1
        begin = time.perf_counter()
        self.checkpointer.save(self.step, trigger="period", meta={}, blocking=blocking)
        self.checkpointer.wait()
        return self.committed - begin

    def storage(self) -> float:
        """The storage classes alone, in ``dcp.save``."""
        return self._write(
            "storage", lambda path: dcp.save(self.state, storage_writer=Hdf5StorageWriter(path))
        )

    def dcp(self) -> float:
        """DCP's own files, which it syncs."""
        return self._write(
            "dcp", lambda path: dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path))
        )

    def torch_save(self) -> float:
        """torch.save, and fsync."""

        def work(path: Path) -> None:
            with path.open("wb") as file:
                torch.save(self.state, file)
                os.fsync(file.fileno())

        return self._write("torch", work)

    def safetensors(self) -> float:
        """safetensors, and fsync."""

        def work(path: Path) -> None:
            save_file(self.state, path)
            with path.open("rb+") as file:
                os.fsync(file.fileno())

        return self._write("safetensors", work)

    def raw(self) -> float:
        """One thread, through the page cache."""
        return self._write("raw", lambda path: write_buffered(path, self.content))

    def limit(self) -> float:
        """Four threads, past the page cache."""
        return self._write("limit", lambda path: write_direct(path, self.content))

    @property
    def saved(self) -> Path:
        """The newest checkpoint."""
        return self.folder / "run" / f"step-{self.step:08d}"

    def restore(self) -> float:
        """Everything checked and handed to the object, which is compared with its fingerprint."""
        forget(self.saved)
        return timed(self.checkpointer.restore)

    def load(self) -> float:
        """Every byte checked, into tensors that are there already."""
        path = self.paths["storage"]
        forget(path)
        return timed(lambda: self._load(path))

    def load_warm(self) -> float:
        """The same from the page cache."""
        path = self.paths["storage"]
        self.read_warm()
        return timed(lambda: self._load(path))

    def _load(self, path: Path) -> None:
        dcp.load(self.room, storage_reader=Hdf5StorageReader(path, part=0, parts=1))

    def read_warm(self) -> float:
        """A plain read of the same file from the page cache; read once before, if it must be."""
        (path,) = self.paths["storage"].glob("*.h5")
        read_buffered(path, self.content)
        return timed(lambda: read_buffered(path, self.content))

    def read_limit(self) -> float:
        """Four threads, past the page cache, of the very file that is loaded and verified."""
        (path,) = self.paths["storage"].glob("*.h5")
        forget(path)
        return timed(lambda: read_direct(path, path.stat().st_size))

    def verify(self) -> float:
        """What ``slurmspot verify`` does."""
        path = self.paths["storage"]
        forget(path)
        return timed(lambda: verify(path))

    def torch_load(self) -> float:
        """torch.load, which checks nothing."""
        path = self.paths["torch"]
        forget(path)
        return timed(lambda: torch.load(path, weights_only=True))

    def dcp_load(self) -> float:
        """DCP's own reader, which checks nothing."""
        path = self.paths["dcp"]
        forget(path)
        return timed(lambda: dcp.load(self.room, storage_reader=dcp.FileSystemReader(path)))


def disk_figures(folder: Path, size_mib: int, repeats: int) -> Iterator[Figure]:
    """Writing, reading and checking on a real disk."""
    files = Files(folder, size_mib)
    writers = [files.save, files.save_behind, files.storage, files.limit, files.raw]
    writers += [files.torch_save, files.dcp, files.safetensors]
    for write in writers:
        write()
    t = take_turns(repeats, {one.__name__: one for one in writers})
    yield Figure(name="persist_vs_limit", bar=1.10, ours=t["save"], peer=t["limit"])
    yield Figure(name="persist_vs_raw", bar=0.6, ours=t["save"], peer=t["raw"])
    yield Figure(name="persist_vs_torch_save", bar=0.6, ours=t["save"], peer=t["torch_save"])
    yield Figure(name="persist_vs_dcp", bar=0.6, ours=t["save"], peer=t["dcp"])
    yield Figure(name="persist_vs_safetensors", bar=0.6, ours=t["save"], peer=t["safetensors"])
    yield Figure(name="persist_copied_vs_limit", bar=None, ours=t["save_behind"], peer=t["limit"])
    yield Figure(name="storage_classes_vs_limit", bar=None, ours=t["storage"], peer=t["limit"])

    readers = [files.load, files.restore, files.verify, files.read_limit]
    readers += [files.torch_load, files.dcp_load]
    t = take_turns(repeats, {one.__name__: one for one in readers})
    yield Figure(name="restore_vs_limit", bar=1.10, ours=t["load"], peer=t["read_limit"])
    yield Figure(name="restore_vs_torch_load", bar=0.8, ours=t["load"], peer=t["torch_load"])
    yield Figure(name="restore_vs_dcp", bar=0.8, ours=t["load"], peer=t["dcp_load"])
    yield Figure(
        name="restore_whole_run_vs_limit", bar=None, ours=t["restore"], peer=t["read_limit"]
    )
    yield Figure(name="verify_vs_limit", bar=1.10, ours=t["verify"], peer=t["read_limit"])
    t = take_turns(repeats, {one.__name__: one for one in (files.load_warm, files.read_warm)})
    yield Figure(name="restore_vs_read_warm", bar=1.35, ours=t["load_warm"], peer=t["read_warm"])


def tmpfs_figures(folder: Path, size_mib: int, repeats: int) -> Iterator[Figure]:
    """Writing to memory: where direct I/O is refused."""
    files = Files(folder, size_mib)
    writers = [files.save, files.torch_save, files.dcp, files.safetensors]
    for write in writers:
        write()
    t = take_turns(repeats, {one.__name__: one for one in writers})
    best = min(("torch_save", "dcp", "safetensors"), key=lambda name: statistics.median(t[name]))
    yield Figure(name="persist_tmpfs_vs_best", bar=1.0, ours=t["save"], peer=t[best])


class Training:
    """A model and AdamW whose state has about the given size, trained in steps of some length."""

    def __init__(self, size_mib: int, step_s: float) -> None:
        width = 1024
        layers = max(1, (size_mib << 20) // (3 * 4 * width * width))
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(64, width)
        self.passes = 1
        self.step()
        once = min(timed(self.forward_backward) for _ in range(3))
        self.passes = max(1, round(step_s / once))
        self.size_bytes = 3 * sum(p.nbytes for p in self.model.parameters())

    def objects(self) -> dict[str, Any]:
        """What is registered."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state(self) -> dict[str, Any]:
        """What DCP is given."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def forward_backward(self) -> None:
        """What runs between two steps of the optimizer."""
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        """One step of training."""
        self.forward_backward()
        self.optimizer.step()


class Engines:
    """The same training saved by us, by DCP, and not at all; or beside a bare write."""

    def __init__(self, folder: Path, size_mib: int, step_s: float) -> None:
        self.training = training = Training(size_mib, step_s)
        self._kept = Kept(folder)
        self._number = 0
        # What a save costs inside the step is the time between these two hooks.
        self._marks = [0.0, 0.0]
        training.optimizer.register_step_pre_hook(lambda *_: self._mark(0))
        self.checkpointer = Checkpointer(folder / "run", training.objects(), keep=1)
        training.optimizer.register_step_pre_hook(lambda *_: self._mark(1))
        self._content = aligned(training.size_bytes)
        self._content[:] = 1
        for _ in range(WARM_UP):  # staging is allocated, and what moves when is learnt
            self._ours()
            training.step()
            self._settle_ours()
            self._settle_dcp(self._dcp())

    def _mark(self, which: int) -> None:
        self._marks[which] = time.perf_counter()

    def _ours(self) -> float:
        self._number += 1
        number = self._number
        return timed(lambda: self.checkpointer.save(number, trigger="period", meta={}))

    def _settle_ours(self) -> None:
        self.checkpointer.wait()

    def _dcp(self) -> tuple[Any, Path]:
        path = self._kept.new("dcp")
        writer = dcp.FileSystemWriter(path)
        return dcp.async_save(self.training.state(), storage_writer=writer), path

    def _settle_dcp(self, saving: tuple[Any, Path]) -> None:
        future, path = saving
        future.result()
        self._kept.complete("dcp", path)

    def _bare(self) -> threading.Thread:
        """Write as many bytes at the disk's limit: nothing is copied, hashed or committed."""
        path = self._kept.new("bare")

        def work() -> None:
            write_direct(path, self._content.data)
            self._kept.complete("bare", path)

        writing = threading.Thread(target=work)
        writing.start()
        return writing

    def stall(self) -> float:
        """Seconds that training waits for one of our checkpoints: the call, and before the step."""
        waited = self._ours()
        self.training.step()
        waited += self._marks[1] - self._marks[0]
        self._settle_ours()
        return waited

    def stall_dcp(self) -> float:
        """Seconds that training waits for DCP: the call."""
        begin = time.perf_counter()
        saving = self._dcp()
        waited = time.perf_counter() - begin
        self.training.step()
        self._settle_dcp(saving)
        return waited

    def stall_dcp_anew(self) -> float:
        """The same where the allocator has given the memory of the copy before back."""
        ctypes.CDLL(None).malloc_trim(0)
        return self.stall_dcp()

    def period(self, steps: int, save: Callable[[], Any], settle: Callable[[Any], None]) -> float:
        """Seconds that one period of training takes, a checkpoint at its start included."""

        def work() -> None:
            saved = save()
            for _ in range(steps):
                self.training.step()
            settle(saved)

        return timed(work)

    def periods(self, steps: int) -> dict[str, Callable[[], float]]:
        """One period each way."""
        return {
            "plain": lambda: self.period(steps, lambda: None, lambda _: None),
            "ours": lambda: self.period(steps, self._ours, lambda _: self._settle_ours()),
            "dcp": lambda: self.period(steps, self._dcp, self._settle_dcp),
            "bare": lambda: self.period(steps, self._bare, threading.Thread.join),
        }


def training_figures(
    folder: Path, size_mib: int, repeats: int, period_s: float, step_s: float
) -> Iterator[Figure]:
    """What a checkpoint costs a training that goes on."""
    engines = Engines(folder, size_mib, step_s)
    stalls = {"ours": engines.stall, "dcp": engines.stall_dcp, "anew": engines.stall_dcp_anew}
    t = take_turns(repeats, stalls)
    yield Figure(name="stall_vs_dcp_async", bar=0.02, ours=t["ours"], peer=t["dcp"])
    yield Figure(name="stall_vs_dcp_async_anew", bar=None, ours=t["ours"], peer=t["anew"])
    t = take_turns(repeats, engines.periods(max(1, round(period_s / step_s))))
    added = {
        name: [max(0.0, one - plain) for one, plain in zip(t[name], t["plain"], strict=True)]
        for name in ("ours", "dcp", "bare")
    }
    yield Figure(name="step_overhead", bar=0.015, ours=added["ours"], peer=t["plain"])
    yield Figure(name="step_overhead_of_bare_write", bar=None, ours=added["bare"], peer=t["plain"])
    for name, bar, peer in (("dcp_async", 0.2, "dcp"), ("bare_write", None, "bare")):
        yield Figure(
            name=f"step_overhead_vs_{name}",
            bar=bar,
            ours=added["ours"],
            peer=[
                max(plain / 1000, one) for one, plain in zip(added[peer], t["plain"], strict=True)
            ],
        )


def peak_memory(folder: Path, size_mib: int) -> tuple[int, int]:
    """(bytes above the running state while checkpoints are taken, bytes of the state)."""
    training = Training(size_mib, 0.0)
    training.step()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    checkpointer = Checkpointer(folder / "run", training.objects(), keep=1)
    for number in range(1, 5):
        checkpointer.save(number, trigger="period", meta={})
        training.step()
        checkpointer.wait()
    return max(0, _memory("VmHWM") - before), training.size_bytes


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def memory_figure(folder: Path, size_mib: int, repeats: int) -> Figure:
    """Peak memory, each time in a process of its own."""
    taken = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            argv = [sys.executable, __file__, "--peak", own, "--size-mib", str(size_mib)]
            done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
            taken.append([int(one) / 2**20 for one in done.stdout.split()])
    ours, peer = zip(*taken, strict=True)
    return Figure(name="peak_memory", bar=1.1, ours=ours, peer=peer, unit="MiB")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=512, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write: a real disk")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each figure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--only", choices=["disk", "tmpfs", "training", "memory"], help="one part")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if args.peak:
        print(*peak_memory(args.peak, args.size_mib))
        return
    size_mib, repeats = (12, 1) if args.quick else (args.size_mib, args.repeats)
    step_s, period_s = (0.02, 0.1) if args.quick else (STEP_S, PERIOD_S)
    figures: list[Figure] = []
    args.dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir)))
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=TMPFS)))
        parts: dict[str, Callable[[], Iterator[Figure]]] = {
            "training": lambda: training_figures(
                disk / "training", size_mib, repeats, period_s, step_s
            ),
            "disk": lambda: disk_figures(disk, size_mib, repeats),
            "tmpfs": lambda: tmpfs_figures(shm, size_mib, repeats),
            "memory": lambda: iter([memory_figure(disk, size_mib, repeats)]),
        }
        for name, part in parts.items():
            if args.only in {None, name}:
                print(f"measuring {name} …", file=sys.stderr)
                figures += part()
        facts = {"size_mib": size_mib, "repeats": repeats, **machine(disk)}
    show(figures, facts, as_json=args.json)


if __name__ == "__main__":
    main()
