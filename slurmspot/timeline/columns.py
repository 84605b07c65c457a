"""Reads many plain lines of sacct at once, a field at a time.

A line is plain if it has as many fields as the header, and each that is read can be what it must
be. Values repeat: states, node lists and resources all the time, and most times of a step are those
of its job. So each is understood once and then looked up; what is left is done a list at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
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
        moments = _Field(time, many=times.read_plain)  # one for all: they share most values
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
        starts = self._meaning("start", block, None, odd)
        ends = self._meaning("end", block, None, odd)
        jobs = block.all(self._where["jobid"])
        heads, targets = self._sorted(jobs, block, odd)
        fields = {
            name: self._meaning(name, block, heads, odd) for name in self._where if name in _READ
        }
        if not all(fields["submit"]):
            submits = zip(heads, fields["submit"], strict=True)
            odd.update(at for at, submit in submits if submit is None)
        if not all(starts):
            begun = zip(targets, starts, strict=True)
            odd.update(
                at
                for at, (target, start) in enumerate(begun)
                if target is not None and start is None
            )
        if odd:
            return odd
        for target, step in zip(targets, zip(starts, ends, lines, strict=True), strict=True):
            if target is not None:
                target.append(step)
        self._keep([lines[at] for at in heads], [jobs[at] for at in heads], fields)
        return odd

    def _keep(self, lines: Sequence[int], jobs: Sequence[str], fields: Mapping[str, Any]) -> None:
        def column(name: str) -> Iterable[Any]:
            return fields[name] if name in fields else repeat(_ABSENT.get(name, ""))

        heads = self._rows.heads
        identities = zip(*map(column, IDENTITY), strict=False)
        for row in map(Row._make, zip(lines, jobs, *map(column, _ROW), identities, strict=False)):
            heads[(row.cluster, row.job_id) if row.cluster else row.job_id].append(row)

    def _sorted(
        self, jobs: Sequence[str], block: Block, odd: set[int]
    ) -> tuple[list[int], list[list[Step] | None]]:
        """The rows that are jobs; and for every row, the list that a step belongs in."""
        heads: list[int] = []
        targets: list[list[Step] | None] = []
        steps, target = self._rows.steps, None
        job, prefix, where = "", "\0", ""
        clusters: Iterable[str] = repeat("")
        if "cluster" in self._where:
            clusters = block.all(self._where["cluster"])
        for text, cluster in zip(jobs, clusters, strict=False):
            if text.startswith(prefix) and cluster == where:
                targets.append(target)
            elif text.isdecimal():
                heads.append(len(targets))
                targets.append(None)
            else:
                match = JOB_ID.fullmatch(text)
                if match is None:
                    odd.add(len(targets))
                elif match["step"]:
                    job, where = match["job"], cluster
                    prefix, target = f"{job}.", steps[key(where, job)]
                    targets.append(target)
                    continue
                else:
                    heads.append(len(targets))
                targets.append(None)
        return heads, targets

    def _meaning(
        self, name: str, block: Block, which: Sequence[int] | None, odd: set[int]
    ) -> list[Any]:
        """What a field means in all rows or in ``which``; where it means nothing they are odd."""
        at = self._where[name]
        cells = block.all(at) if which is None else block.some(at, which)
        field = self._fields.get(name)
        if field is None:
            return cells
        found = field.read(cells)
        if field.odd:
            rows = range(block.lines) if which is None else which
            odd.update(row for row, text in zip(rows, cells, strict=True) if text in field.odd)
        return found


class _Field:
    """One field: what each of its texts means.

    Attributes:
        odd: texts that mean nothing, or nothing by themselves.
    """

    def __init__(
        self,
        read: Callable[[str], Any],
        like: re.Pattern[str] | None = None,
        many: Callable[[Iterable[str]], Iterable[tuple[str, Any]]] = lambda _: (),
    ) -> None:
        self._read = read
        self._like = like
        self._many = many
        self._known: dict[str, Any] = {}
        self.odd: set[str] = set()

    def read(self, texts: Sequence[str]) -> list[Any]:
        """The meaning of each text."""
        known = self._known.__getitem__
        try:
            return list(map(known, texts))
        except KeyError:  # some are met for the first time
            self._learn(texts)
        return list(map(known, texts))

    def _learn(self, texts: Sequence[str]) -> None:
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        fresh = set(texts).difference(self._known)
        before = len(self._known)
        self._known.update(self._many(fresh))
        if len(self._known) - before == len(fresh):
            return
        for text in fresh.difference(self._known):
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
