"""``slurmspot status``: where a run stands, now."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from slurmspot.cli import print_json
from slurmspot.cluster import scontrol
from slurmspot.cluster.submit import job_ids
from slurmspot.errors import NotFoundError, SlurmUnreachableError
from slurmspot.events import read_events
from slurmspot.report import table
from slurmspot.report.standing import standing
from slurmspot.runfolder import RunFolder
from slurmspot.timeline.recovery import Interruption


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: Path, as_json: bool) -> int:
    """Say where RUN stands: its job, attempts, phase, last step and last durable checkpoint."""
    folder = RunFolder.open(run)
    now = standing(read_events(folder.events), now=datetime.now(tz=UTC))
    job_id = next(iter(job_ids(folder)[::-1]), None)
    complete = folder.finished.exists()
    state = None if complete else _state(job_id)
    in_phase = state in {None, "RUNNING", "COMPLETING"}  # what is logged last is then what it does
    facts: dict[str, Any] = {
        "run": str(folder.path),
        "complete": complete,
        "job_id": job_id,
        "state": state,
        "attempts": now.attempts,
        "notices": now.notices,
        "phase": now.phase if in_phase else None,
        "phase_s": now.phase_s if in_phase else None,
        "last_step": now.last_step,
        "last_durable_step": now.last_durable_step,
        **({} if now.last_local_step is None else {"last_local_step": now.last_local_step}),
        "steps_at_risk": now.steps_at_risk,
        "steps_lost": now.steps_lost,
        "failed_saves": now.failed_saves,
    }
    if as_json:
        print_json({**facts, "interruptions": [_interruption(one) for one in now.interruptions]})
        return 0
    shown = {**facts, "phase": _phase(facts["phase"], facts["phase_s"])}
    del shown["phase_s"]
    width = max(map(len, shown))
    for name, value in shown.items():
        click.echo(f"{name.replace('_', ' '):<{width}}  {_text(value)}")
    if now.interruptions:
        header = ["INTERRUPTION", "ATTEMPT", "AT STEP", "NOTICE", "BACK", "STEPS LOST", "RTO"]
        rows = [_row(one) for one in now.interruptions]
        numbers = ["ATTEMPT", "AT STEP", "STEPS LOST", "RTO"]
        click.echo("\n" + table.render(header, rows, right=numbers))
    return 0


def _interruption(one: Interruption) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "attempt": one.attempt,
        "at_step": one.at_step,
        "notice": one.notice,
        "recovered": one.recovered,
        "steps_lost": one.steps_lost,
        "rpo_s": one.rpo_s,
        "rto_s": one.rto_s,
    }


def _row(one: Interruption) -> list[str]:
    return [
        one.kind.replace("_", " "),
        str(one.attempt),
        _text(one.at_step),
        "yes" if one.notice else "no",
        "yes" if one.recovered else "not yet",
        _text(one.steps_lost),
        table.duration(one.rto_s),
    ]


def _phase(name: str | None, seconds: float | None) -> str | None:
    return None if name is None else f"{name}, for {table.duration(seconds)}"


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _state(job_id: str | None) -> str | None:
    if job_id is None:
        return None
    try:
        return scontrol.show_job(job_id).state
    except NotFoundError:
        return "no longer known to Slurm"
    except SlurmUnreachableError as error:
        click.echo(f"slurmspot: {error}", err=True)
        return None
