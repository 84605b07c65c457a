"""Doing one thing together: every rank works, the first decides, all see the same outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slurmspot.errors import CheckpointError, SlurmspotError

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: SlurmspotError | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Ranks:
    """The processes that share a checkpoint; ``group`` None means that this one is alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    @classmethod
    def every(cls, timeout: timedelta | None = None) -> Ranks:
        """All ranks of ``torch.distributed``, with a gloo group that nothing else uses. Collective.

        This process alone where there is no process group.

        Args:
            timeout: how long one rank waits for another; by default gloo's own, half an hour.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None)
        # Its name is a number that only grows: names made from the ranks come again once a group
        # is closed, and the next one would take the addresses of the old one for its own.
        return cls(dist.new_group(backend="gloo", timeout=timeout))

    def reduce(self, local: Callable[[], _T], decide: Callable[[list[_T]], _R]) -> _R:
        """Run ``local`` on every rank, then ``decide`` with all results on the first rank.

        An error anywhere is raised everywhere, and no rank is left waiting for another.

        Returns:
            What ``decide`` returned, on every rank.

        Raises:
            SlurmspotError: of the lowest rank that failed; other exceptions become a
                CheckpointError that names the rank.
        """
        mine = self._attempt(local)
        outcome = _Outcome()
        gathered = self._gather(mine)
        if self.rank == 0:
            outcome = self._attempt(lambda: decide([one.get() for one in gathered]))
        result: _R = self._broadcast(outcome).get()
        return result

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank; the same on all."""
        if self._alone():
            return mine
        votes = torch.tensor([int(mine)], device="cpu")
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return bool(votes.item())

    def close(self) -> None:
        """Let go of the group; ranks that wait for this one fail."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def _alone(self) -> bool:
        if self._group is None and self.size > 1:
            raise CheckpointError("the ranks no longer hear each other")
        return self._group is None

    def _attempt(self, work: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(value=work())
        except SlurmspotError as error:
            return _Outcome(error=error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            text = f"rank {self.rank}: {type(error).__name__}: {error}"
            failure = CheckpointError(text)
            failure.__cause__ = error
            return _Outcome(error=failure)

    def _gather(self, mine: _Outcome) -> list[_Outcome]:
        if self._alone():
            return [mine]
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine, everyone, dst=0, group=self._group)
        return everyone or []

    def _broadcast(self, outcome: _Outcome) -> _Outcome:
        if self._alone():
            return outcome
        box = [outcome]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]
