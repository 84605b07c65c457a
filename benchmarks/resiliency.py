"""The checkpoint engine beside the local checkpoints of resiliency libraries, on a CPU.

    python benchmarks/resiliency.py --size-mib 512 --dir /a/folder/on/a/real/disk --json

One training, a model and AdamW, is saved by each engine in turn. Of each is told

* ``stall_s``: how long training waits, in the call and before the optimizer's next step;
* ``until_on_disk_s``: from the call until the file is synced, while nothing trains on.

The engines:

* ``slurmspot``: ``Checkpointer.save``.
* ``lm_resiliency``: ``InMemoryCheckpointManager`` of lm-resiliency, ``verify_integrity=True``: a
  copy in memory (``in_memory_s``, part of the stall), and ``flush_to_disk``, which in the call
  copies it once more and takes its checksums, and writes behind it.
* ``nvrx_local``: ``LocalCheckpointManager.save(is_async=True)`` of nvidia-resiliency-ext.
* ``nvrx_unchecked``: the same, where its state dict has not looked at the tensors' device.
* ``nvrx_blocking``: the latter with ``is_async=False``. It does not sync its file: this does,
  after the call.
* ``nvrx_async_core``: its ``AsyncCallsQueue`` alone, given a copy of the state and a function that
  writes and syncs a file, which both are not its own.

One that cannot be installed, fails, or logs an error has ``"runs": false`` and tells why. At the
end each saves once more, and what is on the disk must be the training's state, bit for bit. The
libraries are installed into folders that are thrown away, without what they depend on: they get
by with this environment's torch. ``--no-peers`` leaves them out.
"""

# ruff: noqa: D102, PLC0415  Engine tells what a method does; a peer is imported once installed

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _measure import Figure, machine, show, take_turns
from checkpoint import STEP_S, WARM_UP, Training

from slurmspot.checkpoint.checkpointer import Checkpointer

PEERS = {"lm-resiliency": "lm-resiliency==0.2.0", "nvidia-resiliency-ext": "nvidia-resiliency-ext"}
PATIENCE_S = 120.0
POLL_S = 0.002


class Engine(ABC):
    """One way to save the training; the file before goes when the next one is on the disk."""

    package: str

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder = folder
        self.training = training
        self.number = 0
        self.parts: dict[str, list[float]] = {}  # of what the calls take

    @abstractmethod
    def save(self) -> None:
        """Save; training waits for this, and in hooks before the optimizer's step."""

    @abstractmethod
    def settle(self) -> float:
        """Wait until it is on the disk, and return when it was."""

    @abstractmethod
    def load(self) -> Any:
        """The state that is on the disk."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is in flight, and let go."""


class Slurmspot(Engine):
    """Ours."""

    package = "slurmspot"

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        self._committed = 0.0
        self._checkpointer = Checkpointer(folder, training.objects(), keep=1, emit=self._note)

    def _note(self, event: str, **_: Any) -> None:
        if event == "commit":
            self._committed = time.perf_counter()

    def save(self) -> None:
        self.number += 1
        self._checkpointer.save(self.number, trigger="period", meta={})

    def settle(self) -> float:
        self._checkpointer.wait()
        return self._committed

    def load(self) -> Any:
        with torch.no_grad():  # it restores into the training itself
            for one in tensors(self.training.state()):
                one.zero_()
        self._checkpointer.restore()
        return self.training.state()

    def close(self) -> None:
        self._checkpointer.close()


