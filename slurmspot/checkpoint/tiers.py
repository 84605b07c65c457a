"""Two tiers: what is committed on the nodes' own disks at once is drained to the remote one behind.

A step on the local tier survives the loss of processes; on the remote tier, that of nodes too. One
step is drained at a time. While it is, only the newest later one waits: what it passes by is
never missed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from slurmspot.checkpoint import local, promotion, steps
from slurmspot.checkpoint.disk import REAL, Disk
from slurmspot.checkpoint.local import Candidate, LocalStorageWriter
from slurmspot.checkpoint.ownership import Owner
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.worker import Worker
from slurmspot.errors import (
    CheckpointError,
    CheckpointWriteError,
    CorruptCheckpointError,
    FencedError,
)

KEEP = 2
"""Checkpoints that a node keeps once the remote tier has them or newer ones."""

PATIENCE = timedelta(days=30)
"""How long one rank may wait for another in a drain. One that is gone is noticed at once."""

_NEVER = 10**9  # above every step
_UNKNOWN_BYTES_PER_S = 50 << 20
_MARGIN = 2.0


class Pace:
    """How long a checkpoint takes to be on a tier, from the slowest of the last three."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=3)

    def note(self, size_bytes: int, seconds: float) -> None:
        """A state of which this rank holds ``size_bytes`` has taken ``seconds``."""
        self._measured.append(max(1, size_bytes) / max(1e-6, seconds))

    def fits(self, size_bytes: int, within_s: float) -> bool:
        """Whether it will be there in time even if it takes twice as long as it should."""
        bytes_per_s = min(self._measured, default=_UNKNOWN_BYTES_PER_S)
        return _MARGIN * size_bytes / bytes_per_s <= within_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A step that lies on the local tier, to be drained.

    Attributes:
        size_bytes: of the state that this rank holds.
    """

    step: int
    trigger: str
    size_bytes: int


class LocalTier:
    """The nodes' own disks, and the drain from there to the remote tier.

    Collective, on all ranks alike; the drain has threads of its own.

    Args:
        folder: on this node's disk; it must exist.
        node: this node's name; ranks that give the same one share the folder.
        ranks: with a group that nothing else uses, and :data:`PATIENCE`.
        owner: of the run; its checkpoints are the remote tier.
        vital: objects whose state must be the same where a step is on the remote tier already.
        arrived: called on every rank, with the seconds it took, when a step is on the remote tier.
        failed: called on every rank with the reason why a step could not be brought there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: str,
        ranks: Ranks,
        owner: Owner,
        vital: Collection[str],
        emit: Callable[..., None],
        arrived: Callable[[Order, float], None],
        failed: Callable[[CheckpointWriteError], None],
        disk: Disk = REAL,
    ) -> None:
        self._nodes, key = ranks.reduce(lambda: node, lambda every: (every, owner.key()))
        self._root = folder / steps.node_name(key, node)
        self._mine = self._root / owner.desk.name
        self._node = node
        self._ranks = ranks
        self._owner = owner
        self._vital = vital
        self._emit = emit
        self._arrived = arrived
        self._failed = failed
        self._disk = disk
        self._leads = self._nodes.index(node) == ranks.rank
        self._inherited: list[Path] = []
        with contextlib.suppress(OSError):
            self._inherited = steps.entries(self._root)
        self._pruning = threading.Lock()
        self._ordering = threading.Lock()
        self._busy = False  # this and the next are the first rank's to know
        self._waiting: Order | None = None
        self._wanted_from = 0
        self._draining: int | None = None
        self._dead = ""  # why this rank can drain nothing any more
        self._drainer = Worker("slurmspot-drain")
        self._drained: threading.Event | None = None

    def writer(self, step: int) -> LocalStorageWriter:
        """What writes this node's part of ``step``."""
        return LocalStorageWriter(
            self._mine / steps.step_name(step),
            nodes=self._nodes,
            commits=self._leads,
            fence=self._owner.check,
        )

    def committed(self, order: Order, saving: Ranks) -> None:
        """A step has been committed on all nodes: drain it, now or later.

        Args:
            saving: the ranks with the group of the thread that saves.
        """

        def decide(dead: list[str]) -> tuple[str, bool]:
            problem = next(filter(None, dead), "")
            return problem, not problem and self._is_next(order)

        problem, is_next = saving.reduce(lambda: self._dead, decide)
        if problem:
            self._tell(order, problem, fix="start the job again: nothing is drained any more")
        if is_next:
            self._drained = self._drainer.do(lambda: self._drain(order))

    def is_draining(self, step: int) -> bool:
        """Whether ``step`` is on its way to the remote tier, and still wanted there."""
        return step == self._draining and step >= self._wanted_from

    def give_up(self, *, before: int) -> None:
        """Drain no step below ``before`` any more; one that is on its way is dropped."""
        self._wanted_from = before

    def wait(self, within_s: float | None = None) -> None:
        """Wait until nothing is left to drain; give up what is not there ``within_s`` seconds."""
        if self._drained is not None and not self._drained.wait(within_s):
            wanted, self._wanted_from = self._wanted_from, _NEVER
            self._drained.wait()
            self._wanted_from = wanted

    def close(self) -> None:
        """Wait for the drain; let go of the group."""
        self.wait()
        self._ranks.close()

    def candidates(self) -> list[Candidate]:
        """What can be put together from the nodes that are here, the newest first. Collective."""
        return self._ranks.reduce(self._survey, self._gathered)

    def promote(self, candidate: Candidate, unwanted: Callable[[], bool] = lambda: False) -> None:
        """Bring a checkpoint from the nodes to the remote tier. Collective.

        Raises:
            CorruptCheckpointError: it cannot be had.
            CheckpointError: it cannot be brought there, and stays on the nodes.
        """
        if candidate.problem:
            raise CorruptCheckpointError(candidate.problem)
        try:
            with self._owner.losing():
                promotion.promote(
                    candidate,
                    self._root,
                    self._owner.folder,
                    desk=self._owner.desk,
                    ranks=self._ranks,
                    vital=self._vital,
                    unwanted=unwanted,
                    disk=self._disk,
                )
        except CorruptCheckpointError:
            raise
        except CheckpointError:
            self._inherited = [p for p in self._inherited if p.name != candidate.attempt]
            raise

    def superseded(self, by: int, *, keep: int = KEEP) -> None:
        """Remove what is not needed now that this attempt has ``by`` on the remote tier.

        Of its own steps the newest ``keep`` stay, and all that are newer than ``by``.
        """
        if not self._leads:
            return
        with self._pruning, contextlib.suppress(OSError, FencedError):
            self._owner.check()
            while self._inherited:
                steps.remove(self._inherited.pop())
            found = steps.committed(self._mine)
            for step in list(found)[keep:]:
                if step <= by:
                    steps.remove(found[step])
            if not keep:
                self._mine.rmdir()
                self._root.rmdir()

    def make_room(self, saving: Ranks) -> bool:
        """Remove this attempt's own steps but the newest ``KEEP``, drained or not. Collective.

        Args:
            saving: the ranks with the group of the thread that saves.

        Returns:
            Whether there was any, on any node.
        """
        return saving.reduce(self._thin_out, any)

    def _thin_out(self) -> bool:
        removed = False
        if self._leads:
            with self._pruning, contextlib.suppress(OSError, FencedError):
                self._owner.check()
                for step, path in list(steps.committed(self._mine).items())[KEEP:]:
                    if step != self._draining:
                        steps.remove(path)
                        removed = True
        return removed

    def _survey(self) -> local.Survey:
        return local.survey(self._root, self._node)

    def _gathered(self, surveys: list[local.Survey]) -> list[Candidate]:
        remote = local.files_in(self._owner.folder) | local.files_in(self._owner.desk)
        return local.gathered(surveys, frozenset(remote))

    def _is_next(self, order: Order) -> bool:
        """Whether nothing is being drained; otherwise ``order`` waits until that is done."""
        with self._ordering:
            if not self._busy:
                self._busy = True
                return True
            passed, self._waiting = self._waiting, order
        if passed is not None:
            self._emit("drain_skipped", step=passed.step)
        return False

    def _following(self) -> Order | None:
        with self._ordering:
            order, self._waiting = self._waiting, None
            self._busy = order is not None
        return order

    def _drain(self, order: Order | None) -> None:
        """Drain ``order`` and whatever has come to wait meanwhile."""
        while order is not None:
            self._drain_one(order)
            try:
                order = self._ranks.reduce(lambda: None, lambda _: self._following())
            except Exception as error:  # noqa: BLE001 - told at every later commit
                self._dead = f"the drain broke down: {error}"
                self._ranks.close()  # who still waits for this rank learns of it
                return

    def _drain_one(self, order: Order) -> None:
        begin = time.monotonic()
        self._draining = order.step
        try:
            with self._owner.losing():
                found = self._ranks.reduce(
                    self._survey, lambda surveys: self._own(local.gathered(surveys), order.step)
                )
            self.promote(found, unwanted=lambda: order.step < self._wanted_from)
        except FencedError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - told by the checkpointer, never lost
            self._not_drained(order, error)
        else:
            self._arrived(order, time.monotonic() - begin)

    def _own(self, found: list[Candidate], step: int) -> Candidate:
        name = self._owner.desk.name
        for one in found:
            if (one.attempt, one.step) == (name, step):
                return one
        raise CorruptCheckpointError(f"step {step} is no longer on the nodes' own disks")

    def _not_drained(self, order: Order, error: Exception) -> None:
        if isinstance(error, promotion.AbandonedError) or order.step < self._wanted_from:
            if self._ranks.rank == 0:
                self._emit("drain_skipped", step=order.step)
            return
        fix = "free space or repair the file system of the run folder"
        self._tell(order, str(error), fix=fix)

    def _tell(self, order: Order, problem: str, *, fix: str) -> None:
        self._emit("drain_failed", step=order.step, error=problem)
        self._failed(
            CheckpointWriteError(
                f"step {order.step} is on the nodes' own disks alone", why=problem, fix=fix
            )
        )
