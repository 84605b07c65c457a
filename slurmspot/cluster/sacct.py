"""Ask Slurm's accounting for every attempt of some jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from slurmspot.cluster.command import Output, Runner
from slurmspot.errors import NotFoundError, SlurmError, SlurmUnreachableError

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
    known = {name.lower() for name in _sacct(runner, ["--helpformat"]).split()}
    text = _sacct(
        runner,
        [
            "--allusers",
            "--duplicates",  # without it, all attempts but the last are left out
            "--parsable2",
            f"--starttime={since.astimezone():%Y-%m-%dT%H:%M:%S}",
            f"--format={','.join(name for name in fields if name.lower() in known)}",
            f"--jobs={','.join(job_ids)}",
        ],
    )
    if text.count("\n") < 2:
        raise NotFoundError(
            f"accounting knows no job {', '.join(job_ids)} since {since:%Y-%m-%d %H:%M}",
            why="the id is wrong, the job is older, or it was submitted to another cluster",
            fix="give an earlier time (--since), or see which jobs there are with `sacct -a`",
        )
    return text


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
