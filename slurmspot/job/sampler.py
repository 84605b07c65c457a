"""A data cursor that does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurmspot.errors import UsageError


class GlobalBatchSampler:
    """Yields this rank's share of each *global* batch: use it as a DataLoader's ``batch_sampler``.

    The order of an epoch depends on ``seed`` and the epoch alone, and the cursor counts samples
    over all ranks, so a run resumed on another number of ranks sees exactly the samples it had
    not seen. Iterating does not move the cursor (workers read ahead): the run loop calls
    :meth:`advance` once a step has really been made, and :meth:`next_epoch` after the last one. A
    last, incomplete batch is dropped.

    Args:
        size: number of samples in the data set.
        global_batch: samples per step over all ranks; divisible by ``world_size``.
        seed: of the shuffle; None keeps the data set's own order.
    """

    def __init__(
        self, size: int, global_batch: int, *, seed: int | None, rank: int = 0, world_size: int = 1
    ) -> None:
        if not 0 < global_batch <= size:
            raise UsageError(
                f"a global batch of {global_batch} does not fit a data set of {size} samples"
            )
        if global_batch % world_size:
            raise UsageError(
                f"a global batch of {global_batch} cannot be shared by {world_size} ranks",
                fix="choose a multiple of the number of ranks",
            )
        self._size = size
        self._global_batch = global_batch
        self._seed = seed
        self._rank = rank
        self._share = global_batch // world_size
        self.epoch = 0
        self.cursor = 0

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._size // self._global_batch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch)
        end = len(self) * self._global_batch
        for start in range(self.cursor, end, self._global_batch):
            mine = start + self._rank * self._share
            yield order[mine : mine + self._share]

    def _order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(self._size))
        import torch  # noqa: PLC0415 - keeps `import slurmspot` free of torch

        generator = torch.Generator()
        generator.manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._size, generator=generator).tolist()
        return order

    def advance(self) -> None:
        """One global batch has been trained on."""
        self.cursor += self._global_batch

    def next_epoch(self) -> None:
        """All batches of the epoch have been trained on."""
        self.epoch += 1
        self.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """Epoch, cursor in samples over all ranks, and what the order depends on."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "size": self._size,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position.

        Raises:
            UsageError: the position is of another data set or another shuffle.
        """
        for name, mine in (("size", self._size), ("seed", self._seed)):
            if state[name] != mine:
                raise UsageError(
                    f"the saved data cursor has {name} {state[name]}, this run has {mine}",
                    fix="resume with the data set and seed that the run was started with",
                )
        self.epoch = int(state["epoch"])
        self.cursor = int(state["cursor"])
