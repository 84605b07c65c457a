"""The lines of a large text, decoded a block at a time, so that they need not all be held."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache

_BLOCK_BYTES = 1 << 17


class Lines:
    """Lines by their index, from 0. Bytes that are not UTF-8 are replaced."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offsets = [0]  # of each block, in bytes; it begins where a line does
        self._firsts: list[int] = []  # index of each block's first line
        self._length = 0
        self._windows = data[: data.find(b"\n") + 1].endswith(b"\r\n")
        self._lines = lru_cache(maxsize=4)(lambda block: self._text(block).split("\n"))

    def __len__(self) -> int:
        """How many lines the blocks read so far hold; all of them once :meth:`blocks` is done."""
        return self._length

    def __getitem__(self, index: int) -> str:
        """A line of a block that has been read."""
        block = bisect_right(self._firsts, index) - 1
        return self._lines(block)[index - self._firsts[block]]

    def blocks(self) -> Iterator[tuple[int, str]]:
        """Every block once: the index of its first line, and its text without the last newline."""
        while self._offsets[-1] < len(self._data):
            newline = self._data.find(b"\n", self._offsets[-1] + _BLOCK_BYTES)
            self._offsets.append(len(self._data) if newline < 0 else newline + 1)
            text = self._text(len(self._offsets) - 2)
            self._firsts.append(self._length)
            self._length += text.count("\n") + 1
            yield self._firsts[-1], text

    def _text(self, block: int) -> str:
        raw = self._data[self._offsets[block] : self._offsets[block + 1]]
        text = raw.decode(errors="replace")
        if self._windows:
            text = text.replace("\r\n", "\n").removesuffix("\r")
        return text.removesuffix("\n")
