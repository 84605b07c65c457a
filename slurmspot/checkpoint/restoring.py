"""Find what to go on from: the newest checkpoint that verifies, on whichever tier survived.

What the nodes that are here hold is looked at first. If it is newer, and each of its files can be
had, from a node or from a drain that was cut short, it is brought to the remote tier and then
loaded from there like any other: there is one way to load.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmspot.checkpoint import loading, manifest, steps
from slurmspot.checkpoint.local import Candidate, turn_of
from slurmspot.checkpoint.objects import Part
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.tiers import LocalTier
from slurmspot.errors import CheckpointError, CorruptCheckpointError, FencedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What :meth:`Checkpointer.restore` found.

    Attributes:
        step: the step whose state the objects now have.
        meta: what the save was given, and the ``turn`` of the owner that saved it, if it had one.
        tier: where it was: on the nodes' own disks (``local``), or ``remote``.
        rejected: (step, problem) of each newer checkpoint that did not verify.
        passed_over: (step, problem) of what lay on the nodes' disks, newer but of no use.
        seconds: how long it took.
        fresh: per-rank objects that began anew on this rank, which the saved run did not have.
    """

    step: int
    meta: dict[str, Any]
    tier: str = steps.REMOTE
    rejected: list[tuple[int, str]] = field(default_factory=list)
    passed_over: list[tuple[int, str]] = field(default_factory=list)
    seconds: float
    fresh: tuple[str, ...] = ()


def restore(
    folder: Path,
    parts: Mapping[str, Part],
    *,
    ranks: Ranks,
    per_rank: frozenset[str],
    local: LocalTier | None,
    promoted: Callable[[int], None],
) -> Restored | None:
    """Load the newest checkpoint that verifies. Collective.

    Args:
        folder: the remote tier.
        promoted: called with a step that was on the nodes' disks alone and no longer is.

    Returns:
        None if there is none at all.

    Raises:
        CorruptCheckpointError: there are checkpoints, and none verifies.
        MismatchedCheckpointError: the newest intact one is of other objects.
        FencedError: another attempt has taken the run over.
    """
    begin = time.monotonic()
    rejected: list[tuple[int, str]] = []
    passed_over: list[tuple[int, str]] = []
    for step, candidate in _choices(folder, ranks, local):
        if local is not None and candidate is not None:
            try:
                local.promote(candidate)
            except FencedError:
                raise
            except CheckpointError as error:
                passed_over.append((step, error.what))
                continue
            promoted(step)
        path = folder / steps.step_name(step)
        try:
            loaded = loading.load(path, parts, ranks=ranks, per_rank=per_rank)
        except CorruptCheckpointError as error:
            rejected.append((step, error.why or error.what))
            continue
        return Restored(
            step=step,
            meta=loaded.metadata,
            tier=steps.REMOTE if candidate is None else steps.LOCAL,
            rejected=rejected,
            passed_over=passed_over,
            seconds=time.monotonic() - begin,
            fresh=loaded.fresh,
        )
    if rejected:
        raise CorruptCheckpointError(
            f"none of {len(rejected)} checkpoints in {folder} is intact",
            why=f"step {rejected[0][0]}: {rejected[0][1]}",
            fix="move them away to begin again from the first step",
        )
    return None


def _choices(
    folder: Path, ranks: Ranks, local: LocalTier | None
) -> list[tuple[int, Candidate | None]]:
    """Steps to try, the newest first; of one step, first what is on the remote tier (None)."""

    def look() -> tuple[list[int], int]:
        found = steps.committed(folder)
        return list(found), max([_turn(path) for path in found.values()], default=0)

    found, newest_turn = ranks.reduce(look, lambda every: every[0])
    choices: list[tuple[int, Candidate | None]] = [(step, None) for step in found]
    if local is not None:
        choices += [(one.step, one) for one in local.candidates(newest_turn)]
    return sorted(choices, key=lambda choice: (choice[0], choice[1] is None), reverse=True)


def _turn(path: Path) -> int:
    with contextlib.suppress(CorruptCheckpointError):
        return turn_of(manifest.read(path))
    return 0