class LmResiliency(Engine):
    """To memory, and from there to the disk."""

    package = "lm-resiliency"

    def __init__(self, folder: Path, training: Training) -> None:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.experimental import InMemoryCheckpointManager

        super().__init__(folder, training)
        self._config = InMemoryCkptConfig(
            disk_flush_interval=0, disk_folder=str(folder), run_id="run", verify_integrity=True
        )
        self._manager = InMemoryCheckpointManager(self._config)
        self.parts["in_memory_s"] = []
        training.optimizer.register_step_pre_hook(lambda *_: self._manager.maybe_wait())

    def save(self) -> None:
        self.number += 1
        begin = time.perf_counter()
        self._manager.save(self.training.state(), self.number)
        self.parts["in_memory_s"].append(time.perf_counter() - begin)
        self._manager.flush_to_disk()

    def settle(self) -> float:
        # By a public name only close() waits for a flush, and it is the manager's end. Without any
        # wait the folder could be gone before the flush is over, which then logs an error.
        disk = self._manager._disk  # noqa: SLF001
        disk.wait()
        at = time.perf_counter()
        disk.cleanup_older_than(self.number)
        return at

    def load(self) -> Any:
        # Another manager of the same run has nothing in memory, as after a restart.
        manager = type(self._manager)(self._config)
        state, _ = manager.load()
        manager.close()
        return state

    def close(self) -> None:
        self._manager.close()


class NvrxAsyncCore(Engine):
    """What the asynchronous saves of nvidia-resiliency-ext are made of."""

    package = "nvidia-resiliency-ext"

    def __init__(self, folder: Path, training: Training) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        super().__init__(folder, training)
        folder.mkdir()
        # Made now that the others are: they need none.
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # From 0.6 on its worker asks for a GPU unless it is told that there is none to ask for.
        told = "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters
        self._queue = AsyncCallsQueue(persistent=True, **({"cpu_shm_mode": True} if told else {}))

    @property
    def newest(self) -> Path:
        """The file that was written last."""
        return self.folder / f"{self.number}.pt"

    def request(self) -> Any:
        """What the worker is to do."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

        # The worker shares memory with what it is given, and training goes on to change its own.
        return AsyncRequest(write, (copy.deepcopy(self.training.state()), self.newest), [])

    def save(self) -> None:
        self.number += 1
        self._queue.schedule_async_request(self.request())

    def settle(self) -> float:
        # Its own wait asks every 0.1 s only, and never ends where the worker has.
        end = time.perf_counter() + PATIENCE_S
        while not self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True):
            if not self._worker.is_alive():
                raise RuntimeError(f"its worker ended with {self._worker.exitcode}")
            if time.perf_counter() > end:
                raise TimeoutError(f"its worker had not written anything after {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        at = time.perf_counter()
        for file in self.folder.glob("*.pt"):
            if file != self.newest:
                file.unlink()
        return at

    def load(self) -> Any:
        return torch.load(self.newest)

    @property
    def _worker(self) -> Any:
        return self._queue.persistent_caller.process

    def close(self) -> None:
        if self._queue.get_num_unfinalized_calls():  # it would wait for them without end
            self._worker.kill()
            self._queue.persistent_caller.process = None
            self._queue.async_calls.clear()
        self._queue.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class NvrxLocal(NvrxAsyncCore):
    """Its local checkpoint, as its documentation tells to save it."""

    def __init__(self, folder: Path, training: Training) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

        super().__init__(folder, training)
        self._manager = local_manager.LocalCheckpointManager(folder)

    @property
    def newest(self) -> Path:
        return max(self.folder.rglob("iter_*_local.pt"))

    def aware(self) -> Any:
        """The state as its manager takes it."""
        from nvidia_resiliency_ext.checkpointing.local import basic_state_dict

        return basic_state_dict.BasicTensorAwareStateDict(self.training.state())

    def request(self) -> Any:
        return self._manager.save(self.aware(), self.number, is_async=True)

    def settle(self) -> float:
        super().settle()
        sync(self.newest)
        return time.perf_counter()

    def load(self) -> Any:
        # Its own load() moves tensors to a GPU.
        return torch.load(self.newest, weights_only=False).state_dict


class NvrxUnchecked(NvrxLocal):
    """The same, of tensors that its state dict has not checked to be on a GPU."""

    def aware(self) -> Any:
        from nvidia_resiliency_ext.checkpointing.local import basic_state_dict

        empty = basic_state_dict.BasicTensorAwareStateDict({})
        empty.state_dict = self.training.state()
        return empty


class NvrxBlocking(NvrxUnchecked):
    """The same, saved by a call that returns when the file is there."""

    def save(self) -> None:
        self.number += 1
        self._manager.save(self.aware(), self.number)

    def settle(self) -> float:
        sync(self.newest)
        return time.perf_counter()


ENGINES: dict[str, type[Engine]] = {
    "slurmspot": Slurmspot,
    "lm_resiliency": LmResiliency,
    "nvrx_local": NvrxLocal,
    "nvrx_unchecked": NvrxUnchecked,
    "nvrx_blocking": NvrxBlocking,
    "nvrx_async_core": NvrxAsyncCore,
}


def write(state: Any, path: Path) -> None:
    """What the worker process runs."""
    torch.save(state, path)
    sync(path)


def sync(path: Path) -> None:
    """Have a file and its name on the disk."""
    for one in (path, path.parent):
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """All tensors of a state of the training."""
    moments = state["optimizer"]["state"].values()
    return [*state["model"].values(), *(one for group in moments for one in group.values())]


class Errors(logging.Handler):
    """Errors that anything logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


class Contender:
    """An engine until something of it fails."""

    def __init__(self, name: str, why: str | None, errors: Errors) -> None:
        self.name = name
        self.kind = ENGINES[name]
        self.why = why
        self.engine: Any = None
        self.samples: dict[str, list[float]] = {}
        self._errors = errors

    def attempt(self, work: Callable[[Contender], Any], *, anyway: bool = False) -> Any:
        """What ``work`` returns; not a number if it or, unless ``anyway``, another has failed."""
        if self.why is not None and not anyway:
            return math.nan
        self._errors.told.clear()
        done, why = math.nan, None
        try:
            done = work(self)
        except Exception as error:  # noqa: BLE001 - whatever it is, others are measured
            why = reason(error, self.kind.package)
        if why is None and self._errors.told:
            why = "logged an error: " + "; ".join(self._errors.told)
        self.why = self.why or why
        return done

    @property
    def document(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = {"name": self.name, "package": self.kind.package}
        try:
            found["version"] = metadata.version(self.kind.package)
        except metadata.PackageNotFoundError:
            found["version"] = None
        found["runs"] = self.why is None
        return found | ({"why": self.why} if self.why else summaries(self.samples))


def reason(error: Exception, package: str) -> str:
    """What went wrong, and in which line of the package, if in any."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if package.replace("-", "_") in Path(one.filename).parts]
    where = theirs[-1] if theirs else frames[-1]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text}, at {where.line} ({Path(where.filename).name}:{where.lineno})"


def summaries(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The median, the least and the greatest of each."""
    return {
        name: {
            "median": round(statistics.median(those), 5),
            "spread": [round(min(those), 5), round(max(those), 5)],
            "samples": [round(one, 5) for one in those],
        }
        for name, those in samples.items()
    }


class Bench:
    """One training, and all that save it."""

    def __init__(self, folder: Path, size_mib: int, step_s: float) -> None:
        self._folder = folder
        self._training = Training(size_mib, step_s)
        # What a save costs inside the step is the time between these two hooks; all others are
        # registered in between.
        self._marks = [0.0, 0.0]
        self._mark(0)

    def _mark(self, which: int) -> None:
        def mark(*_: Any) -> None:
            self._marks[which] = time.perf_counter()

        self._training.optimizer.register_step_pre_hook(mark)

    def measure(self, contenders: Sequence[Contender], repeats: int) -> None:
        """Make all engines, warm them up, take samples, look at what they wrote, and close."""
        try:
            for one in contenders:
                one.attempt(self._make)
            self._mark(1)
            for _ in range(WARM_UP):  # memory is allocated, and ours learns what moves when
                for one in contenders:
                    one.attempt(self._stall)
            for one in contenders:
                one.attempt(self._forget)
            taken = take_turns(
                repeats,
                {
                    f"{one.name} {key}": partial(one.attempt, take)
                    for one in contenders
                    for key, take in self._figures.items()
                },
            )
            for one in contenders:
                one.samples |= {key: taken[f"{one.name} {key}"] for key in self._figures}
                one.attempt(self._finish)
        finally:
            for one in contenders:
                one.attempt(self._close, anyway=True)

    @property
    def _figures(self) -> dict[str, Callable[[Contender], float]]:
        return {"stall_s": self._stall, "until_on_disk_s": self._until_on_disk}

    def _make(self, one: Contender) -> None:
        one.engine = one.kind(self._folder / one.name, self._training)

    def _forget(self, one: Contender) -> None:
        for samples in one.engine.parts.values():
            samples.clear()

    def _stall(self, one: Contender) -> float:
        begin = time.perf_counter()
        one.engine.save()
        waited = time.perf_counter() - begin
        self._training.step()
        waited += self._marks[1] - self._marks[0]
        one.engine.settle()
        return waited

    def _until_on_disk(self, one: Contender) -> float:
        self._training.step()
        begin = time.perf_counter()
        one.engine.save()
        return one.engine.settle() - begin

    def _finish(self, one: Contender) -> None:
        one.samples |= {key: list(samples) for key, samples in one.engine.parts.items()}
        self._until_on_disk(one)
        expected = [tensor.clone() for tensor in tensors(self._training.state())]
        found = tensors(one.engine.load())
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            raise ValueError("what is on the disk is not the training's state")

    def _close(self, one: Contender) -> None:
        if one.engine is not None:
            one.engine.close()


def install(folder: Path) -> dict[str, str]:
    """Install the peers for this process and its children; return why those missing are."""
    missing = {}
    for package, wanted in PEERS.items():
        target = folder / package
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        argv += ["--no-deps", "--target", str(target), wanted]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            missing[package] = f"not installed: {done.stderr.strip().splitlines()[-1]}"
        sys.path.append(str(target))
    return missing


def figures(contenders: Sequence[Contender]) -> list[Figure]:
    """Ours over each of the others that ran."""
    ours, *others = contenders
    return [
        Figure(
            name=f"{key.removesuffix('_s')}_vs_{one.name}",
            bar=None,
            ours=samples,
            peer=one.samples[key],
        )
        for one in others
        if one.why is None
        for key, samples in ours.samples.items()
    ]


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=512, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to write: a real disk")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each figure")
    parser.add_argument("--no-peers", action="store_true", help="install and measure none of them")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same everywhere
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("torch").setLevel(logging.ERROR)
    size_mib, repeats, step_s = (
        (12, 1, 0.02) if args.quick else (args.size_mib, args.repeats, STEP_S)
    )
    args.dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=args.dir) as disk,
        tempfile.TemporaryDirectory() as packages,
    ):
        missing = dict.fromkeys(PEERS, "left out: --no-peers")
        if not args.no_peers:
            print("installing the peers …", file=sys.stderr)
            missing = install(Path(packages))
        errors = Errors()
        contenders = [
            Contender(name, missing.get(kind.package), errors) for name, kind in ENGINES.items()
        ]
        print("measuring …", file=sys.stderr)
        Bench(Path(disk), size_mib, step_s).measure(contenders, repeats)
        if contenders[0].why is not None:
            sys.exit(f"slurmspot: {contenders[0].why}")
        documents = [one.document for one in contenders]
        facts = {"size_mib": size_mib, "repeats": repeats, **machine(Path(disk))}
    show(figures(contenders), {**facts, "engines": documents}, as_json=args.json)
    if not args.json:
        for one in documents:
            told = one.get("why") or ", ".join(
                f"{key} {one[key]['median']:.4g}" for key in one if key.endswith("_s")
            )
            print(f"{one['name']:22} {one['version'] or '-':8} {told}")


if __name__ == "__main__":
    main()
