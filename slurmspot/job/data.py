"""Where a run stands in its data, for any loader.

A sampler that keeps its own cursor (:class:`slurmspot.job.sampler.GlobalBatchSampler`, or anything
registered that has ``advance`` and
``next_epoch``) or a registered loader with a ``state_dict`` is moved, not
replayed. Any other loader is replayed: the random states at the start of the epoch are put back,
so that it draws the same order again, and the batches that were trained on are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from slurmspot.errors import UsageError
from slurmspot.job.notice import shielded


class Stateful(Protocol):
    """Whatever can be registered with a run."""

    def state_dict(self) -> Mapping[str, Any]:
        """The whole state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a saved state over."""


class Cursor:
    """Epoch and batch within it, and the random states at the start of that epoch.

    Args:
        random: the random states of this process.
    """

    def __init__(self, random: Stateful) -> None:
        self._random = random
        self._epoch_random = random.state_dict()
        self._resumed: Mapping[str, Any] | None = None
        self._batches: Iterator[Any] | None = None
        self.epoch = 0
        self.batch = 0

    def batches(self, loader: Iterable[Any], *, keeps_place: bool) -> Iterator[Any]:
        """The rest of the current epoch. The caller counts with :meth:`advance`.

        Args:
            keeps_place: the loader itself continues where its saved state says.

        Raises:
            UsageError: the loader would have to be replayed, and cannot be.
        """
        if not keeps_place:
            _check_replayable(loader)
        resumed, self._resumed = self._resumed, None
        skip = 0 if keeps_place else self.batch
        if self.batch == 0:
            if resumed is not None:
                self._random.load_state_dict(resumed)
            self._epoch_random = self._random.state_dict()
        elif skip:
            self._random.load_state_dict(self._epoch_random)
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        with shielded():
            batches = self._batches = iter(loader)
        for _ in range(skip):
            next(batches, None)
        if self.batch and resumed is not None:
            # Making the iterator drew random numbers that the uninterrupted run did not draw here.
            self._random.load_state_dict(resumed)
        yield from batches

    def advance(self) -> None:
        """One more batch has been trained on."""
        self.batch += 1

    def next_epoch(self) -> None:
        """The epoch's batches have all been trained on."""
        self.epoch += 1
        self.batch = 0
        self._resumed = None  # a rehearsal has put a state back that this epoch went on from

    def close(self) -> None:
        """End the loader's workers: they heed no signal, and leaving Python would wait for them."""
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def state_dict(self) -> dict[str, Any]:
        """Position and random states of this process."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "now": self._random.state_dict(),
            "epoch_start": self._epoch_random,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; takes effect with the next call of :meth:`batches`."""
        self.epoch = int(state["epoch"])
        self.batch = int(state["batch"])
        self._epoch_random = state["epoch_start"]
        self._resumed = state["now"]
        self._random.load_state_dict(state["now"])


def _check_replayable(loader: Iterable[Any]) -> None:
    """Refuse, at the first step of a run, what could not be resumed at a later one."""
    sampler = getattr(loader, "sampler", None)
    if getattr(loader, "persistent_workers", False):
        why = "with persistent_workers it draws other random numbers after the first epoch"
    elif any(getattr(one, "generator", None) is not None for one in (loader, sampler)):
        why = "it draws its order from a generator of its own, which is not saved"
    else:
        return
    raise UsageError(
        "the order of this loader could not be repeated after an interruption",
        why=why,
        fix="use slurmspot.job.sampler.GlobalBatchSampler, or leave that option out",
    )
