"""Cuts the text of ``sacct --parsable2`` into records, and each record into fields.

sacct quotes nothing: a job's name may hold the delimiter or a newline, and then a record has more
fields than its header, or goes on over several lines. What tells fields apart again is what they
must look like: there is one way only to cut ``exp|lr=1e-3|COMPLETED|2026-…``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from slurmspot.errors import UsageError
from slurmspot.timeline.times import TIME

NEEDED = ("JobID", "State", "Submit", "Start", "End")
"""Fields without which attempts cannot be told apart."""

_ON_EVERY_RELEASE = (
    *("JobID", "JobName", "User", "Partition", "State", "Submit", "Eligible", "Start", "End"),
    *("Suspended", "ElapsedRaw", "NodeList", "AllocTRES"),
)
FIELDS = (*_ON_EVERY_RELEASE, "Cluster", "DBIndex", "Restarts", "ExitCode", "Reason")
"""What to ask sacct for, as far as it knows the field (``sacct --helpformat``)."""

COMMAND = f"sacct --duplicates --parsable2 --format={','.join(_ON_EVERY_RELEASE)} --jobs=ID > FILE"
"""The command that saves a text which can be read here, on every release of Slurm."""

JOB_ID = re.compile(
    r"(?P<job>\d+(?:_(?:\d+|\[[^\]\n]*\]))?(?:\+\d+)?)(?:\.(?P<step>[A-Za-z0-9_+]+))?"
)

_MOST_LINES = 50  # of one record

_TIMES = ("submit", "eligible", "start", "end")
_NUMBER = r"[\d.]*[KMGTP]?"
_READ = {
    "jobid": JOB_ID.pattern,
    "state": r"[A-Z][A-Z_]*(?: by [^\s:|]+)?\+?",
    **dict.fromkeys(_TIMES, f"{TIME}|Unknown|None|N/A|"),
    "submit": TIME,
    "nodelist": r"(?=.*[A-Za-z])(?:[^\s|=:\[\]]|\[[^\s|\[\]]*\])+|None assigned|\(null\)|",
    "alloctres": r"(?:[^\s=,|]+=[^\s=,|]*)(?:,[^\s=,|]+=[^\s=,|]*)*|",
    "restarts": r"\d*",
    "suspended": r"(?:(?:\d+-)?\d+:)?\d+:\d+(?:\.\d+)?|",
    "elapsedraw": r"\d*",
}
# Fields that are not read, but help to tell the others apart.
_SEEN = {
    "reqtres": _READ["alloctres"],
    "exitcode": r"\d+:\d+|",
    "layout": "[A-Za-z]*",
    "dbindex": _NUMBER,
    "nnodes": _NUMBER,
    "ntasks": _NUMBER,
    "ncpus": _NUMBER,
    "alloccpus": _NUMBER,
    "allocnodes": _NUMBER,
}
_FREE_TEXT = frozenset(
    {
        *("jobname", "comment", "admincomment", "systemcomment", "submitline", "workdir"),
        *("stdin", "stdout", "stderr", "extra", "container", "constraints", "reservation"),
        *("account", "wckey", "licenses", "reason"),
    }
)


def pattern(name: str) -> re.Pattern[str] | None:
    """What a field that is read must look like; None if anything will do."""
    return re.compile(_READ[name]) if name in _READ else None


class Header:
    """The first line: which field stands where, and how to cut a record accordingly.

    Raises:
        UsageError: it lacks a field of :data:`NEEDED`.
    """

    def __init__(self, line: str) -> None:
        match = re.match(r"\w+(\W+)", line)
        self.line = line
        self.delimiter = match.group(1) if match else "|"
        self.names = line.removesuffix(self.delimiter).lower().split(self.delimiter)
        missing = [name for name in NEEDED if name.lower() not in self.names]
        if missing:
            raise UsageError(
                f"the sacct text lacks {', '.join(missing)}",
                why=f"its first line is {line[:200]!r}",
                fix=f"save it with a header and these fields: {COMMAND}",
            )
        self.free_first = self.names[0] in _FREE_TEXT
        self.free_last = self.names[-1] in _FREE_TEXT
        self.trailing = line.endswith(self.delimiter)
        self._patterns = [re.compile((_READ | _SEEN).get(name, r"[^\n]*")) for name in self.names]
        # With a delimiter that typed fields hold too (a comma in a node list), any may be cut.
        anywhere = self.delimiter.strip() in set(",:;=-./_+")
        self._may_hold = [anywhere or name in _FREE_TEXT for name in self.names]

    def cut(self, record: str) -> dict[str, str] | None:
        """The fields of a record by lower-case name, or None if it is not one."""
        tokens = self._tokens(record)
        spare = len(tokens) - len(self.names)
        if spare < 0:
            return None
        if spare == 0:
            return None if self._misfit(tokens) else dict(zip(self.names, tokens, strict=True))
        values = self._place(0, 0, tokens, set())
        return None if values is None else dict(zip(self.names, reversed(values), strict=True))

    def complaint(self, record: str) -> str:
        """Why :meth:`cut` finds no record here."""
        tokens = self._tokens(record)
        if len(tokens) < len(self.names):
            return f"{len(tokens)} fields, where the header names {len(self.names)}"
        if len(tokens) > len(self.names):
            return "more fields than the header names, and no way to tell them apart"
        return self._misfit(tokens) or "not a record"

    def opens(self, line: str) -> bool:
        """Whether ``line`` looks like the beginning of a record that was cut short."""
        first, found, _ = line.partition(self.delimiter)
        return bool(found and first) and self._fits(0, first)

    def _tokens(self, record: str) -> list[str]:
        if self.trailing:
            record = record.removesuffix(self.delimiter)
        return record.split(self.delimiter)

    def _misfit(self, tokens: Sequence[str]) -> str | None:
        """What is wrong with a record of as many fields as the header, in those that are read."""
        for index, (name, token) in enumerate(zip(self.names, tokens, strict=True)):
            if name in _READ and not self._fits(index, token):
                return f"{token!r} cannot be the {name} of a job"
        return None

    def _fits(self, index: int, text: str) -> bool:
        if self.names[index] in _FREE_TEXT:
            return True
        return self._patterns[index].fullmatch(text) is not None

    def _place(
        self, index: int, at: int, tokens: Sequence[str], dead: set[tuple[int, int]]
    ) -> list[str] | None:
        """Values of the fields from ``index`` on, last first, made of ``tokens[at:]``."""
        if index == len(self.names):
            return [] if at == len(tokens) else None
        spare = len(tokens) - at - (len(self.names) - index)
        widths = range(spare + 1 if self._may_hold[index] else 1)
        # Text takes as little as it can, a list of nodes or resources as much as it can.
        for extra in widths if self.names[index] in _FREE_TEXT else reversed(widths):
            end = at + 1 + extra
            if (index + 1, end) in dead:
                continue
            value = self.delimiter.join(tokens[at:end])
            # sacct prints a time that it does not know as Unknown: here an empty one is misplaced.
            if self._fits(index, value) and (value or self.names[index] not in _TIMES):
                values = self._place(index + 1, end, tokens, dead)
                if values is not None:
                    values.append(value)
                    return values
        dead.add((index, at))
        return None


class Lines(Protocol):
    """The lines of a text; the header is the first."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> str: ...


