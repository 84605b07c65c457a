"""Find what to go on from: the newest checkpoint that verifies, on whichever tier survived.

What the nodes that are here hold is looked at first. If it is newer, and each of its files can be
had, from a node or from a drain that was cut short, it is brought to the remote tier and then
loaded from there like any other: there is one way to load.

What does not verify is read once more before it is given up: network file systems have their
moments (a stale handle, a server that fails over), and an older step costs work.

What an attempt has left on the nodes' disks is not wanted once a later one has gone on without it.
That holds as long as some checkpoint of a later one is intact: such a step waits for all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmspot.checkpoint import loading, steps
from slurmspot.checkpoint.loading import Loaded
from slurmspot.checkpoint.local import Candidate, turn_at
from slurmspot.checkpoint.objects import Part
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.tiers import LocalTier
from slurmspot.errors import (
    CheckpointError,
    CheckpointWriteError,
    CorruptCheckpointError,
    FencedError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What :meth:`Checkpointer.restore` found.

    Attributes:
        step: the step whose state the objects now have.
        meta: what the save was given, and the ``turn`` of the owner that saved it, if it had one.
        tier: where it was: on the nodes' own disks (``local``), or ``remote``.
        rejected: (step, problem) of each newer checkpoint that did not verify.
        passed_over: (step, problem) of what lay on the nodes' disks, newer but of no use.
        damaged: the steps among those that were not as they were saved, or could not be read.
        seconds: how long it took.
        fresh: per-rank objects that began anew on this rank, which the saved run did not have.
    """

    step: int
    meta: dict[str, Any]
    tier: str = steps.REMOTE
    rejected: list[tuple[int, str]] = field(default_factory=list)
    passed_over: list[tuple[int, str]] = field(default_factory=list)
    damaged: frozenset[int] = frozenset()
    seconds: float
    fresh: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Choice:
    """A step to try.

    Attributes:
        turn: of the owner that saved it.
        candidate: what is on the nodes' disks; None if it is on the remote tier.
    """

    step: int
    turn: int
    candidate: Candidate | None = None

    def waits_for(self, other: _Choice) -> bool:
        """Whether the run has gone on without this one, if ``other`` is intact."""
        return self.candidate is not None and other.candidate is None and self.turn < other.turn


_log = logging.getLogger("slurmspot.checkpoint")
_OVERTAKEN = "an earlier attempt has left it, and the run has gone on without it"


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
        CheckpointWriteError: one on the nodes' disks cannot be brought to the remote tier, which
            cannot be written to; it stays where it is.
        FencedError: another attempt has taken the run over.
    """
    begin = time.monotonic()
    rejected: list[tuple[int, str]] = []
    passed_over: list[tuple[int, str]] = []
    damaged: set[int] = set()
    choices = _choices(folder, ranks, local)
    while choices:
        choice = next(one for one in choices if not any(map(one.waits_for, choices)))
        choices.remove(choice)
        step, candidate = choice.step, choice.candidate
        if local is not None and candidate is not None:
            try:
                local.promote(candidate)
            except CorruptCheckpointError as error:
                passed_over.append((step, error.what))
                if candidate.damaged or not candidate.problem:
                    damaged.add(step)
                continue
            except FencedError:
                raise
            except CheckpointError as error:
                raise CheckpointWriteError(
                    f"step {step} is on the nodes' own disks alone",
                    why=error.what,
                    fix="free space or repair the file system of the run folder, then start again",
                ) from error
            promoted(step)
        path = folder / steps.step_name(step)
        try:
            loaded = _load(path, parts, ranks=ranks, per_rank=per_rank)
        except CorruptCheckpointError as error:
            rejected.append((step, error.why or error.what))
            continue
        newer = [one.candidate for one in choices if one.candidate is not None and one.step > step]
        passed_over += [(one.step, one.problem or _OVERTAKEN) for one in newer]
        damaged.update(one.step for one in newer if one.damaged)
        return Restored(
            step=step,
            meta=loaded.metadata,
            tier=steps.REMOTE if candidate is None else steps.LOCAL,
            rejected=rejected,
            passed_over=sorted(passed_over, key=lambda one: one[0], reverse=True),
            damaged=frozenset(damaged),
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


def _load(
    path: Path, parts: Mapping[str, Part], *, ranks: Ranks, per_rank: frozenset[str]
) -> Loaded:
    """Load the checkpoint at ``path``; one that does not verify gets a second chance."""
    try:
        return loading.load(path, parts, ranks=ranks, per_rank=per_rank)
    except CorruptCheckpointError as error:
        if ranks.rank == 0:
            _log.warning("%s: %s; reading it once more", path, error.why or error.what)
    return loading.load(path, parts, ranks=ranks, per_rank=per_rank)


def _choices(folder: Path, ranks: Ranks, local: LocalTier | None) -> list[_Choice]:
    """Steps to try, the newest first; of one step, first what is on the remote tier."""

    def look() -> list[_Choice]:
        return [_Choice(step, turn_at(path)) for step, path in steps.committed(folder).items()]

    choices = ranks.reduce(look, lambda every: every[0])
    if local is not None:
        choices += [_Choice(one.step, one.turn, one) for one in local.candidates()]
    return sorted(choices, key=lambda one: (one.step, one.candidate is None), reverse=True)
