"""``slurmspot plan``: which checkpoint period to choose, and what spot will really save."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.cli.options import accounts
from slurmspot.cli.timeline import time_zone
from slurmspot.cost.interval import Conditions, Period, best_period, worst_loss_s
from slurmspot.cost.measured import Known, Observed, observe, pooled
from slurmspot.cost.prices import ANY, Prices, Rate, load_prices
from slurmspot.cost.simulate import Forecast, Spread, Work, forecast
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.faults import trace
from slurmspot.report import history, table
from slurmspot.report.costs import percent
from slurmspot.runfolder import RunFolder
from slurmspot.settings import PERIODS_S

_FILE = click.Path(path_type=Path)
_GIVEN = "given"
_BOUNDS = {
    "formula": "where the formula's waste is least",
    "work": "the whole work, since no checkpoint on the way pays; --rpo-s sets a bound",
    "rpo": "the longest that the RPO allows",
    "durable": "no shorter, since a checkpoint takes as long to be durable",
    "step": "no shorter than a step",
}


class _Finite(click.FloatRange):
    """A number that is one: neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is no number", param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """A figure that a plan is made from; its flag is its name with dashes.

    Attributes:
        title: how tables and errors call it.
        help: of the flag.
        neutral: taken where nobody says anything else, with the reason; None: it must be said.
        announced: needed only where interruptions have a notice.
    """

    name: str
    title: str
    help: str
    neutral: tuple[float, str] | None = None
    announced: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


_INPUTS = (
    _Input(
        name="work_h",
        title="useful work",
        help="Hours of training that the job needs, undisturbed.",
    ),
    _Input(name="gpus", title="GPUs", help="How many GPUs the job holds."),
    _Input(
        name="mtbi_s",
        title="mean time between interruptions",
        help="Mean time between interruptions while capacity is held.",
    ),
    _Input(name="stall_s", title="stall", help="What training waits for one periodic checkpoint."),
    _Input(
        name="durable_s",
        title="snapshot to durable",
        help="From the end of the stall until the checkpoint is durable.",
    ),
    _Input(
        name="restart_s",
        title="restart",
        help="From an interruption until training goes on: detect, requeue, wait, start, load.",
    ),
    _Input(name="step_s", title="step", help="One training step."),
    _Input(
        name="notice_share",
        title="share with notice",
        help="Share of interruptions that are announced, 0 to 1.",
    ),
    _Input(
        name="notice_save_s",
        title="checkpoint on notice",
        help="From the agreed step until a checkpoint taken on notice is durable.",
        announced=True,
    ),
    _Input(
        name="window_s",
        title="notice window",
        help="What a notice leaves before capacity is gone.",
        announced=True,
    ),
    _Input(
        name="precision",
        title="precision of notices",
        help="Share of notices that come true, up to 1; default: 1.",
        neutral=(1.0, "default: every notice comes true"),
    ),
    _Input(
        name="wait_s",
        title="wait in a restart",
        help="The part of a restart in which no GPU is held (backoff, queue); default: 0.",
        neutral=(0.0, "default: GPUs are held, and paid for, all the time"),
    ),
)


def _inputs(command: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for each input."""
    for one in reversed(_INPUTS):
        kind = click.IntRange(min=1) if one.name == "gpus" else _Finite(min=0)
        command = click.option(one.flag, one.name, type=kind, help=one.help)(command)
    return command


