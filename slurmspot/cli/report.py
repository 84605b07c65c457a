"""``slurmspot report``: one self-contained HTML file about one or more runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.cli.options import accounts
from slurmspot.cli.timeline import time_zone
from slurmspot.cost.prices import load_prices
from slurmspot.errors import UsageError
from slurmspot.report import history, table
from slurmspot.report.compose import build_document
from slurmspot.report.costs import missing_prices
from slurmspot.report.document import Document, RunReport
from slurmspot.runfolder import RunFolder


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html",
    help="Write one self-contained HTML file here.",
)  # fmt: skip
@click.option(
    "--baseline", type=click.Path(path_type=Path), metavar="RUN",
    help="The run that was not interrupted, to compare with.",
)  # fmt: skip
@accounts
@click.option("--title", help="Title of the page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    *,
    runs: tuple[Path, ...],
    output: Path | None,
    baseline: Path | None,
    prices: Path | None,
    sacct_file: Path | None,
    tz: str | None,
    title: str | None,
    as_json: bool,
) -> int:
    """Say what happened to RUN..., which are run folders, and what it cost.

    Prints tables, or JSON, and with -o writes a page that needs no network to be read and holds no
    script. Exits with 1 if a price is missing; the rest is reported all the same.
    """
    price_list = load_prices(prices)
    zone = time_zone(tz)
    folders = list(dict.fromkeys(path.absolute() for path in (baseline, *runs) if path))
    names = [folder.name for folder in folders]
    notes: list[str] = []
    reports = []
    for folder in folders:
        found = history.of_run(RunFolder.open(folder), sacct_file=sacct_file, tz=zone)
        notes += found.timeline.notes
        reports.append(
            found.report(
                folder.name if names.count(folder.name) == 1 else str(folder),
                baseline=baseline is not None and folder == baseline.absolute(),
            )
        )
    document = build_document(
        title or f"Spot report: {', '.join(report.label for report in reports)}",
        reports,
        generated=datetime.now().astimezone(),
        prices=price_list,
        notes=notes,
    )
    if output is not None:
        write_page(document, output)
    if as_json:
        print_json(_json(document, reports))
    else:
        click.echo(_text(document))
    for words in missing_prices(document.unpriced):
        click.echo(words, err=True)
    return 1 if document.unpriced else 0


def write_page(document: Document, output: Path) -> None:
    """Write the document as one self-contained HTML file.

    Raises:
        UsageError: jinja2 is not installed, or the file cannot be written.
    """
    try:
        from slurmspot.report.html import write_html  # noqa: PLC0415  jinja2 is an extra
    except ModuleNotFoundError:
        raise UsageError(
            "jinja2 is not installed", fix="pip install 'slurmspot[analysis]'"
        ) from None
    write_html(document, output)
    click.echo(f"wrote {output}", err=True)


def _text(document: Document) -> str:
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    figures = [(one.name, one.value, one.note) for one in document.figures]
    shown = [table.render(("FIGURE", "VALUE", ""), figures, right=["VALUE"], bold=bold)]
    for part in (document.interruptions, document.shares, document.costs):
        numbers = [name for name in part.header if name in part.right]
        if part.rows:
            shown.append(table.render(part.header, part.rows, right=numbers, bold=bold))
    return "\n\n".join(shown)


def _json(document: Document, reports: Sequence[RunReport]) -> dict[str, Any]:
    return {
        "title": document.title,
        "baseline": document.baseline,
        "figures": [asdict(one) for one in document.figures],
        "interruptions": [
            {"run": report.label, **one.as_json()}
            for report in reports
            for one in report.interruptions
        ],
        "assumptions": document.assumptions,
        "notes": document.notes,
    }
