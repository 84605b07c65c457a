"""What a training loop uses: save in the background, restore the newest that verifies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from slurmspot.checkpoint import host, loading, restoring, saving, steps
from slurmspot.checkpoint.copying import Copying, Steadiness
from slurmspot.checkpoint.disk import REAL, Disk
from slurmspot.checkpoint.local import TURN
from slurmspot.checkpoint.objects import ModulePart, OptimizerPart, parts
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.random_state import RandomState
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.restoring import Restored
from slurmspot.checkpoint.staging import Staging
from slurmspot.checkpoint.state import State, take
from slurmspot.checkpoint.storage import Hdf5StorageWriter
from slurmspot.checkpoint.tagged import Encoded, encode
from slurmspot.checkpoint.tiers import KEEP, PATIENCE, LocalTier, Order, Pace
from slurmspot.checkpoint.worker import Worker
from slurmspot.errors import (
    CheckpointError,
    CheckpointWriteError,
    FencedError,
    UsageError,
)

__all__ = ["Checkpointer", "Held", "RandomState", "Restored"]


@dataclass(frozen=True, slots=True)
class Held:
    """A copy of all objects in host memory: see :meth:`Checkpointer.hold`.

    Attributes:
        extras: by object, copies of what is no part of its state.
        staging: the memory that ``states`` lie in, good as long as ``use`` is its last.
    """

    states: Mapping[str, State]
    extras: Mapping[str, Mapping[str, torch.Tensor | None]]
    staging: Staging
    use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """What the background needs to know of one save.

    Attributes:
        local: commit it on the nodes' own disks, and drain it from there.
        vital: objects that an intact checkpoint of that step must have the same tensors of.
        stall_s: seconds that training has waited up to here.
    """

    order: Order
    local: bool
    vital: frozenset[str]
    snapshot: Callable[[], saving.Snapshot]
    copying: Copying
    stall_s: float


_T = TypeVar("_T")
_trainable = torch.inference_mode(mode=False)
"""Makes tensors that training can use, also where a method is called in inference mode."""


class Checkpointer:
    """Saves and restores registered objects, on all ranks together.

    Memory: each rank holds one copy of its part of the state on the host, allocated at the first
    save and used again; writing takes no further copy. :attr:`staging_bytes` tells. One save at a
    time is therefore unfinished; what the nodes have committed on their own disks meanwhile
    waits there to be drained, in no memory.

    Args:
        folder: where the checkpoints lie; made at the first save.
        objects: name to anything with ``state_dict`` and ``load_state_dict``; the same names on
            every rank.
        keep: how many committed checkpoints to keep, at least 1.
        per_rank: names of objects whose state differs from rank to rank; random states always
            count among them. Restored with another number of ranks, such an object needs a method
            ``fresh_state(seed)`` for ranks that the saved run did not have.
        claim: makes this the only checkpointer that may write to ``folder`` from here on.
        local: a folder on this node's own disk, which must exist: periodic saves are committed
            there first and drained to ``folder`` in the background. Needs ``claim``.
        node: this node's name; ranks that give the same one share ``local``.
        disk: the calls that write ``folder``, and that read what is drained there.
        emit: called as ``emit(event, step=…, **data)`` with the events of
            :mod:`slurmspot.events`, also from the background thread.
    """

    def __init__(
        self,
        folder: Path,
        objects: Mapping[str, Any],
        *,
        keep: int = 3,
        per_rank: frozenset[str] = frozenset({"random"}),
        claim: Claim | None = None,
        local: Path | None = None,
        node: str = "",
        disk: Disk = REAL,
        emit: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        self._folder = folder = Path(folder).absolute()  # whatever training makes of its own
        self._parts = parts(objects)
        if keep < 1:
            raise UsageError(f"keep={keep} would keep no checkpoint", fix="keep at least 1")
        if local is not None and claim is None:
            raise UsageError("a local tier needs a claim", why="it tells runs apart")
        self._keep = keep
        self._ranks = Ranks.every()
        self._ranks.reduce(lambda: local is not None, _all_alike)
        self._votes = Ranks.every()  # the training thread's own: the other one saves meanwhile
        random = {name for name, thing in objects.items() if isinstance(thing, RandomState)}
        self._per_rank = frozenset((per_rank & objects.keys()) | random)
        # What a training is for: the models and optimizers, by whatever name.
        kinds = (ModulePart, OptimizerPart)
        found = [name for name, part in self._parts.items() if isinstance(part, kinds)]
        self._vital = frozenset(found or self._parts.keys() - self._per_rank)
        self._emit = emit
        self._staging = Staging()
        self._saver = Worker("slurmspot-checkpoint")
        self._saving: threading.Event | None = None
        self._copying: Copying | None = None
        self._closed = False
        self._known = Steadiness()
        self._unhook = [part.before_step(self._before_step) for part in self._parts.values()]
        self._failure: CheckpointWriteError | None = None  # of the last save
        self._untold: list[CheckpointWriteError] = []
        self._news = threading.Condition()
        self._writing: int | None = None  # the step that is on its way to the remote tier
        self._rejected: set[int] = set()
        self._pruning = threading.Lock()
        self._pace = Pace()
        self._disk = disk
        self._owner = (
            None
            if claim is None
            else self._ranks.reduce(lambda: None, lambda _: claim.take(folder))
        )
        self._desk = None if self._owner is None else self._owner.desk
        self._local: LocalTier | None = None
        if local is not None and self._owner is not None:
            self._local = LocalTier(
                local.absolute(),
                node=node,
                ranks=Ranks.every(PATIENCE),
                owner=self._owner,
                vital=self._vital,
                emit=emit,
                arrived=self._arrived,
                failed=self._not_drained,
                disk=disk,
            )
        # What others have left unfinished: those begun by this attempt are never among them.
        self._stale = self._ranks.reduce(self._unfinished, lambda found: found[0])

    @property
    def staging_bytes(self) -> int:
        """Host memory that this rank holds for copies of its state."""
        return self._staging.size_bytes

    @_trainable
    def save(
        self,
        step: int,
        *,
        trigger: str,
        meta: Mapping[str, Any],
        may_skip: bool = False,
        within_s: float | None = None,
        node_stays: bool = True,
        repeated: bool = False,
        blocking: bool = False,
    ) -> bool:
        """Copy the state of all objects, then persist and commit it in the background.

        Collective. Returns when training may go on and change everything, except that the copy of
        what only registered optimizers move may still be under way: their next step waits for it.
        A failure shows in :meth:`failed` and :meth:`wait`.

        Waits for the save before it, if that is unfinished.

        With a local tier, a save for a notice goes to the remote one only if it will be there in
        time, or if a node goes away with its disk; a final one always does.

        Args:
            may_skip: rather do nothing than wait, on all ranks alike.
            within_s: seconds until this process may be killed; None if it is not known to be.
            node_stays: whether this node is there for the next attempt, as far as one knows.
            repeated: this step was saved before, and what is intact of that may stand in for this,
                even if models or optimizers have changed since; else that is an error.
            blocking: return once it is committed, as :meth:`wait` does. Sooner than by waiting
                for it: what is on the host is written from where it lies.

        Returns:
            Whether a save was begun.

        Raises:
            UsageError: the step is no whole number of up to eight digits, or this is closed.
            CheckpointWriteError: it was to block, and failed; the same on every rank.
        """
        begin = time.monotonic()
        steps.step_name(step)
        if self._closed:
            raise UsageError("this checkpointer is closed", fix="save before, or make another")
        self._check_ranks()
        before = self._saving
        if before is not None and may_skip and self._votes.any(not before.is_set()):
            self._emit("save_skipped", step=step, trigger=trigger)
            return False
        self._emit("snapshot_begin", step=step, trigger=trigger)
        self._join()
        snapshot, copying = self._snapshot(meta, still=blocking)
        order = Order(step=step, trigger=trigger, size_bytes=copying.size_bytes)
        save = _Save(
            order=order,
            local=self._goes_local(order, within_s, node_stays=node_stays),
            vital=frozenset() if repeated else self._vital,
            snapshot=snapshot,
            copying=copying,
            stall_s=time.monotonic() - begin,
        )
        self._saving = self._saver.do(lambda: self._persist(save))
        self._copying = copying
        if blocking:
            try:
                self.wait()
            except BaseException:  # an interrupt, after which training may go on
                copying.abandon()
                raise
        return True

    def wait(self) -> None:
        """Wait until the save in flight is committed: then every rank knows that it is durable.

        Raises:
            CheckpointWriteError: it failed; the same on every rank.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            with self._news, contextlib.suppress(ValueError):
                self._untold.remove(failure)
            raise failure

    def drain(self, within_s: float | None = None) -> None:
        """Wait until all that is on the nodes' disks is on the remote tier too.

        What is not there ``within_s`` seconds is given up; it stays on the nodes' disks.
        """
        if self._local is not None:
            self._local.wait(within_s)

    def failed(self, *, within_s: float = 0.0) -> CheckpointWriteError | None:
        """Why a save or drain has failed, each told once, the earliest first; None if none has.

        All ranks are told the same, but not at the same moment: let them agree before they do
        anything about it.

        Args:
            within_s: how long to wait for it.
        """
        with self._news:
            self._news.wait_for(lambda: self._untold, within_s)
            return self._untold.pop(0) if self._untold else None

    @_trainable
    def restore(self) -> Restored | None:
        """Load the newest checkpoint that verifies; the same on every rank. Collective.

        The folder is searched; nothing that merely points to a checkpoint is trusted. One on the
        nodes' disks that is newer, and complete over the nodes that are here, is first brought to
        the remote tier.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none verifies.
            MismatchedCheckpointError: the newest intact one is of other objects.
            CheckpointWriteError: one on the nodes' disks cannot be brought to the remote tier,
                even after what killed saves have left there was removed.
        """
        self._check_ranks()
        self._join()
        self.drain()
        restored = self._with_room(self._restore, CheckpointWriteError)
        if restored is not None:
            self._rejected = {step for step, _ in restored.rejected} - {restored.step}
        return restored

    def _restore(self) -> Restored | None:
        return restoring.restore(
            self._folder,
            self._parts,
            ranks=self._ranks,
            per_rank=self._per_rank,
            local=self._local,
            promoted=self._promoted,
        )

    @_trainable
    def hold(self) -> Held:
        """Copy everything registered, gradients included, to host memory.

        Waits for the save in flight and takes its memory: the copy lasts until the next save.
        """
        self._join()
        states = {name: self._take(name) for name in self._parts}
        rooms, copying = self._copy(states.values())
        copying.carry_out()
        self._copying = copying
        return Held(
            states={name: state.at(rooms) for name, state in states.items()},
            extras={name: part.extras() for name, part in self._parts.items()},
            staging=self._staging,
            use=self._staging.uses,
        )

    @_trainable
    def put_back(self, held: Held) -> None:
        """Make everything registered what it was at :meth:`hold`, bit for bit.

        Raises:
            UsageError: something was saved or held since, which took the memory.
        """
        if held.use != held.staging.uses:
            raise UsageError("what was held is gone", why="a later save or hold took its memory")
        self._join()
        for name, part in self._parts.items():
            state = held.states[name]
            part.load((state.copy() if part.keeps else state).whole())
            part.put_back_extras(held.extras[name])

    def digest(self, names: Iterable[str] | None = None) -> str:
        """XXH3-128, in hexadecimal, over name, type, shape and bytes of all tensors of ``names``.

        Equal for bitwise equal states, on whatever device and however sharded; names that are not
        registered are left out. Collective if any tensor is sharded.

        Args:
            names: default: every model and optimizer; all that ranks share where there is none.

        Returns:
            An empty text if there is no tensor at all: then there is nothing to compare.
        """
        tensors = [
            (path, tensor)
            for name in (sorted(self._vital) if names is None else names)
            if name in self._parts
            for path, tensor in sorted(self._take(name).tensors.items())
        ]
        summed = xxhash.xxh3_128()
        for path, tensor in tensors:
            summed.update(host.digest(path, tensor, whole=True))
        return summed.hexdigest() if tensors else ""

    def close(self) -> None:
        """Wait for the save and the drain in flight; let go of optimizers, memory and groups."""
        self._join()
        if self._local is not None:
            self._local.close()
        self._closed = True
        for unhook in self._unhook:
            unhook()
        self._staging = Staging()
        self._votes.close()
        self._ranks.close()

    def _goes_local(self, order: Order, within_s: float | None, *, node_stays: bool) -> bool:
        """Whether a save goes to the nodes' own disks first; the same on every rank."""
        if self._local is None:
            return False
        if order.trigger not in {"notice", "final"}:
            return True
        # This one needs the remote tier to itself. The final one may be of a step that has been
        # saved before, and stands in for the drain of it.
        final = order.trigger == "final"
        self._local.give_up(before=order.step + final)
        if final:
            return False
        late = within_s is not None and not self._pace.fits(order.size_bytes, within_s)
        return self._votes.any(late) and not self._votes.any(not node_stays)

    def _key(self, name: str) -> str:
        return loading.key_of(name, self._ranks.rank, per_rank=name in self._per_rank)

    def _take(self, name: str) -> State:
        return take(self._key(name), self._parts[name].state())

    def _snapshot(
        self, meta: Mapping[str, Any], *, still: bool
    ) -> tuple[Callable[[], saving.Snapshot], Copying]:
        """Copy everything; an error is kept for the save to tell every rank.

        Args:
            still: nothing will change before the save is over.
        """
        try:
            turn = {} if self._owner is None else {TURN: self._owner.turn}
            metadata = Encoded(encode({**meta, **turn}, "meta"))
            states = {name: self._take(name) for name in self._parts}
            self._check_whole(states)
            loose = {name: frozenset(part.loose(name)) for name, part in self._parts.items()}
            places, copying = self._copy(states.values(), late=True, still=still)
        except Exception as error:  # noqa: BLE001 - raised again in the background
            nothing = Copying({}, {}, movers=(), known=self._known, late=False)
            return _raiser(error), nothing

        def snapshot() -> saving.Snapshot:
            captures = {
                name: saving.Capture(
                    key=self._key(name),
                    state=state.at(places),
                    per_rank=name in self._per_rank,
                    loose=loose[name],
                )
                for name, state in states.items()
            }
            return saving.Snapshot(captures=captures, metadata=metadata, ready=copying.ready)

        return snapshot, copying

    def _check_ranks(self) -> None:
        if self._ranks.size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "this checkpointer knows of no other rank",
                why="it was made before torch.distributed was initialised",
                fix="make it after init_process_group()",
            )

    def _check_whole(self, states: Mapping[str, State]) -> None:
        """Refuse a state that lacks parameters which an optimizer moves.

        Where an object of another kind has tensors, these may be they.
        """
        for name, part in self._parts.items():
            if (count := part.strangers()) and not any(
                states[other].tensors for other in self._parts.keys() - self._vital - self._per_rank
            ):
                raise CheckpointWriteError(
                    f"{name} moves {count} parameters that are in no registered object",
                    why="they would begin anew after a restart",
                    fix="register the module that has them, too",
                )

    def _copy(
        self, states: Iterable[State], *, late: bool = False, still: bool = False
    ) -> tuple[Mapping[str, torch.Tensor], Copying]:
        """Where each tensor will be on the host, and the copying of those that must be copied."""
        tensors = {path: one for state in states for path, one in state.tensors.items()}
        moving = {path: one for path, one in tensors.items() if one.is_cuda} if still else tensors
        rooms = self._staging.rooms(moving)
        movers = set().union(*(part.moved_by_step() for part in self._parts.values()))
        copying = Copying(tensors, rooms, movers=movers, known=self._known, late=late)
        return {**tensors, **rooms}, copying

    def _join(self) -> None:
        """Wait until no save is in flight."""
        self._settle()
        if self._saving is not None:  # kept: whether there was one is the same on every rank
            self._saving.wait()

    def _settle(self) -> Copying | None:
        """Wait until everything registered may change."""
        copying = self._copying
        if copying is not None:
            copying.settle()
            self._copying = None  # not before: an interrupted step is tried again
        return copying

    def _before_step(self) -> None:
        copying = self._settle()
        if copying is not None:
            begin = time.monotonic()
            if count := copying.look():
                self._emit("snapshot_look", tensors=count, seconds=time.monotonic() - begin)

    def _persist(self, save: _Save) -> None:
        copied = self._copy_beside(save)
        begin = time.monotonic()

        def confirm() -> None:
            copied()
            save.copying.confirm()

        def on_written(size_bytes: int) -> None:
            seconds = time.monotonic() - begin
            self._emit("persist_end", step=save.order.step, size_bytes=size_bytes, seconds=seconds)

        def write(writer: Hdf5StorageWriter) -> None:
            with contextlib.nullcontext() if self._owner is None else self._owner.losing():
                saving.save(
                    writer,
                    save.snapshot,
                    step=save.order.step,
                    ranks=self._ranks,
                    on_written=on_written,
                    confirm=confirm,
                )

        try:
            if not (save.local and self._saved_locally(save, write)):
                self._save_remotely(save, write)
        except Exception as error:  # noqa: BLE001 - told by failed() and wait(), never lost
            copied()
            self._failure = saving.failure(save.order.step, error)
            self._emit("save_failed", step=save.order.step, error=self._failure.why)
            self._tell(self._failure)
            return
        self._failure = None

    def _save_remotely(self, save: _Save, write: Callable[[Hdf5StorageWriter], None]) -> None:
        """Commit on the remote tier; a notice's on the nodes' disks if that is all there is."""
        target = self._folder / steps.step_name(save.order.step)
        begin = time.monotonic()

        def attempt() -> None:
            write(
                Hdf5StorageWriter(
                    target,
                    keep_existing=True,
                    vital=save.vital,
                    desk=self._desk,
                    disk=self._disk,
                )
            )

        self._writing = save.order.step
        try:
            self._with_room(attempt, CheckpointError)
        except FencedError:
            raise
        except CheckpointError:
            if save.order.trigger == "notice" and self._saved_locally(save, write):
                return
            raise
        finally:
            self._writing = None
        self._arrived(save.order, time.monotonic() - begin)

    def _copy_beside(self, save: _Save) -> Callable[[], None]:
        """Copy while the first of it is written already; return what waits for the end of it."""
        copier = threading.Thread(
            target=self._copy_rest, args=(save,), name="slurmspot-copy", daemon=True
        )
        try:
            copier.start()
        except RuntimeError:  # no further thread can be had: copy first, and write then
            self._copy_rest(save)
            return lambda: None
        return copier.join

    def _copy_rest(self, save: _Save) -> None:
        stall_s = save.stall_s + save.copying.carry_out()
        self._emit("snapshot_end", step=save.order.step, stall_s=stall_s)

    def _saved_locally(self, save: _Save, write: Callable[[Hdf5StorageWriter], None]) -> bool:
        """Commit on the nodes' disks, if there are any that take it."""
        if self._local is None:
            return False
        try:
            try:
                write(self._local.writer(save.order.step))
            except CheckpointError:
                if not self._local.make_room(self._ranks):
                    raise
                write(self._local.writer(save.order.step))
        except FencedError:
            raise
        except CheckpointError as error:
            if self._ranks.rank == 0:
                self._emit("save_failed", step=save.order.step, tier=steps.LOCAL, error=str(error))
            return False
        if self._ranks.rank == 0:
            self._emit("commit", step=save.order.step, tier=steps.LOCAL, trigger=save.order.trigger)
        self._local.committed(save.order, self._ranks)
        return True

    def _promoted(self, step: int) -> None:
        if self._ranks.rank == 0:
            self._emit("commit", step=step, tier=steps.REMOTE, trigger="restore")

    def _arrived(self, order: Order, seconds: float) -> None:
        """A step is on the remote tier."""
        self._pace.note(order.size_bytes, seconds)
        if self._ranks.rank == 0:
            self._emit("commit", step=order.step, tier=steps.REMOTE, trigger=order.trigger)
            # What cannot be removed now is removed later; what is another's, never.
            with self._pruning, contextlib.suppress(OSError):
                self._prune(order.step)
        if self._local is not None:
            self._local.superseded(order.step, keep=0 if order.trigger == "final" else KEEP)

    def _not_drained(self, failure: CheckpointWriteError) -> None:
        if self._ranks.rank == 0:
            self._drop_stale()  # the next one may find room then
        self._tell(failure)

    def _tell(self, failure: CheckpointWriteError) -> None:
        with self._news:
            self._untold.append(failure)
            self._news.notify_all()

    def _unfinished(self) -> set[Path]:
        """Partial checkpoints on the remote tier that no other attempt may be writing."""
        return steps.partials(self._folder) | (steps.partials(self._desk) if self._desk else set())

    def _prune(self, saved: int) -> None:
        """Remove what is superseded by ``saved``, which is durable."""
        self._rejected.discard(saved)
        found = steps.committed(self._folder)
        kept = {*[step for step in found if step not in self._rejected][: self._keep], saved}
        for step, path in found.items():
            if step not in kept and not (step in self._rejected and step > min(kept)):
                steps.remove(path, self._desk)
        self._remove_stale()
        for step, path in steps.traces(self._desk) if self._desk else ():
            busy = step == self._writing or (self._local and self._local.is_draining(step))
            if step <= saved and not busy:
                steps.remove(path)  # a drain was given up

    def _with_room(self, work: Callable[[], _T], refused: type[CheckpointError]) -> _T:
        """Do it; if the remote tier refuses it, make room there and try once more. Collective."""
        try:
            return work()
        except FencedError:
            raise
        except refused:
            if not self._ranks.reduce(lambda: None, lambda _: self._drop_stale()):
                raise
        return work()

    def _drop_stale(self) -> bool:
        """Make room on the remote tier; whether there was anything that nobody needs."""
        with self._pruning, contextlib.suppress(OSError):
            return self._remove_stale()
        return False

    def _remove_stale(self) -> bool:
        found = bool(self._stale)
        while self._stale:
            steps.remove(self._stale.pop())
        return found


def _all_alike(tiered: list[bool]) -> None:
    if len(set(tiered)) > 1:
        raise UsageError(
            "some ranks have a local tier, and some have none",
            fix="set SLURMSPOT_LOCAL alike on all nodes, or on none",
        )


def _raiser(error: Exception) -> Callable[[], saving.Snapshot]:
    def get() -> saving.Snapshot:
        raise error

    return get
