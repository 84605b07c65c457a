"""Save the states of all ranks as one checkpoint. Collective; blocks until it is durable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from slurmspot.errors import CheckpointWriteError, FencedError, SlurmspotError


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
class Snapshot:
    """All that one rank saves, in memory that training does not change.

    Attributes:
        captures: every registered object's state, by its name.
        metadata: what the caller wants kept with them, as tagged JSON; the first rank's counts.
        ready: returns when the tensor of a given path may be read.
    """

    captures: Mapping[str, Capture]
    metadata: Encoded
    ready: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What the first rank must know of an object on another rank.

    Attributes:
        fingerprint: of what this rank will have after a restore.
        agreed: of all that one copy is kept of, and that must be equal on every rank.
    """

    scope: Scope
    fingerprint: str
    agreed: str


def save(
    writer: Hdf5StorageWriter,
    snapshot: Callable[[], Snapshot],
    *,
    step: int,
    ranks: Ranks,
    on_written: Callable[[int], None],
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Write and commit a checkpoint, or leave nothing behind.

    Args:
        writer: knows where; not used before.
        snapshot: gives this rank's part; may raise.
        step: of this rank's part; the same on every rank, or nothing is written.
        on_written: called on each rank with the bytes it has made durable, before the commit.
        confirm: called on each rank when all of the snapshot has been read; raises if it must
            not be committed.

    Raises:
        SlurmspotError: a rank failed; the same on every rank.
    """
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
    )
    captures: dict[str, Capture] = {}
    overall: list[Metadata] = []

    def plan_mine() -> tuple[int, SavePlan]:
        mine = snapshot()
        captures.update(mine.captures)
        writer.metadata = mine.metadata
        writer.ready = mine.ready
        state: dict[str, Any] = {}
        for capture in mine.captures.values():
            state[capture.key] = Encoded(capture.state.skeleton)
            state.update(capture.state.tensors)
        planner.set_up_planner(state, is_coordinator=ranks.rank == 0)
        plan = planner.create_local_plan()
        return step, plan if ranks.rank == 0 else _without_loose(plan, captures.values())

    def plan_all(every: list[tuple[int, SavePlan]]) -> list[SavePlan]:
        _check_steps([saved for saved, _ in every])
        plans, known = planner.create_global_plan([plan for _, plan in every])
        overall.append(known)
        return writer.prepare_global_plan(plans)

    def write() -> tuple[list[WriteResult], dict[str, _Note]]:
        results = writer.write_data(planner.finish_plan(plans[ranks.rank]), planner).wait()
        notes = {name: _note(one, writer) for name, one in captures.items()}
        confirm()
        on_written(writer.size_bytes)
        return results, notes

    def seal(every: list[tuple[list[WriteResult], dict[str, _Note]]]) -> bytes:
        writer.objects = _describe([notes for _, notes in every])
        return writer.seal(overall[0], [results for results, _ in every])

    def commit() -> None:
        if writer.partial is not None:
            writer.commit(sealed)

    try:
        plans = ranks.reduce(plan_mine, plan_all)
        sealed = ranks.reduce(write, seal)
        ranks.reduce(commit, lambda _: None)
    except BaseException:
        if writer.partial is not None:  # a full disk needs its space back
            steps.remove(writer.partial)
        raise


def _check_steps(saved: Sequence[int]) -> None:
    for rank, step in enumerate(saved):
        if step != saved[0]:
            raise CheckpointWriteError(
                f"rank 0 saves step {saved[0]}, and rank {rank} step {step}",
                why="the ranks no longer train in step",
                fix="call Run.check() and Checkpointer.save() equally often on every rank",
            )


def _without_loose(plan: SavePlan, captures: Iterable[Capture]) -> SavePlan:
    """The plan of a rank other than the first, whose loose tensors are not kept.

    Ranks can disagree about the buffers of a replicated model; those of the first rank are the
    ones that DDP goes on with. Whatever else is replicated, any rank may write.
    """
    dropped = {path for one in captures if not one.per_rank for path in one.loose}
    dropped -= {path for one in captures for path in one.state.sharded}
    return replace(plan, items=[item for item in plan.items if item.index.fqn not in dropped])


def _note(capture: Capture, writer: Hdf5StorageWriter) -> _Note:
    """Note one object, of which this rank has written some, and other ranks some."""
    state, loose, known = capture.state, capture.loose, writer.hashes
    for path in state.tensors:
        writer.ready(path)
    if capture.per_rank:
        return _Note(scope="per_rank", fingerprint=state.fingerprint(known=known), agreed="")
    scope: Scope = "sharded" if state.sharded else "replicated"
    whole = state.fingerprint(known=known, without=loose if state.sharded else ())
    apart = loose | state.sharded
    agreed = state.fingerprint(known=known, without=apart) if apart else whole
    return _Note(scope=scope, fingerprint=whole, agreed=agreed)


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


def failure(step: int, error: Exception) -> CheckpointWriteError:
    """What to tell of a save of ``step`` that ended by ``error``."""
    if isinstance(error, FencedError):
        return error
    if isinstance(error, SlurmspotError):
        why = "; ".join(filter(None, (error.what, error.why)))
        fix = error.fix
    else:
        why, fix = f"{type(error).__name__}: {error}", None
        if isinstance(error, OSError):
            fix = "free space or repair the file system, if that is the cause"
    told = CheckpointWriteError(
        f"step {step} could not be saved; the checkpoint before it is untouched",
        why=why,
        fix=fix,
    )
    told.__cause__ = error
    return told
