"""``slurmspot verify``: check every byte of a run's checkpoints."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.errors import NotFoundError, UsageError

try:
    from slurmspot.checkpoint.verify import CheckpointReport, Progress, checkpoints, verify
except ModuleNotFoundError as error:
    raise UsageError(
        f"{error.name} is not installed",
        why="checkpoints are HDF5 files",
        fix="pip install 'slurmspot[train]'",
    ) from None

_SHOWN = 3


@click.command("verify")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("as_json", "--json", is_flag=True, help="Print the findings as JSON.")
@click.option("every", "--all", is_flag=True, help=f"Show every problem, not {_SHOWN} each.")
def command(path: Path, *, as_json: bool, every: bool) -> int:
    """Check every byte of the checkpoints at PATH.

    PATH is a run folder, a folder of checkpoints, one checkpoint, or the folder of a local tier, of
    which this node's part is checked. Exits with 1 if anything is not exactly as it was saved, and
    with 3 if there is no checkpoint.
    """
    with byte_progress(checkpoints(path)) as progress:
        reports = verify(path, progress)
    intact = bool(reports) and all(report.intact for report in reports)
    if as_json:
        print_json({"intact": intact, "checkpoints": [_document(one) for one in reports]})
    elif reports:
        _print_table(reports, None if every else _SHOWN)
    if not reports:
        raise nothing_in(path)
    return 0 if intact else 1


def nothing_in(path: Path) -> NotFoundError:
    """The error for a folder without a checkpoint."""
    return NotFoundError(
        f"there is no checkpoint in {path}",
        fix="give a run folder, a folder of checkpoints, or one checkpoint",
    )


def _document(report: CheckpointReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "tier": report.tier,
        "node": report.node,
        "intact": report.intact,
        "problems": [
            {"file": one.file, "dataset": one.dataset, "problem": one.problem}
            for one in report.problems
        ],
    }


def _print_table(reports: Sequence[CheckpointReport], shown: int | None) -> None:
    click.echo(f"{'STEP':>8}  {'TIER':6}  {'MiB':>9}  STATE")
    for report in reports:
        step = "-" if report.step is None else report.step
        state = "intact" if report.intact else "DAMAGED"
        if report.node is not None:
            state += f": the part of {report.node}{_rest(report.elsewhere)}"
        click.echo(f"{step:>8}  {report.tier:6}  {report.size_bytes / 2**20:9.1f}  {state}")
        for problem in report.problems[:shown]:
            click.echo(f"{'':10}{problem}")
        if shown and len(report.problems) > shown:
            click.echo(f"{'':10}and {len(report.problems) - shown} more: see them with --all")


def _rest(nodes: Sequence[str]) -> str:
    """Where the other parts of a checkpoint are."""
    if not nodes:
        return ", which is all of it"
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return f"; the rest is on {', '.join(nodes[:_SHOWN])}{more}"


@contextmanager
def byte_progress(paths: Sequence[Path]) -> Iterator[Progress | None]:
    """A bar of the bytes read of some checkpoints, on a terminal's stderr; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    total = sum(file.stat().st_size for path in paths for file in path.glob("rank-*.h5"))
    lock = threading.Lock()
    with click.progressbar(length=total, label="reading", file=sys.stderr) as bar:

        def advance(size_bytes: int) -> None:
            with lock:
                bar.update(size_bytes)

        yield advance