@click.command("plan")
@click.option(
    "--from", "runs", type=_FILE, multiple=True, metavar="RUN",
    help="Measure what no flag says in this run; again for more.",
)  # fmt: skip
@_inputs
@click.option(
    "--trace", "trace_file", type=_FILE, metavar="FILE",
    help="A trace of capacity instead of --mtbi-s: each fall in it interrupts the job.",
)  # fmt: skip
@click.option(
    "--period-s", "periods_s", type=_Finite(min=0, min_open=True), multiple=True,
    default=PERIODS_S, show_default=True, help="A period to try; again for more.",
)  # fmt: skip
@click.option("--rpo-s", type=_Finite(min=0), help="Training that may be lost at worst.")
@accounts
@click.option("--gpu-type", metavar="NAME", help="Which [type] of the prices; default: the run's.")
@click.option(
    "--runs", "count", type=click.IntRange(min=1), default=1000, show_default=True,
    help="How often each period is simulated.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="For what is drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    *,
    runs: tuple[Path, ...],
    trace_file: Path | None,
    periods_s: tuple[float, ...],
    rpo_s: float | None,
    prices: Path | None,
    sacct_file: Path | None,
    tz: str | None,
    gpu_type: str | None,
    count: int,
    seed: int,
    as_json: bool,
    **given: float | None,
) -> int:
    """Which checkpoint period to choose, and what spot will really save.

    Figures are given by flags or measured in runs. Waste is told by the formula of Young and Daly,
    with notices, and by simulation, which is where wall time and cost come from.
    """
    if sacct_file is not None and not runs:
        raise UsageError("--sacct is read for a run", fix="name the run with --from")
    if trace_file is not None and given["mtbi_s"] is not None:
        raise UsageError("--trace and --mtbi-s say the same thing", fix="leave one of them out")
    price_list = load_prices(prices)
    observed = _observed(runs, sacct_file=sacct_file, tz=tz)
    falls_s = _falls(trace_file) if trace_file is not None else ()
    known = _resolved(given, {**pooled(observed), **_from_trace(trace_file, falls_s)})
    rate = _rate(price_list, gpu_type or _only({one.gpu_type for one in observed.values()}))
    work, conditions = _job(known, price_list, rate)
    best = best_period(conditions, useful_s=work.useful_s, rpo_s=rpo_s)
    rows = [
        forecast(conditions, work, period_s=period_s, runs=count, seed=seed, trace_s=falls_s)
        for period_s in (*dict.fromkeys(periods_s), best.seconds)
    ]
    said = list(_verdict(rows[-1], best, conditions, work, price_list.currency, rpo_s=rpo_s))
    assumed = list(_assumptions(price_list, rate, count=count, seed=seed, trace_file=trace_file))
    if as_json:
        print_json(
            {
                "best": asdict(best),
                "currency": price_list.currency,
                "on_demand": work.on_demand,
                "nominal_discount": rate.discount,
                "periods": [_plain(asdict(row)) for row in rows],
                "inputs": {name: asdict(one) for name, one in known.items()},
                "verdict": said,
                "assumptions": assumed,
            }
        )
    else:
        bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        click.echo(_tables(rows, known, said, rpo_s=rpo_s, bold=bold))
        click.echo("\nWhat these figures assume:")
        click.echo("\n".join(f"  - {line}" for line in assumed))
    return 0


def _job(known: Mapping[str, Known], prices: Prices, rate: Rate) -> tuple[Work, Conditions]:
    values = {name: one.value for name, one in known.items()}
    work = Work(
        useful_s=values.pop("work_h") * 3600,
        gpus=int(values.pop("gpus")),
        rate=rate,
        waiting_hour=prices.other.waiting_hour,
    )
    return work, Conditions(**values)


def _observed(
    runs: Sequence[Path], *, sacct_file: Path | None, tz: str | None
) -> dict[str, Observed]:
    """What each run tells, by its path."""
    zone = time_zone(tz)
    found = {}
    for run in dict.fromkeys(runs):
        past = history.of_run(RunFolder.open(run), sacct_file=sacct_file, tz=zone)
        for note in past.timeline.notes:
            click.echo(f"note: {run}: {note}", err=True)
        found[str(run)] = observe(past.timeline.jobs, past.events, past.interruptions)
    return found


def _falls(file: Path) -> tuple[float, ...]:
    """When capacity fell, seconds since the trace began, ascending.

    Raises:
        UsageError: it is no trace.
        NotFoundError: it never falls after its begin.
    """
    times_s = tuple(one.at_s for one in trace.load(file))
    if not times_s or not times_s[-1]:
        raise NotFoundError(
            f"capacity never falls in {file}",
            why="it tells nothing of how often a job is interrupted",
            fix="take another trace, or give --mtbi-s",
        )
    return times_s


