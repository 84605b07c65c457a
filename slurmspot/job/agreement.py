"""The ranks agree, at step boundaries, to save or to leave at the *same* step.

One all-reduce of four integers on a CPU group, started at one boundary and read at the next, so
that training never waits for it. Its price is that a notice takes effect one step later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

_FAR_MS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one rank wants, or what all have agreed on.

    Attributes:
        leave: a notice has arrived; save and leave.
        remaining_s: the shortest window that any rank knows of, seconds; None without a notice.
        save: a periodic checkpoint is due.
        failed: a save or a drain has failed.
    """

    leave: bool = False
    remaining_s: float | None = None
    save: bool = False
    failed: bool = False


class Agreement:
    """Collective: every rank calls :meth:`exchange` the same number of times.

    Args:
        group: a gloo group of all ranks that nothing else uses; None for a single process, which
            agrees with itself at once.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._pending: tuple[Work, torch.Tensor] | None = None

    def exchange(self, wish: Wish) -> Wish:
        """Put in this rank's wish; return what all ranks agreed on at the previous boundary."""
        if self._group is None:
            return wish
        agreed = self._read()
        self._start(wish)
        return agreed

    def _start(self, wish: Wish) -> None:
        import torch  # noqa: PLC0415 - this module is imported where torch may be absent
        import torch.distributed as dist  # noqa: PLC0415

        remaining_ms = _FAR_MS if wish.remaining_s is None else int(wish.remaining_s * 1000)
        flags = [int(wish.leave), int(wish.save), int(wish.failed)]
        votes = torch.tensor([_FAR_MS - remaining_ms, *flags])
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # noqa: S101 - async_op=True always returns a handle on a member
        self._pending = (work, votes)

    def _read(self) -> Wish:
        if self._pending is None:
            return Wish()
        work, votes = self._pending
        self._pending = None
        work.wait()
        urgency_ms, leave, save, failed = votes.tolist()
        return Wish(
            leave=bool(leave),
            remaining_s=(_FAR_MS - urgency_ms) / 1000 if leave else None,
            save=bool(save),
            failed=bool(failed),
        )

    def close(self) -> None:
        """Wait for the exchange in flight, so that no rank leaves it half done."""
        self._read()
