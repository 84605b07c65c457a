"""Ask Slurm's accounting for every attempt of some jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta

from slurmspot.cluster.command import Output, Runner, checked
from slurmspot.errors import NotFoundError, SlurmError, SlurmUnreachableError

_PAUSE_S = 0.5

_OFF = ("accounting storage is disabled", "accounting_storage/none", "not running a DBD")
_NO_DATABASE = (
    "Problem talking to the database",
    "Unable to connect to database",
    "slurm_persist_conn_open",
    "slurmdbd",
    "Connection refused",
    "Connection timed out",
)


def query(runner: Runner, job_ids: Sequence[str], *, fields: Sequence[str], since: datetime) -> str:
    """Rows of all attempts and steps of ``job_ids``, as ``--parsable2`` text with a header.

    Args:
        fields: what to ask for; those that this release of sacct does not know are left out.
        since: aware; job ids are used again, so that a query without a bound finds strangers.

    Raises:
        NotFoundError: accounting knows no such job since then.
        SlurmUnreachableError: there is no sacct, or its database does not answer.
        SlurmError: accounting is switched off, or sacct refused.
    """
    text = _sacct(runner, [*_rows(runner, fields), _since(since), f"--jobs={','.join(job_ids)}"])
    if text.count("\n") < 2:
        raise NotFoundError(
            f"accounting knows no job {', '.join(job_ids)} since {since:%Y-%m-%d %H:%M}",
            why="the id is wrong, the job is older, or it was submitted to another cluster",
            fix="give an earlier time (--since), or see which jobs there are with `sacct -a`",
        )
    return text


def pages(
    runner: Runner,
    *,
    user: str | None,
    partition: str | None,
    fields: Sequence[str],
    since: datetime,
    until: datetime,
    page: timedelta = timedelta(days=7),
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[str]:
    """Rows of everything that ran between two times, a text with a header for each ``page``.

    One question for months of a busy cluster holds its database up, and may be cut off; between
    two questions it is left alone for a while. A job that ran in two pages stands in both.

    Args:
        user: only theirs; ``partition`` only what ran there.
        page: how long a time to ask for at once.

    Raises:
        SlurmUnreachableError, SlurmError: as :func:`query`.
    """
    options = _rows(runner, fields)
    options += [f"--user={user}"] if user else []
    options += [f"--partition={partition}"] if partition else []
    start = since
    while start < until:
        end = min(until, start + page)
        yield _sacct(runner, [*options, _since(start), f"--endtime={_local(end)}"])
        start = end
        if start < until:
            wait(_PAUSE_S)


def outages(runner: Runner, nodes: Sequence[str], *, fields: Sequence[str], since: datetime) -> str:
    """Records of when ``nodes`` were down or drained, as ``--parsable2`` text without a header.

    Raises:
        SlurmUnreachableError: the database does not answer.
        SlurmError: it does not tell (``PrivateData=events``).
    """
    words = [f"nodes={','.join(nodes)}", f"start={_local(since)}", f"format={','.join(fields)}"]
    return checked(runner, ["sacctmgr", "--parsable2", "--noheader", "show", "event", *words])


def _rows(runner: Runner, fields: Sequence[str]) -> list[str]:
    """Options for all attempts and steps, in those of ``fields`` that this sacct knows."""
    known = {name.lower() for name in _sacct(runner, ["--helpformat"]).split()}
    return [
        "--allusers",
        "--duplicates",  # without it, all attempts but the last are left out
        "--parsable2",
        f"--format={','.join(name for name in fields if name.lower() in known)}",
    ]


def _since(time: datetime) -> str:
    return f"--starttime={_local(time)}"


def _local(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%dT%H:%M:%S}"


def _sacct(runner: Runner, options: Sequence[str]) -> str:
    output: Output = runner(["sacct", *options])
    words = output.stderr.strip()
    if output.returncode == 0 and (output.stdout.strip() or not words):
        return output.stdout
    words = words or output.stdout.strip() or "no reason given"
    why = words.splitlines()[-1].removeprefix("sacct: error: ")
    if any(sign in words for sign in _OFF):
        raise SlurmError(
            "this cluster keeps no accounts, so past attempts cannot be told apart",
            why=why,
            fix="set AccountingStorageType=accounting_storage/slurmdbd in slurm.conf, "
            "or give a saved text with --sacct FILE",
        )
    if any(sign in words for sign in _NO_DATABASE):
        raise SlurmUnreachableError(
            "Slurm's accounting database does not answer",
            why=why,
            fix="check slurmdbd with `sacctmgr ping`; or give a saved text with --sacct FILE",
        )
    if "configuration source" in words or "slurm.conf" in words:
        raise SlurmUnreachableError(
            "this machine does not know its Slurm cluster",
            why=why,
            fix="run this on a login node, or set SLURM_CONF; or give --sacct FILE",
        )
    raise SlurmError("sacct refused", why=why)