def _from_trace(file: Path | None, falls_s: Sequence[float]) -> dict[str, Known]:
    if not falls_s:
        return {}
    source = f"{file}: {len(falls_s):,} interruptions in {falls_s[-1] / 3600:,.0f} h"
    return {"mtbi_s": Known(value=falls_s[-1] / len(falls_s), source=source)}


def _resolved(given: Mapping[str, float | None], found: Mapping[str, Known]) -> dict[str, Known]:
    """Each input with its source: the flag, else what was measured, else what is neutral.

    Raises:
        UsageError: nobody says what one of them is; all such are named.
    """
    known: dict[str, Known] = {}
    missing: list[_Input] = []
    for one in _INPUTS:
        value = given[one.name]
        share = known.get("notice_share")
        if value is not None:
            known[one.name] = Known(value=float(value), source=_GIVEN)
        elif one.name in found:
            known[one.name] = found[one.name]
        elif one.neutral is not None:
            known[one.name] = Known(value=one.neutral[0], source=one.neutral[1])
        elif one.announced and share is not None and not share.value:
            known[one.name] = Known(value=0.0, source="not needed without notices")
        else:
            missing.append(one)
    if missing:
        raise UsageError(
            f"nobody says: {', '.join(one.title for one in missing)}",
            why="these decide what spot saves, so that none has a default",
            fix=f"give {', '.join(one.flag for one in missing)}, or a run that tells (--from)",
        )
    for name in ("work_h", "mtbi_s", "step_s"):
        if not known[name].value:
            raise UsageError(f"--{name.replace('_', '-')} is 0", why="it has to be above 0")
    return known


def _only(names: set[str]) -> str:
    """The one type of GPU that all runs had; empty if there is none such."""
    return names.pop() if len(names) == 1 else ""


def _rate(prices: Prices, gpu_type: str) -> Rate:
    rate = prices.rate(gpu_type, "") if gpu_type else prices.rates.get(ANY)
    if rate is None and not gpu_type and len(prices.rates) == 1:
        rate = prices.main
    if rate is None:
        types = ", ".join(filter(None, prices.rates))
        raise UsageError(
            f"there is no price for GPUs of {f'type {gpu_type}' if gpu_type else 'no type'}",
            fix=f"give one of these with --gpu-type: {types}; or add [gpu_hour] to the prices",
        )
    return rate


def _verdict(
    row: Forecast,
    best: Period,
    conditions: Conditions,
    work: Work,
    currency: str,
    *,
    rpo_s: float | None,
) -> Iterator[str]:
    """What the best row comes to, in words."""
    yield f"Best period: {_period(best.seconds)}, {_BOUNDS[best.bound]}."
    worst_s = worst_loss_s(conditions, row.kept_period_s)
    if rpo_s is not None and worst_s > rpo_s * (1 + 1e-9):
        yield (
            f"An RPO of {table.duration(rpo_s)} cannot be held: at worst "
            f"{table.duration(worst_s)} of training are lost."
        )
    if conditions.notice_share and not conditions.saved_share:
        save_s = conditions.notice_save_s + conditions.boundary_s
        yield (
            f"Notices save nothing: a save takes {table.duration(save_s)} with the wait for a "
            f"step, and the window is {table.duration(conditions.window_s)}."
        )
    nominal, saving = percent(work.rate.discount), row.saving
    if row.unfinished * 2 > row.runs:
        yield (
            "The job does not finish on this capacity: it is interrupted every "
            f"{table.duration(conditions.mtbi_s)} in the mean, and takes "
            f"{table.duration(conditions.restart_s)} to be training again."
        )
    elif saving.median <= 0:
        yield (
            f"Spot does not pay: the price list's discount is {nominal}, and the job costs "
            f"{percent(-saving.median)} more than on demand ({work.on_demand:,.2f} {currency})."
        )
    else:
        yield (
            f"The price list's discount is {nominal}; spot really saves {percent(saving.median)} "
            f"({_range(saving, _share)}; in the mean {_share(saving.mean)}) of the "
            f"{work.on_demand:,.2f} {currency} that the work costs on demand."
        )


