"""Slurm's short form of node names, written out: ``node[0-1,3]`` is node0, node1, node3."""

from __future__ import annotations

import itertools
import re

MOST_NODES = 65_536
"""Slurm's own limit (MAX_SLURM_NODES): more names than this is a broken line, not a cluster."""

_NAME = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NOBODY = frozenset({"", "None assigned", "(null)", "None", "Unknown"})


def expand(text: str) -> tuple[str, ...]:
    """The node names that ``text`` stands for, in its order; zero padding is kept.

    Raises:
        ValueError: the brackets do not make sense, or stand for more than :data:`MOST_NODES`.
    """
    if text.strip() in _NOBODY:
        return ()
    names: list[str] = []
    position = 0
    while True:
        match = _NAME.match(text, position)
        if match is None:
            raise ValueError(f"{text!r} is not a list of nodes")
        pieces = [
            _numbers(bracket) if plain is None else [plain]
            for bracket, plain in (piece.group(1, 2) for piece in _PIECE.finditer(match.group()))
        ]
        _check(len(names) + _product(pieces))
        names.extend("".join(parts) for parts in itertools.product(*pieces))
        position = match.end()
        if position == len(text):
            return tuple(names)
        if text[position] != ",":
            raise ValueError(f"{text!r} is not a list of nodes")
        position += 1


def _numbers(bracket: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"[{bracket}] is not a range of nodes")
        first, last = match.group(1), match.group(2) or match.group(1)
        _check(len(numbers) + int(last) - int(first) + 1)
        numbers.extend(str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return numbers


def _product(pieces: list[list[str]]) -> int:
    total = 1
    for piece in pieces:
        total *= len(piece)
    return total


def _check(count: int) -> None:
    if count > MOST_NODES:
        raise ValueError(f"more than {MOST_NODES} nodes")


def first(text: str) -> str:
    """The first node name that ``text`` stands for; empty if it stands for none."""
    return next(iter(expand(text)), "")
