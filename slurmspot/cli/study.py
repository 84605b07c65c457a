"""``slurmspot study``: spot runs against an uninterrupted baseline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import SCHEMA_VERSION, leave_in_order, print_json
from slurmspot.cli.inject import MACHINERY, all_of, machinery
from slurmspot.cli.options import accounts
from slurmspot.cli.report import write_page
from slurmspot.cli.timeline import time_zone
from slurmspot.cluster import spec as specs
from slurmspot.cost.prices import load_prices
from slurmspot.errors import UsageError
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.conduct import Wait
from slurmspot.faults.injector import Injector
from slurmspot.runfolder import RunFolder
from slurmspot.settings import PERIODS_S
from slurmspot.study.acceptance import OPEN, SHUT, Terms, is_open
from slurmspot.study.comparison import Comparison, table, verdict
from slurmspot.study.experiment import Experiment, carry_out, drills_of, runs_of

_PATH = click.Path(path_type=Path)


def _judging(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--metric``, ``--tolerance`` and ``--json``."""
    metric = click.option(
        "--metric", default="loss", show_default=True,
        help="What run.log() calls the value to compare; less is better.",
    )  # fmt: skip
    tolerance = click.option(
        "--tolerance", type=float, default=0.01, show_default=True,
        help="How much worse it may be, as a share, where final states differ.",
    )  # fmt: skip
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return metric(tolerance(as_json(function)))


