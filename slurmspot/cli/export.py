"""``slurmspot export``: a checkpoint's tensors as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

from slurmspot.cli.verify import byte_progress, nothing_in
from slurmspot.errors import CorruptCheckpointError, UsageError

try:
    from slurmspot.checkpoint import manifest
    from slurmspot.checkpoint.export import export
    from slurmspot.checkpoint.verify import checkpoints, problems_of
except ModuleNotFoundError as error:
    raise UsageError(
        f"{error.name} is not installed",
        why="checkpoints are HDF5 files",
        fix="pip install 'slurmspot[train]'",
    ) from None


@click.command("export")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write."
)
@click.option("only", "--object", help="Export this object alone, named as in its own state.")
def command(path: Path, *, output: Path, only: str | None) -> None:
    """Write the tensors of the checkpoint at PATH to a safetensors file.

    PATH is one checkpoint, or a run folder, of which the newest checkpoint is taken. Every byte
    is checked on the way; a damaged checkpoint is not exported.
    """
    found = checkpoints(path)
    if not found:
        raise nothing_in(path)
    newest = found[0]
    try:
        with byte_progress([newest]) as progress:
            count = export(newest, output, only=only, progress=progress)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.what, why=error.why, fix=_other(newest)) from None
    size_mib = output.stat().st_size / 2**20
    step = manifest.read(newest).step
    click.echo(f"{output}: {count} tensors of step {step}, {size_mib:.1f} MiB")


def _other(damaged: Path) -> str:
    """What to export instead of a damaged checkpoint: the newest beside it that verifies."""
    for path in checkpoints(damaged.parent):
        if path != damaged and not problems_of(path):
            return f"export the newest intact one: {path}"
    return "no checkpoint beside it is intact; see with `slurmspot verify` what is wrong"
