"""Reads the text of ``sacct --parsable2``: plain lines fast, odd ones with care."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo

from slurmspot import hostlist
from slurmspot.errors import NotFoundError
from slurmspot.timeline.columns import Columns
from slurmspot.timeline.lines import BLOCK_BYTES, Lines, Source
from slurmspot.timeline.records import COMMAND, JOB_ID, Header, spans
from slurmspot.timeline.rows import (
    IDENTITY,
    JobKey,
    RejectedRow,
    Row,
    Rows,
    Step,
    gpus,
    id_of,
    key,
    state,
)
from slurmspot.timeline.times import Times, in_order, seconds

_TIMES = ("submit", "eligible", "start", "end")


def read_text(source: Source, *, tz: tzinfo | None = None, block_bytes: int = BLOCK_BYTES) -> Rows:
    """The rows of a text with a header, fields in any order, any delimiter.

    Args:
        source: open for reading from its beginning, and seekable.
        tz: the cluster's time zone, for times without one; None means this machine's.
        block_bytes: how much to read at once.

    Raises:
        NotFoundError: the text is empty.
        UsageError: the header is missing, or lacks a field of :data:`.records.NEEDED`.
    """
    lines, times = Lines(source, block_bytes=block_bytes), Times(tz)
    rows = Rows(text_of=lambda line: lines[line - 1])
    blocks = lines.blocks()
    _, text = next(blocks, (0, ""))
    head, newline, rest = text.removeprefix("\ufeff").partition("\n")
    if not head.strip() and not rest.strip():
        raise NotFoundError(
            "the sacct text is empty",
            why="sacct prints a header even when it finds no job",
            fix=f"save it again: {COMMAND}",
        )
    header = Header(head)
    columns = Columns(header, times, rows)
    odd = columns.read(1, rest) if newline else []
    for first, text in blocks:
        odd += columns.read(first, text)
    if odd:
        _read_odd(header, lines, odd, times, rows)
    return rows


def _read_odd(header: Header, lines: Lines, odd: Sequence[int], times: Times, rows: Rows) -> None:
    jobs = {id_of(owner) for owner, steps in rows.steps.items() if steps}
    found = spans(header, lines, odd, jobs.__contains__)
    plain = {at + 1 for first, end in found for at in range(first, end)}.difference(
        at + 1 for at in odd
    )
    if plain:  # lines that looked like records but are the text of one
        found += [(line - 1, line) for line in sorted(rows.drop(plain))]
    for first, end in found:
        text = "\n".join(lines[at] for at in range(first, end))
        fields = header.cut(text)
        read = header.complaint(text) if fields is None else _row(first + 1, fields, times, rows)
        if isinstance(read, Row):
            rows.heads[key(read.cluster, read.job_id)].append(read)
        elif isinstance(read, str):
            rows.rejected.append(RejectedRow(line=first + 1, reason=read, text=text))
        else:
            owner, step = read
            rows.steps[owner].append(step)


def _row(
    line: int, fields: Mapping[str, str], times: Times, rows: Rows
) -> Row | tuple[JobKey, Step] | str:
    """The row, a step with the key of its job, or why it is neither."""
    match = JOB_ID.fullmatch(fields["jobid"])
    try:
        suspended_s = seconds(fields.get("suspended", ""))
        elapsed = fields.get("elapsedraw", "")
        moments = [times.read(fields.get(name, "")) for name in _TIMES]
        submit, eligible, start, end = in_order(
            moments, length_s=int(elapsed) + suspended_s if elapsed else None
        )
        nodes = hostlist.expand(fields.get("nodelist", ""))
    except (ValueError, OverflowError, OSError) as error:
        return str(error)
    if match is None or submit is None:
        return "a record without " + ("a job id" if match is None else "a submit time")
    if any(len(meant) > 1 for meant in moments):
        rows.repeated.append(line)
    cluster = fields.get("cluster", "")
    if match["step"]:
        return key(cluster, match["job"]), (start or submit, end, line, line)
    restarts = fields.get("restarts", "")
    return Row(
        line=line,
        job_id=match["job"],
        name=fields.get("jobname", ""),
        state=state(fields["state"]),
        submit=submit,
        eligible=eligible,
        start=start,
        end=end,
        nodes=nodes,
        gpus=gpus(fields["alloctres"]) if "alloctres" in fields else (None, ""),
        cluster=cluster,
        user=fields.get("user", ""),
        partition=fields.get("partition", ""),
        restarts=int(restarts) if restarts else None,
        suspended_s=suspended_s,
        identity=tuple(fields.get(name, "") for name in IDENTITY),
    )
