"""``slurmspot report``: one self-contained HTML file about one or more runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from slurmspot.cli.timeline import time_zone
from slurmspot.cost.prices import load_prices
from slurmspot.errors import UsageError
from slurmspot.report import history
from slurmspot.report.compose import build_document
from slurmspot.report.costs import missing_prices
from slurmspot.report.document import RunReport
from slurmspot.runfolder import RunFolder


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE.html",
    help="Where to write the page.",
)  # fmt: skip
@click.option(
    "--baseline", type=click.Path(path_type=Path), metavar="RUN",
    help="The run that was not interrupted, to compare with.",
)  # fmt: skip
@click.option(
    "--prices", type=click.Path(path_type=Path), metavar="FILE",
    help="TOML file of prices; default: an example.",
)  # fmt: skip
@click.option(
    "--sacct", "sacct_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Read what sacct saved (text, JSON, gz) instead of asking the cluster.",
)  # fmt: skip
@click.option("--tz", metavar="ZONE", help="Time zone of that text; default: this machine's.")
@click.option("--title", help="Title of the page.")
def command(
    *,
    runs: tuple[Path, ...],
    output: Path,
    baseline: Path | None,
    prices: Path | None,
    sacct_file: Path | None,
    tz: str | None,
    title: str | None,
) -> int:
    """Write one self-contained HTML file about RUN..., which are run folders.

    It needs no network to be read, and holds no script. Exits with 1 if a price is missing; the
    rest is reported all the same.
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
            RunReport(
                label=folder.name if names.count(folder.name) == 1 else str(folder),
                jobs=found.timeline.jobs,
                events=found.events,
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
    try:
        from slurmspot.report.html import write_html  # noqa: PLC0415  jinja2 is an extra
    except ModuleNotFoundError:
        raise UsageError(
            "jinja2 is not installed", fix="pip install 'slurmspot[analysis]'"
        ) from None
    write_html(document, output)
    click.echo(str(output))
    for words in missing_prices(document.unpriced):
        click.echo(words, err=True)
    return 1 if document.unpriced else 0
