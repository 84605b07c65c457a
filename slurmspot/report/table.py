"""Plain, aligned tables for the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: str | Sequence[str] = "",
    bold: bool = False,
) -> str:
    """A table as text, columns two spaces apart, without trailing newline.

    Args:
        rows: cells; characters that would move the cursor are shown as escapes.
        right: names of columns to align to the right; in one text, separated by spaces.
        bold: print the header in bold, for a terminal.
    """
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    numeric = set(right.split() if isinstance(right, str) else right)
    lines = [
        "  ".join(
            " " * (width - _width(cell)) + cell
            if name in numeric
            else cell + " " * (width - _width(cell))
            for name, cell, width in zip(header, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
    if bold:
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
    return "\n".join(lines)


def printable(text: str) -> str:
    """``text`` on one line, with control characters written as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def duration(seconds: float | None) -> str:
    """A length of time to read: ``0.4 s``, ``12 s``, ``3 min 05 s``, ``2 h 07 min``."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes // 60 % 24:02d} h"


def _width(text: str) -> int:
    """Columns on a terminal: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )
