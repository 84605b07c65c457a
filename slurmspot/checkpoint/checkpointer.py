"""What a training loop uses: save in the background, restore the newest that verifies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from slurmspot.checkpoint import host, loading, saving, steps
from slurmspot.checkpoint.objects import parts
from slurmspot.checkpoint.random_state import RandomState
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.state import State, take
from slurmspot.checkpoint.tagged import Encoded, encode
from slurmspot.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    SlurmspotError,
    UsageError,
)

__all__ = ["Checkpointer", "Held", "RandomState", "Restored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What :meth:`Checkpointer.restore` found.

    Attributes:
        step: the step whose state the objects now have.
        meta: what the save was given.
        rejected: (step, problem) of each newer checkpoint that did not verify.
        seconds: how long it took.
        fresh: per-rank objects that began anew on this rank, which the saved run did not have.
    """

    step: int
    meta: dict[str, Any]
    rejected: list[tuple[int, str]] = field(default_factory=list)
    seconds: float
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of all objects in host memory: see :meth:`Checkpointer.hold`."""

    states: Mapping[str, State]
    extras: Mapping[str, Mapping[str, torch.Tensor | None]]


class Checkpointer:
    """Saves and restores registered objects, on all ranks together.

    Args:
        folder: where the checkpoints lie; made at the first save.
        objects: name to anything with ``state_dict`` and ``load_state_dict``; the same names on
            every rank.
        keep: how many committed checkpoints to keep, at least 1.
        process_group: a gloo group that nothing else uses; None makes one of all ranks, if
            torch.distributed is initialised.
        per_rank: names of objects whose state differs from rank to rank; random states always
            count among them. Restored with another number of ranks, such an object needs a method
            ``fresh_state(seed)`` for ranks that the saved run did not have.
        emit: called as ``emit(event, step=…, **data)`` with the events of
            :mod:`slurmspot.events`, also from the background thread.
    """

    def __init__(
        self,
        folder: Path,
        objects: Mapping[str, Any],
        *,
        keep: int = 3,
        process_group: dist.ProcessGroup | None = None,
        per_rank: frozenset[str] = frozenset({"random"}),
        emit: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._folder = folder
        self._parts = parts(objects)
        if keep < 1:
            raise UsageError(f"keep={keep} would keep no checkpoint", fix="keep at least 1")
        self._keep = keep
        self._own_group = None
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = self._own_group = dist.new_group(backend="gloo")
        self._ranks = Ranks(process_group)
        random = {name for name, thing in objects.items() if isinstance(thing, RandomState)}
        self._per_rank = frozenset((per_rank & objects.keys()) | random)
        self._emit = emit
        self._thread: threading.Thread | None = None
        self._failure: CheckpointWriteError | None = None
        self._rejected: set[int] = set()
        # Those begun by this attempt are never among them, nor are those of later attempts, which
        # a process that is still running on a lost node would otherwise destroy.
        self._stale = self._ranks.reduce(lambda: steps.partials(folder), lambda found: found[0])

    def save(self, step: int, *, trigger: str, meta: Mapping[str, Any]) -> None:
        """Copy the state of all objects, then persist and commit it in the background.

        Collective. Waits first for the save in flight. Returns when the copy is taken: training
        may go on and change everything. A failure shows in :meth:`failed` and :meth:`wait`.

        Raises:
            UsageError: the step has more than eight digits.
        """
        begin = time.monotonic()
        target = self._folder / steps.step_name(step)
        self._emit("snapshot_begin", step=step, trigger=trigger)
        self._join()
        snapshot = self._snapshot(meta)
        self._emit("snapshot_end", step=step, stall_s=time.monotonic() - begin)
        self._thread = threading.Thread(
            target=self._persist,
            args=(step, target, snapshot, trigger),
            name="slurmspot-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in flight is committed: then every rank knows that it is durable.

        Raises:
            CheckpointWriteError: it failed; the same on every rank.
        """
        self._join()
        if failure := self.failed():
            raise failure

    def failed(self) -> CheckpointWriteError | None:
        """Why the last save that ended has failed, told once; None if it did not.

        Does not wait. All ranks are told the same, though one may be told a step later.
        """
        failure, self._failure = self._failure, None
        return failure

    def restore(self) -> Restored | None:
        """Load the newest checkpoint that verifies; the same on every rank. Collective.

        The folder is searched; nothing that merely points to a checkpoint is trusted.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none verifies.
            MismatchedCheckpointError: the newest intact one is of other objects.
        """
        begin = time.monotonic()
        self._join()
        found = self._ranks.reduce(
            lambda: list(steps.committed(self._folder)), lambda every: every[0]
        )
        rejected: list[tuple[int, str]] = []
        for step in found:
            path = self._folder / steps.step_name(step)
            try:
                loaded = loading.load(path, self._parts, ranks=self._ranks, per_rank=self._per_rank)
            except CorruptCheckpointError as error:
                rejected.append((step, error.why or error.what))
                continue
            self._rejected = {step for step, _ in rejected}
            return Restored(
                step=step,
                meta=loaded.metadata,
                rejected=rejected,
                seconds=time.monotonic() - begin,
                fresh=loaded.fresh,
            )
        if rejected:
            raise CorruptCheckpointError(
                f"none of {len(rejected)} checkpoints in {self._folder} is intact",
                why=f"step {rejected[0][0]}: {rejected[0][1]}",
                fix="move them away to begin again from the first step",
            )
        return None

    def hold(self) -> Held:
        """Copy everything registered, gradients included, to host memory."""
        return Held(
            states={name: self._take(name).copy() for name in self._parts},
            extras={name: part.extras() for name, part in self._parts.items()},
        )

    def put_back(self, held: Held) -> None:
        """Make everything registered what it was at :meth:`hold`, bit for bit."""
        for name, part in self._parts.items():
            part.load(held.states[name].copy().whole())
            part.put_back_extras(held.extras[name])

    def digest(self, names: Iterable[str] = ("model", "optimizer")) -> str:
        """XXH3-128, in hexadecimal, over name, type, shape and bytes of all tensors of ``names``.

        Equal for bitwise equal states, on whatever device and however sharded; names that are not
        registered are left out. Collective if any tensor is sharded.
        """
        summed = xxhash.xxh3_128()
        for name in names:
            if name in self._parts:
                for path, tensor in sorted(self._take(name).tensors.items()):
                    summed.update(host.digest(path, tensor, whole=True))
        return summed.hexdigest()

    def close(self) -> None:
        """Wait for the save in flight, and let go of the process group."""
        self._join()
        if self._own_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._own_group)
            self._own_group = None

    def _key(self, name: str) -> str:
        return loading.key_of(name, self._ranks.rank, per_rank=name in self._per_rank)

    def _take(self, name: str) -> State:
        return take(self._key(name), self._parts[name].state())

    def _snapshot(self, meta: Mapping[str, Any]) -> Callable[[], saving.Snapshot]:
        """Copy everything; an error is kept for the save, where every rank hears of it."""
        try:
            snapshot = saving.Snapshot(
                captures={name: self._capture(name) for name in self._parts},
                metadata=Encoded(encode(dict(meta), "meta")),
            )
        except Exception as error:  # noqa: BLE001 - raised again in the background
            return _raiser(error)
        return lambda: snapshot

    def _capture(self, name: str) -> saving.Capture:
        return saving.Capture(
            key=self._key(name),
            state=self._take(name).copy(),
            per_rank=name in self._per_rank,
            loose=frozenset(self._parts[name].loose(name)),
        )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _persist(
        self,
        step: int,
        target: Path,
        snapshot: Callable[[], saving.Snapshot],
        trigger: str,
    ) -> None:
        begin = time.monotonic()

        def on_written(size_bytes: int) -> None:
            seconds = time.monotonic() - begin
            self._emit("persist_end", step=step, size_bytes=size_bytes, seconds=seconds)

        try:
            saving.save(target, snapshot, ranks=self._ranks, on_written=on_written)
        except Exception as error:  # noqa: BLE001 - told by failed() and wait(), never lost
            self._failure = _failure(step, error)
            self._emit("save_failed", step=step, error=self._failure.why)
            return
        self._failure = None
        if self._ranks.rank == 0:
            self._emit("commit", step=step, tier=steps.REMOTE, trigger=trigger)
            with contextlib.suppress(OSError):  # what cannot be removed now is removed later
                self._prune(step)

    def _prune(self, saved: int) -> None:
        """Remove what is superseded by ``saved``, which is durable."""
        self._rejected.discard(saved)
        found = steps.committed(self._folder)
        kept = {*[step for step in found if step not in self._rejected][: self._keep], saved}
        for step, path in found.items():
            if step not in kept and not (step in self._rejected and step > min(kept)):
                steps.remove(path)
        while self._stale:
            steps.remove(self._stale.pop())


def _raiser(error: Exception) -> Callable[[], saving.Snapshot]:
    def get() -> saving.Snapshot:
        raise error

    return get


def _failure(step: int, error: Exception) -> CheckpointWriteError:
    if isinstance(error, SlurmspotError):
        why = "; ".join(filter(None, (error.what, error.why)))
        fix = error.fix
    else:
        why, fix = f"{type(error).__name__}: {error}", None
    failure = CheckpointWriteError(
        f"step {step} could not be saved; the checkpoint before it is untouched",
        why=why,
        fix=fix or "free space or repair the file system, if that is the cause",
    )
    failure.__cause__ = error
    return failure
