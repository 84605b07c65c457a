"""Save the states of all ranks as one checkpoint. Collective; blocks until it is durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from slurmspot.checkpoint import steps
from slurmspot.checkpoint.manifest import ObjectRecord, Scope
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.checkpoint.state import State
from slurmspot.checkpoint.storage import Hdf5StorageWriter
from slurmspot.checkpoint.tagged import Encoded
from slurmspot.errors import CheckpointWriteError


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One object's state on the host, ready to be written.

    Attributes:
        key: its name in the checkpoint; a per-rank object has one for each rank.
        loose: paths of tensors that replicas may disagree about.
    """

    key: str
    state: State
    per_rank: bool
    loose: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What the first rank must know of an object on another rank."""

    scope: Scope
    fingerprint: str
    agreed: str


def save(
    target: Path,
    captures: Callable[[], Mapping[str, Capture]],
    *,
    ranks: Ranks,
    metadata: Mapping[str, Any],
    on_written: Callable[[int], None],
) -> None:
    """Write and commit ``target``, or leave nothing behind.

    Args:
        captures: gives every object's state; may raise.
        on_written: called on each rank with the bytes it has made durable, before the commit.

    Raises:
        SlurmspotError: a rank failed; the same on every rank.
    """
    writer = Hdf5StorageWriter(target, metadata=metadata, keep_existing=True)
    # Ranks can disagree about the buffers of a replicated model; the lowest rank's are the ones
    # that DDP goes on with, so it writes all that is replicated.
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    overall: list[Metadata] = []

    def plan_mine() -> tuple[SavePlan, dict[str, _Note]]:
        objects = captures()
        state: dict[str, Any] = {}
        for capture in objects.values():
            state[capture.key] = Encoded(capture.state.skeleton)
            state.update(capture.state.tensors)
        planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
        return planner.create_local_plan(), {name: _note(one) for name, one in objects.items()}

    def plan_all(mine: list[tuple[SavePlan, dict[str, _Note]]]) -> list[SavePlan]:
        writer.objects = _describe([notes for _, notes in mine])
        plans, known = planner.create_global_plan([plan for plan, _ in mine])
        overall.append(known)
        return writer.prepare_global_plan(plans)

    def write() -> list[WriteResult]:
        results = writer.write_data(planner.finish_plan(plans[ranks.rank]), planner).wait()
        on_written(writer.size_bytes)
        return results

    try:
        plans = ranks.reduce(plan_mine, plan_all)
        ranks.reduce(write, lambda results: writer.finish(overall[0], results))
    except BaseException:
        if writer.partial is not None:  # a full disk needs its space back
            steps.remove(writer.partial)
        raise


def _note(capture: Capture) -> _Note:
    state = capture.state
    scope: Scope = "replicated"
    if capture.per_rank:
        scope = "per_rank"
    elif state.sharded:
        scope = "sharded"
    return _Note(
        scope=scope,
        fingerprint=state.fingerprint(),
        agreed=state.fingerprint(without=capture.loose) if scope == "replicated" else "",
    )


def _describe(notes: Sequence[Mapping[str, _Note]]) -> dict[str, ObjectRecord]:
    """One record an object, from every rank's notes.

    Raises:
        CheckpointWriteError: ranks registered different objects, or disagree about one of which
            a single copy would be kept.
    """
    records = {}
    for name, first in notes[0].items():
        ours = [one[name] for one in notes if name in one]
        for rank, note in enumerate(ours):
            if (note.scope, note.agreed) != (first.scope, first.agreed):
                raise CheckpointWriteError(
                    f"{name} differs between rank 0 and rank {rank}",
                    why="it is registered as one object that all ranks share",
                    fix=f"make it equal on all ranks, or name {name!r} in per_rank",
                )
        if len(ours) != len(notes):
            raise CheckpointWriteError(f"{name} is not registered on every rank")
        replicated = first.scope == "replicated"
        records[name] = ObjectRecord(
            scope=first.scope,
            fingerprints=tuple(note.fingerprint for note in (ours[:1] if replicated else ours)),
        )
    return records
