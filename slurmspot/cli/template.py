"""``slurmspot template``: batch scripts for those who write their own."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

import slurmspot
from slurmspot.cli import print_json
from slurmspot.errors import NotFoundError
from slurmspot.report import table

_SUFFIX = ".sbatch"


@click.group()
def command() -> None:
    """Batch scripts for those who write their own."""


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """Name the templates, and say what each is for."""
    found = {name: description(path.read_text()) for name, path in _templates().items()}
    if as_json:
        lines = [{"name": name, "description": text} for name, text in found.items()]
        print_json({"templates": lines})
    else:
        click.echo(table.render(["NAME", "WHAT IT IS"], [list(pair) for pair in found.items()]))


@command.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the template NAME.

    slurmspot template show train > train.sbatch
    """
    found = _templates()
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        known = f"there are: {', '.join(found)}"
        raise NotFoundError(
            f"there is no template {name!r}",
            fix=f"did you mean {near[0]}? {known}" if near else known,
        )
    click.echo(found[name].read_text(), nl=False)


def description(script: str) -> str:
    """The line with which a script says what it is: the first comment below its ``#!``."""
    lines = script.splitlines()[1:]
    return next((line.lstrip("# ") for line in lines if line.startswith("# ")), "")


def folder(package: Path) -> Path:
    """Where the templates are: inside an installed ``package``, beside that of a checkout."""
    installed = package / "sbatch"
    return installed if installed.is_dir() else package.parent / "sbatch"


def _templates() -> dict[str, Path]:
    files = folder(Path(slurmspot.__file__).parent).glob(f"*{_SUFFIX}")
    return {file.name.removesuffix(_SUFFIX): file for file in sorted(files)}
