"""``slurmspot export``: a checkpoint's tensors as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

from slurmspot.cli.verify import byte_progress
from slurmspot.errors import NotFoundError, UsageError

try:
    from slurmspot.checkpoint import manifest
    from slurmspot.checkpoint.export import export
    from slurmspot.checkpoint.verify import checkpoints
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
        raise NotFoundError(f"there is no checkpoint in {path}")
    newest = found[0]
    with byte_progress([newest]) as progress:
        count = export(newest, output, only=only, progress=progress)
    size_mib = output.stat().st_size / 2**20
    step = manifest.read(newest).step
    click.echo(f"{output}: {count} tensors of step {step}, {size_mib:.1f} MiB")
