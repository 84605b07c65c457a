"""Reads many plain lines of sacct at once, a field at a time.

A line is plain if it has as many fields as the header, and each that is read can be what it must
be. Values repeat: states, node lists and resources all the time, and most times of a step are those
of its job. So each is understood once and then looked up; what is left is done a list at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, repeat
from typing import Any

from slurmspot import hostlist
from slurmspot.timeline.block import Block
from slurmspot.timeline.records import JOB_ID, Header, pattern
from slurmspot.timeline.rows import IDENTITY, Row, Rows, Step, gpus, key, state
from slurmspot.timeline.times import Times, seconds

_MOST_KEPT = 8_000  # values of one field that are remembered
_ODD: Any = object()  # stands for what cannot be understood by itself

# Fields in the order of a Row, between its job id and its identity; and what they are when absent.
_ROW = (
    *("jobname", "state", "submit", "eligible", "start", "end", "nodelist", "alloctres"),
    *("cluster", "user", "partition", "restarts", "suspended"),
)
_ABSENT = {
    "eligible": None, "nodelist": (), "alloctres": (None, ""), "restarts": None, "suspended": 0.0,
}  # fmt: skip

_READ = frozenset({*_ROW, *IDENTITY})


Run = tuple[list[Step], int, int]
"""Rows that follow each other and are steps of one job: where they belong, the first, the end."""


class Columns:
    """Puts the rows of plain lines into ``rows`` and says which lines were not plain."""

    def __init__(self, header: Header, times: Times, rows: Rows) -> None:
        self._header = header
        self._rows = rows
        self._width = len(header.names) + header.trailing
        self._where = {
            name: at for at, name in enumerate(header.names) if name == "jobid" or name in _READ
        }

        def time(text: str) -> Any:
            moments = times.read(text)
            return moments[0] if len(moments) == 1 else _ODD if moments else None

        readers: dict[str, Callable[[str], Any]] = {
            "state": state,
            "nodelist": hostlist.expand,
            "alloctres": gpus,
            "restarts": lambda text: int(text) if text else None,
            "suspended": seconds,
            **dict.fromkeys(("user", "partition", "cluster"), str),
        }
        moments = _Field(time, all_at_once=times.read_all)
        self._fields = {name: _Field(read, pattern(name)) for name, read in readers.items()}
        self._fields |= dict.fromkeys(("submit", "eligible", "start", "end"), moments)

    def read(self, first: int, text: str) -> list[int]:
        """Take the plain lines of ``text``, a whole number of lines without the last newline.

        Returns:
            Indices of the others, counted from ``first``; empty lines are not among them.
        """
        delimiter, odd = self._header.delimiter, set[int]()
        block = Block.cut(text, delimiter, self._width)
        if block is not None:
            odd = self._take(range(first + 1, first + 1 + block.lines), block)
            if not odd:
                return []
        lines = text.split("\n")
        wanted = self._width - 1
        counts = map(str.count, lines, repeat(delimiter))
        odd.update(at for at, count in enumerate(counts) if count != wanted)
        while left := [at for at in range(len(lines)) if at not in odd]:
            block = Block.cut("\n".join([lines[at] for at in left]), delimiter, self._width)
            strange = self._take([first + at + 1 for at in left], block) if block else left
            if not strange:
                break
            odd.update(left[at] for at in strange)
        return [first + at for at in sorted(odd) if lines[at]]

    def _take(self, lines: Sequence[int], block: Block) -> set[int]:
        """Keep all rows, or none and say which make no sense by themselves.

        Args:
            lines: the line each row stands on, from 1.
        """
        odd: set[int] = set()
        if self._header.trailing:
            odd.update(at for at, text in enumerate(block.all(self._width - 1)) if text)
        every = range(block.lines)
        ends = self._meaning("end", block.all(self._where["end"]), every, odd)
        jobs, begun = block.all(self._where["jobid"]), block.all(self._where["start"])
        heads, runs = self._sorted(jobs, block, odd)
        is_head = bytearray(block.lines)
        for at in heads:
            is_head[at] = True
        fields = {
            name: self._meaning(name, list(compress(block.all(at), is_head)), heads, odd)
            for name, at in self._where.items()
            if name in _READ and name != "end"
        }
        fields["end"] = list(compress(ends, is_head))
        runs = [piece for run in runs for piece in _of_one_start(run, begun, lines)]
        firsts = [first for _, first, _ in runs]
        starts = self._meaning("start", [begun[at] for at in firsts], firsts, odd)
        if not all(fields["submit"]):
            submits = zip(heads, fields["submit"], strict=True)
            odd.update(at for at, submit in submits if submit is None)
        if odd or not all(starts):
            for start, (_, first, end) in zip(starts, runs, strict=True):
                if start is None or first in odd:
                    odd.update(range(first, end))
        if odd:
            return odd
        over = all(ends)
        for start, (target, first, end) in zip(starts, runs, strict=True):
            gone = ends[first:end]
            last = max(gone) if over else max(filter(None, gone), default=None)
            target.append((start, last, lines[first], lines[end - 1]))
        self._keep([lines[at] for at in heads], [jobs[at] for at in heads], fields)
        return odd

    def _keep(self, lines: Sequence[int], jobs: Sequence[str], fields: Mapping[str, Any]) -> None:
        def column(name: str) -> Iterable[Any]:
            return fields[name] if name in fields else repeat(_ABSENT.get(name, ""))

        heads = self._rows.heads
        identities = zip(*map(column, IDENTITY), strict=False)
        rows = map(Row._make, zip(lines, jobs, *map(column, _ROW), identities, strict=False))
        for cluster, job, row in zip(column("cluster"), jobs, rows, strict=False):
            heads[key(cluster, job) if cluster else job].append(row)

    def _sorted(
        self, jobs: Sequence[str], block: Block, odd: set[int]
    ) -> tuple[list[int], list[Run]]:
        """The rows that are jobs; and the steps, by the jobs that they are of."""
        heads: list[int] = []
        runs: list[Run] = []
        clusters: Sequence[str] = ()
        if "cluster" in self._where:
            clusters = block.all(self._where["cluster"])
        prefix, cluster, target, first = "\0", "", None, 0
        for at, text in enumerate(jobs):
            if text.startswith(prefix) and not (clusters and clusters[at] != cluster):
                continue
            if target is not None:
                runs.append((target, first, at))
                prefix, target = "\0", None
            if text.isdecimal():
                heads.append(at)
                continue
            match = JOB_ID.fullmatch(text)
            if match is None:
                odd.add(at)
            elif match["step"]:
                job = match["job"]
                cluster = clusters[at] if clusters else ""
                prefix, first = f"{job}.", at
                target = self._rows.steps[key(cluster, job)]
            else:
                heads.append(at)
        if target is not None:
            runs.append((target, first, len(jobs)))
        return heads, runs

    def _meaning(
        self, name: str, cells: list[str], lines: Sequence[int], odd: set[int]
    ) -> list[Any]:
        """What a field means in some lines; where it means nothing they are odd."""
        field = self._fields.get(name)
        if field is None:
            return cells
        found = field.read(cells)
        if field.odd:
            odd.update(line for line, text in zip(lines, cells, strict=True) if text in field.odd)
        return found


def _of_one_start(run: Run, begun: Sequence[str], lines: Sequence[int]) -> Iterable[Run]:
    """The run, if its steps began together and stand together; else each step by itself."""
    target, first, end = run
    together = begun[first:end].count(begun[first]) == end - first
    if together and lines[end - 1] - lines[first] == end - 1 - first:
        return (run,)
    return [(target, at, at + 1) for at in range(first, end)]


class _Field:
    """One field: what each of its texts means.

    Attributes:
        odd: texts that mean nothing, or nothing by themselves.
    """

    def __init__(
        self,
        read: Callable[[str], Any],
        like: re.Pattern[str] | None = None,
        all_at_once: Callable[[Sequence[str]], list[Any] | None] = lambda _: None,
    ) -> None:
        self._read = read
        self._like = like
        self._all_at_once = all_at_once
        self._known: dict[str, Any] = {}
        self.odd: set[str] = set()

    def read(self, texts: Sequence[str]) -> list[Any]:
        """The meaning of each text."""
        found = self._all_at_once(texts)
        if found is not None:
            return found
        known = self._known.__getitem__
        try:
            return list(map(known, texts))
        except KeyError:  # some are met for the first time
            self._learn(texts)
        return list(map(known, texts))

    def _learn(self, texts: Sequence[str]) -> None:
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        for text in set(texts).difference(self._known):
            meaning = self._understood(text)
            self._known[text] = meaning
            if meaning is _ODD:
                self.odd.add(text)

    def _understood(self, text: str) -> Any:
        if self._like is not None and not self._like.fullmatch(text):
            return _ODD
        try:
            return self._read(text)
        except (ValueError, OverflowError, OSError):
            return _ODD