def _assumptions(
    prices: Prices, rate: Rate, *, count: int, seed: int, trace_file: Path | None
) -> Iterator[str]:
    yield (
        "FORMULA is the share of wall time that is expected to be wasted, to the first order "
        f"(Young 1974, Daly 2006). All to the right of it is simulated {count:,} times (seed "
        f"{seed}), less often where a run has very many interruptions."
    )
    yield (
        "WASTE, HITS (interruptions of a run), LOST (training that one undoes) and STEPS (the "
        "same, in steps) are means over all runs; the others are medians, with what 90 % of the "
        "runs lie between."
    )
    yield (
        f"One hour of a GPU costs {rate.on_demand:.2f} {prices.currency} on demand and "
        f"{rate.spot:.2f} {prices.currency} on spot, as of {rate.as_of}. On demand, only the "
        "useful work is paid for. The storage of checkpoints is not in these costs."
    )
    if prices.other.waiting_hour:
        hour = f"{prices.other.waiting_hour:g} {prices.currency}"
        yield f"An hour without capacity is worth {hour}, and is in the cost of spot."
    if prices.example:
        yield "These prices are made up as an example; give your own with --prices."
    if trace_file is None:
        yield "Interruptions come independently of one another, as often at any time."
    else:
        yield (
            "Each fall of the trace interrupts the job, whatever nodes it has; how long the trace "
            "had no capacity is not looked at: --wait-s says how long the job waits."
        )


def _tables(
    rows: Sequence[Forecast],
    known: Mapping[str, Known],
    said: Sequence[str],
    *,
    rpo_s: float | None,
    bold: bool,
) -> str:
    numbers = (
        *("PERIOD", "FORMULA", "WASTE", "WALL", "5-95 %", "GPU HOURS", "HITS"),
        *("LOST", "STEPS", "COST", "SAVING", "5-95 %"),
    )
    cells = [(*_row(row, known), _remark(row, rows[-1], rpo_s)) for row in rows]
    inputs = [(one.title, _value(one, known[one.name]), known[one.name].source) for one in _INPUTS]
    return "\n\n".join(
        (
            table.render((*numbers, ""), cells, right=numbers, bold=bold),
            "\n".join(said),
            table.render(("INPUT", "VALUE", "FROM"), inputs, right=["VALUE"], bold=bold),
        )
    )


def _row(row: Forecast, known: Mapping[str, Known]) -> tuple[str, ...]:
    steps = row.loss_s / known["step_s"].value
    return (
        _period(row.period_s),
        percent(row.expected_share),
        "-" if row.unfinished else percent(row.wasted_share),
        _hours(row.wall_s.median),
        _range(row.wall_s, _hours),
        _amount(row.gpu_hours.median),
        f"{row.interruptions:,.1f}",
        table.duration(row.loss_s),
        f"{steps:,.0f}",
        _amount(row.cost.median),
        _share(row.saving.median),
        _range(row.saving, _share),
    )


def _range(spread: Spread, shown: Callable[[float], str]) -> str:
    ends = shown(spread.low), shown(spread.high)
    return "-" if set(ends) == {"-"} else " to ".join(ends)


def _remark(row: Forecast, best: Forecast, rpo_s: float | None) -> str:
    said = ["best"] if row is best else []
    if row.unfinished:
        said.append(f"{row.unfinished:,} of {row.runs:,} runs do not finish")
    if row.kept_period_s > row.period_s:
        said.append(f"saves every {_period(row.kept_period_s)}: not durable before")
    if rpo_s is not None and row.worst_loss_s > rpo_s * (1 + 1e-9):
        said.append(f"over the RPO: up to {table.duration(row.worst_loss_s)} lost")
    return "; ".join(said)


def _value(one: _Input, known: Known) -> str:
    if one.name == "gpus":
        return f"{known.value:,.0f}"
    if one.name == "work_h":
        return f"{known.value:,g} h"
    if one.name in {"notice_share", "precision"}:
        return percent(known.value)
    return f"{known.value:,.3g} s" if known.value < 10 else table.duration(known.value)


def _period(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _share(value: float) -> str:
    return percent(value) if math.isfinite(value) else "-"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if math.isfinite(seconds) else "-"


def _amount(value: float) -> str:
    digits = 2 if value < 1000 else 0
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def _plain(value: Any) -> Any:
    """What is infinite, since runs do not finish, becomes null."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
