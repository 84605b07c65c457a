"""Many lines of as many fields each, cut in one go."""

from __future__ import annotations

from itertools import repeat
from operator import contains


class Block:
    """The fields of some lines.

    Attributes:
        lines: how many there are.
    """

    def __init__(self, cells: list[str], firsts: list[str], lasts: list[str], width: int) -> None:
        self._cells = cells
        self._firsts = firsts
        self._lasts = lasts
        self._inner = width - 1
        self.lines = len(firsts)

    @classmethod
    def cut(cls, text: str, delimiter: str, width: int) -> Block | None:
        """Cut ``text``, or say None if not every line of it has ``width`` fields, two at least.

        Cut at the delimiter alone, the last field of a line and the first of the next stay
        together: there, and nowhere else, one newline must stand.
        """
        inner = width - 1
        cells = text.split(delimiter)
        lines, rest = divmod(len(cells) - 1, inner)
        if rest or not lines or text.count("\n") != lines - 1:
            return None
        seams = cells[inner:-1:inner]
        if not all(map(contains, seams, repeat("\n"))):
            return None
        ends = "\n".join(seams).split("\n") if seams else []
        return cls(cells, [cells[0], *ends[1::2]], [*ends[0::2], cells[-1]], width)

    def all(self, field: int) -> list[str]:
        """A field of every line."""
        if 0 < field < self._inner:
            return self._cells[field :: self._inner]
        return self._lasts if field else self._firsts
