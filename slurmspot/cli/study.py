"""``slurmspot study``: spot runs against an uninterrupted baseline."""

from __future__ import annotations

import time
from pathlib import Path

import click

from slurmspot.cli import leave_in_order, print_json


@click.group()
def command() -> None:
    """Compare spot runs with an uninterrupted baseline."""


@command.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results/demo"),
    show_default=True,
    help="Folder for the runs, summary.json and report.html.",
)
@click.option("--prices", type=click.Path(path_type=Path), help="Prices file (TOML).")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def demo(out: Path, prices: Path | None, as_json: bool) -> int:
    """Train once undisturbed and once with three interruptions, on a private cluster.

    Fails (exit 1) unless every interruption happened, the run recovered from each by itself, and
    both runs end with the same model and optimizer, bit for bit.
    """
    from slurmspot.study.demo import demo as carry_out  # noqa: PLC0415 - not for `--help`
    from slurmspot.study.demo import table  # noqa: PLC0415

    leave_in_order()  # the cluster is taken down on the way out
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.1f} s] {text}", err=True)

    summary, problems = carry_out(out, prices=prices, say=say)
    if as_json:
        print_json(summary)
    else:
        click.echo(table(summary))
        click.echo(f"\n{out / 'summary.json'}\n{out / 'report.html'}")
    for problem in problems:
        click.echo(f"slurmspot: {problem}", err=True)
    return 1 if problems else 0
