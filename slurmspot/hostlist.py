"""Slurm's host lists: ``gpu[07-09,12],login1``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator


def expand(hostlist: str) -> list[str]:
    """Names of a host list: ``a[1-2,07],b`` → ``a1 a2 a07 b``. Numbers keep their zeros."""
    parts = re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", hostlist)
    return [name for part in parts for name in _expand_one(part)]


def first(hostlist: str) -> str:
    """The first name of a host list; empty for an empty one."""
    return next(iter(expand(hostlist)), "")


def _expand_one(part: str) -> Iterator[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        yield part
        return
    prefix, ranges, rest = match.groups()
    for piece in ranges.split(","):
        low, dash, high = piece.partition("-")
        numbers = range(int(low), int(high) + 1) if dash else (low,)
        for number in numbers:
            for tail in _expand_one(rest):
                yield prefix + str(number).zfill(len(low)) + tail