Span = tuple[int, int]
"""A record: the index of its first line, and of the line after its last."""


def spans(
    header: Header, lines: Lines, odd: Sequence[int], has_steps: Callable[[str], bool]
) -> list[Span]:
    """The records that the ``odd`` lines belong to, in order.

    Args:
        odd: indices, ascending, of every line that is not a plain record by itself.
        has_steps: whether a plain line is a step of the job by that id.
    """
    joiner = _Joiner(header, lines, odd, has_steps)
    found: list[Span] = []

    def empty(at: int) -> bool:
        return not lines[at] or lines[at] == header.line

    for at in odd:
        if empty(at) or (found and at < found[-1][1]):
            continue
        end = joiner.end(at)
        if end is None and header.free_last and not header.opens(lines[at]):
            # Free text at the end of the record before goes on here.
            before = next((index for index in range(at - 1, 0, -1) if not empty(index)), None)
            if before is not None:
                first = found.pop()[0] if found and before < found[-1][1] else before
                found.append((first, at + 1))
                continue
        found.append((at, end or at + 1))
    return found


class _Joiner:
    """Finds how many lines make one record."""

    def __init__(
        self, header: Header, lines: Lines, odd: Sequence[int], has_steps: Callable[[str], bool]
    ) -> None:
        self._header = header
        self._lines = lines
        self._alone = lru_cache(maxsize=4 * _MOST_LINES)(lambda at: header.cut(lines[at]))
        self._odd = odd
        self._in_plain = has_steps
        self._in_odd: set[str] | None = None

    def end(self, at: int) -> int | None:
        """The index after the last line of the record that begins at ``at``; None if none does."""
        if self._alone(at) is not None:
            return at + 1
        for last in range(at + 1, min(at + _MOST_LINES, len(self._lines))):
            if self._stands_alone(last, self._lines[at]):
                return None
            if self._is_one(at, last):
                return last + 1
        return None

    def _stands_alone(self, index: int, opening: str) -> bool:
        """Whether a line is a record of its own, not the rest of one that ``opening`` begins.

        A name may look like a record: then the one whose steps stand in the text is real.
        """
        fields = self._alone(index)
        if fields is None or self._header.free_first or not fields[self._header.names[0]]:
            return False
        job = fields["jobid"]
        ours = opening.partition(self._header.delimiter)[0]
        return "." in job or not self._has_steps(ours) or self._has_steps(job)

    def _has_steps(self, job: str) -> bool:
        if self._in_odd is None:
            cut = (self._header.cut(self._lines[at]) for at in self._odd)
            ids = (JOB_ID.fullmatch(fields["jobid"]) for fields in cut if fields)
            self._in_odd = {match["job"] for match in ids if match and match["step"]}
        return job in self._in_odd or self._in_plain(job)

    def _is_one(self, first: int, last: int) -> bool:
        text = "\n".join(self._lines[at] for at in range(first, last + 1))
        fields, tail = self._header.cut(text), self._alone(last)
        if fields is None:
            return False
        # Where text stands first, what comes before a record may be part of that text only.
        return tail is None or not self._header.free_first or fields["jobid"] == tail["jobid"]
