"""The lines of a large text, decoded a block at a time, so that they need not all be held."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

BLOCK_BYTES = 1 << 16
"""A block's size: few enough to stay in the processor's cache, enough to be worth a call."""


class Source(Protocol):
    """Bytes that can be read again: a file, packed or not."""

    def read(self, size: int = -1, /) -> bytes:
        """The next ``size`` bytes, or all that are left."""

    def readline(self) -> bytes:
        """The rest of a line, with its newline."""

    def seek(self, offset: int, /) -> int:
        """Go on from ``offset``."""


class Lines:
    """Lines by their index, from 0. Bytes that are not UTF-8 are replaced.

    Args:
        source: open for reading from its beginning; is moved about in.
        block_bytes: the least size of a block, but for the last.
    """

    def __init__(self, source: Source, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._source = source
        self._block_bytes = block_bytes
        self._windows = source.readline().endswith(b"\r\n")
        self._offsets = [0]  # of each block, in bytes; it begins where a line does
        self._firsts: list[int] = []  # index of each block's first line
        self._length = 0
        self._lines = lru_cache(maxsize=4)(self._lines_of)

    def __len__(self) -> int:
        """How many lines the blocks read so far hold; all of them once :meth:`blocks` is done."""
        return self._length

    def __getitem__(self, index: int) -> str:
        """A line of a block that has been read."""
        block = bisect_right(self._firsts, index) - 1
        return self._lines(block)[index - self._firsts[block]]

    def blocks(self) -> Iterator[tuple[int, str]]:
        """Every block once: the index of its first line, and its text without the last newline."""
        while raw := self._read(self._offsets[-1], self._block_bytes):
            raw += self._source.readline()
            self._offsets.append(self._offsets[-1] + len(raw))
            text = self._text(raw)
            self._firsts.append(self._length)
            self._length += text.count("\n") + 1
            yield self._firsts[-1], text

    def _lines_of(self, block: int) -> list[str]:
        start, end = self._offsets[block : block + 2]
        return self._text(self._read(start, end - start)).split("\n")

    def _read(self, start: int, size: int) -> bytes:
        self._source.seek(start)
        return self._source.read(size)

    def _text(self, raw: bytes) -> str:
        text = raw.decode(errors="replace")
        if self._windows:
            text = text.replace("\r\n", "\n").removesuffix("\r")
        return text.removesuffix("\n")