def _chosen_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``RUNS`` and ``--baseline``."""
    runs = click.argument("runs", metavar="STUDY|RUN...", nargs=-1, required=True, type=_PATH)
    baseline = click.option(
        "--baseline", type=_PATH, metavar="RUN", help="The run that was not interrupted."
    )
    return runs(baseline(accounts(function)))


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


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", metavar="[COMMAND]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--spec", "file", type=_PATH, help="Launch file (TOML) of the training.")
@click.option(
    "--out", type=_PATH, default=Path("results/study"), show_default=True,
    help="Folder for all runs, on shared storage.",
)  # fmt: skip
@click.option(
    "--period-s", "periods_s", type=float, multiple=True,
    help="Seconds between checkpoints; repeatable.  [default: 300 900 1800 3600]",
)  # fmt: skip
@click.option(
    "--baseline-partition", default="ondemand", show_default=True, help="Where the baseline runs."
)
@click.option("-p", "--partition", help="Where the spot runs run.  [default: spot]")
@click.option("-N", "--nodes", help="Number of nodes, or a range such as 2-4.")
@click.option("--gpus-per-node", type=int, help="GPUs on each node; 0 for none.")
@click.option("--time-min", type=int, help="Time limit of each attempt, minutes.")
@click.option(
    "--campaign", "campaign_file", type=_PATH,
    help="Interrupt every spot run by this, too: see `slurmspot inject campaign`.",
)  # fmt: skip
@all_of(MACHINERY)
@click.option("--prices", type=_PATH, metavar="FILE", help="Prices file (TOML).")
@_judging
def run(
    words: tuple[str, ...],
    *,
    file: Path | None,
    out: Path,
    periods_s: tuple[float, ...],
    baseline_partition: str,
    campaign_file: Path | None,
    backend: str,
    terminate_command: str | None,
    prices: Path | None,
    metric: str,
    tolerance: float,
    as_json: bool,
    **flags: Any,
) -> int:
    """Train undisturbed on demand, and on spot at several checkpoint periods.

    COMMAND is what every rank runs; it and all else about the training may stand in a launch file.
    All runs are submitted at once and followed to their end; after an interruption the same command
    goes on. At the end report.html and summary.json are written, and the gate is asked: see
    `slurmspot study gate`.
    """
    terms = Terms(metric=metric, tolerance=tolerance)
    price_list = load_prices(prices)
    plan = Experiment(
        out=out,
        spec=specs.build(file=file, flags={"command": words, **flags}),
        periods_s=periods_s or PERIODS_S,
        baseline_partition=baseline_partition,
    )
    campaign = None if campaign_file is None else Campaign.read(campaign_file)

    def hand(folder: RunFolder, wait: Wait) -> Injector:
        return Injector(folder, wait=wait, **machinery(backend, terminate_command))

    summary = out / "summary.json"
    summary.unlink(missing_ok=True)  # it speaks of what was before
    leave_in_order()  # whatever a campaign has taken is given back on the way out
    problems = carry_out(
        plan, campaign=campaign, hand=hand, say=lambda line: click.echo(line, err=True)
    )
    found = Comparison.of(*runs_of(out), prices=price_list, drills=drills_of(out))
    code = _answer(found, terms, as_json=as_json, problems=problems, summary=summary)
    write_page(found.document(), out / "report.html")
    return code


@command.command()
@_chosen_runs
@click.option(
    "-o", "--output", type=_PATH, metavar="FILE.html", help="Write one self-contained HTML file."
)
@_judging
def report(
    runs: tuple[Path, ...],
    *,
    baseline: Path | None,
    sacct_file: Path | None,
    tz: str | None,
    prices: Path | None,
    output: Path | None,
    metric: str,
    tolerance: float,
    as_json: bool,
) -> int:
    """Compare spot runs with their baseline: losses, times and costs.

    Give the folder of a study, or run folders and their --baseline. No checkpoint is read.
    """
    terms = Terms(metric=metric, tolerance=tolerance)
    found = _compared(runs, baseline, sacct_file=sacct_file, tz=tz, prices=prices)
    if output is not None:
        write_page(found.document(), output)
    if as_json:
        print_json({"runs": found.rows(terms)})
    else:
        click.echo(table(found.rows(terms), terms))
    return 0


@command.command()
@_chosen_runs
@_judging
def gate(
    runs: tuple[Path, ...],
    *,
    baseline: Path | None,
    sacct_file: Path | None,
    tz: str | None,
    prices: Path | None,
    metric: str,
    tolerance: float,
    as_json: bool,
) -> int:
    """Say whether more of the work may go to spot capacity.

    Give the folder of a study, or run folders and their --baseline. The gate opens (exit 0) only if
    all runs are finished, the baseline was undisturbed, and every spot run was interrupted, came
    back each time, ended as good as the baseline and cost less; and if every byte of every
    checkpoint is as it was saved. It stays shut (exit 1) if any of this does not hold or cannot be
    shown.
    """
    terms = Terms(metric=metric, tolerance=tolerance)
    found = _compared(runs, baseline, sacct_file=sacct_file, tz=tz, prices=prices)
    return _answer(found, terms, as_json=as_json)


def _compared(
    runs: Sequence[Path],
    baseline: Path | None,
    *,
    sacct_file: Path | None,
    tz: str | None,
    prices: Path | None,
) -> Comparison:
    """What the command line means: a study, or runs beside a baseline."""
    drills: dict[str, str] = {}
    if baseline is not None:
        spot = [path for path in runs if path.absolute() != baseline.absolute()]
        chosen = RunFolder.open(baseline), [RunFolder.open(path) for path in spot]
    elif len(runs) == 1:
        chosen, drills = runs_of(runs[0]), drills_of(runs[0])
    else:
        raise UsageError(
            "several runs, and no baseline", fix="say which one it is with --baseline RUN"
        )
    return Comparison.of(
        *chosen,
        prices=load_prices(prices),
        sacct_file=sacct_file,
        tz=time_zone(tz),
        drills=drills,
    )


def _answer(
    found: Comparison,
    terms: Terms,
    *,
    as_json: bool,
    problems: Sequence[str] = (),
    summary: Path | None = None,
) -> int:
    """Judge, say so, and write it down where ``summary`` says; the exit code."""
    findings = found.judged(terms)
    opened = is_open(findings) and not problems
    rows = found.rows(terms)
    document = {
        "open": opened,
        "findings": [asdict(one) for one in findings],
        "problems": list(problems),
        "runs": rows,
    }
    if summary is not None:
        summary.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2))
    if as_json:
        print_json(document)
    else:
        click.echo(f"{table(rows, terms)}\n\n{verdict(findings)}\n")
        click.echo(OPEN if opened else SHUT)
    for problem in problems:
        click.echo(f"slurmspot: {problem}", err=True)
    return 0 if opened else 1
