"""Write docs/commands.md from the commands' own help; ``--check`` says whether it is up to date."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from slurmspot.cli import cli

TARGET = Path(__file__).parents[1] / "docs" / "commands.md"


def walk(
    group: click.Group, path: tuple[str, ...], above: click.Context | None = None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every command below ``group`` with its help text."""
    context = click.Context(
        group,
        info_name=path[-1],
        parent=above,
        help_option_names=["-h", "--help"],
        max_content_width=90,
    )
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None:
            continue
        where = (*path, name)
        with click.Context(command, info_name=name, parent=context) as inner:
            yield where, command.get_help(inner)
        if isinstance(command, click.Group):
            yield from walk(command, where, context)


def main() -> int:
    """Write or check the file."""
    parts = ["# Commands\n\nGenerated from `--help`; `python -m slurmspot` is the same program.\n"]
    for where, text in walk(cli, ("slurmspot",)):
        parts.append(f"## {' '.join(where)}\n\n```text\n{text}\n```\n")
    page = "\n".join(parts)
    if sys.argv[1:] == ["--check"]:
        return int(not TARGET.exists() or TARGET.read_text() != page)
    TARGET.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
