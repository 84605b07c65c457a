"""Move the bytes of one file between memory and disk with several threads, hashing on the way.

The file is cut into pieces. Each thread takes the next piece, moves it, and hashes it when it is
that piece's turn: moving runs in parallel, hashing in file order, so that one hash covers a run of
any length in one pass over memory. All the memory it takes is a buffer a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from slurmspot.checkpoint.disk import BLOCK_BYTES, Bytes, InFile, OutFile, aligned


@dataclass(frozen=True, slots=True)
class Crew:
    """How many threads share a file, and the most that one of them moves at a time."""

    threads: int
    piece_bytes: int


WRITING = Crew(threads=8, piece_bytes=4 << 20)
"""While some hash or copy, others keep the disk busy."""

READING = Crew(threads=4, piece_bytes=1 << 20)
"""What has just been read is hashed and copied out of a core's own cache, not out of memory."""

CACHED = Crew(threads=2, piece_bytes=1 << 20)
"""In memory, a file takes one write at a time, best of what a core's own cache holds still."""

_BRIDGE_BYTES = 64 << 10  # reading over a gap this small beats beginning a new piece
_FEW = 64  # so many parts of a piece are moved each by itself


_Moves = tuple[list[Bytes], list[tuple[Bytes, Bytes]]]
"""Memory for every byte of a piece, and what is copied between own memory and the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive bytes of a file.

    Attributes:
        digest: is fed these bytes in order; several runs may share one.
        memory: gives where they come from or go to, when it is their turn; None hashes only.
        done: called once all of them have arrived and have been hashed, by any thread.
    """

    start: int
    size: int
    digest: xxhash.xxh3_128
    memory: Callable[[], memoryview | bytes | Bytes] | None = None
    done: Callable[[], None] | None = None


@dataclass(slots=True)
class _Part:
    """Some bytes of a run: ``at`` within their piece, and their memory, if they have any."""

    run: Run
    at: int
    size: int
    memory: Bytes | None

    def within(self, buffer: Bytes) -> Bytes:
        """Its place in a buffer for the whole piece."""
        return buffer[self.at : self.at + self.size]


@dataclass(slots=True)
class _Piece:
    """A stretch of the file that begins on a block."""

    start: int
    size: int = 0
    parts: list[_Part] = field(default_factory=list)

    def in_place(self, buffer: Bytes) -> _Moves:
        """Each part to or from its own memory."""
        memory = []
        end = 0
        for part in self.parts:
            if part.at > end:
                memory.append(buffer[end : part.at])
            end = part.at + part.size
            memory.append(part.within(buffer) if part.memory is None else part.memory)
        return memory, []

    def together(self, buffer: Bytes) -> _Moves:
        """All of it by way of the buffer."""
        copies = [(one.memory, one.within(buffer)) for one in self.parts if one.memory is not None]
        return [buffer[: self.size]], copies

    def in_blocks(self, buffer: Bytes, alignment: int) -> _Moves:
        """Whole blocks of aligned memory: a part's own if it has such, else the buffer's."""
        memory = []
        copies = []
        end = 0
        for part in self.parts:
            if part.memory is None:
                continue
            fits = part.at % BLOCK_BYTES == part.memory.ctypes.data % alignment == 0
            own = part.size - part.size % BLOCK_BYTES if fits else 0
            if own:
                if part.at > end:
                    memory.append(buffer[end : part.at])
                memory.append(part.memory[:own])
                end = part.at + own
            if own < part.size:
                copies.append((part.memory[own:], part.within(buffer)[own:]))
        size = -(-self.size // BLOCK_BYTES) * BLOCK_BYTES
        if size > end:
            memory.append(buffer[end:size])
        return memory, copies

    def hash(self, buffer: Bytes, turn: _Turn) -> None:
        """Feed each part to its digest, when it is this piece's turn."""
        with turn:
            for part in self.parts:
                content = part.within(buffer) if part.memory is None else part.memory
                part.run.digest.update(content.data)


def write(file: OutFile, runs: Sequence[Run]) -> None:
    """Write ``runs``, which follow each other from the start of the file without a gap."""

    def move(piece: _Piece, buffer: Bytes, turn: _Turn) -> None:
        if file.direct:
            buffer[piece.size : piece.size + BLOCK_BYTES] = 0
            memory, copies = piece.in_blocks(buffer, file.memory_alignment)
        elif len(piece.parts) <= _FEW:
            memory, copies = piece.in_place(buffer)
        else:
            memory, copies = piece.together(buffer)
        for own, through in copies:
            through[:] = own
        piece.hash(buffer, turn)
        file.write(memory, piece.start)

    _Job(runs, move, WRITING if file.direct else CACHED).run()


def read(file: InFile, runs: Sequence[Run], progress: Callable[[int], None] | None = None) -> None:
    """Read ``runs``, which are in order and do not overlap.

    Args:
        progress: called with the number of bytes just read, by any thread.
    """
    missing: dict[int, int] = {}
    lock = threading.Lock()

    def count(part: _Part) -> None:
        with lock:
            left = missing.get(part.run.start, part.run.size) - part.size
            missing[part.run.start] = left
        if not left and part.run.done is not None:
            part.run.done()

    def move(piece: _Piece, buffer: Bytes, turn: _Turn) -> None:
        few = len(piece.parts) <= _FEW
        memory, copies = piece.in_place(buffer) if few else piece.together(buffer)
        if not file.read_cached(memory, piece.start):
            memory, copies = piece.in_blocks(buffer, file.memory_alignment)
            file.read_direct(memory, piece.start)
        for own, through in copies:
            own[:] = through
        piece.hash(buffer, turn)
        for part in piece.parts:
            count(part)
        if progress is not None:
            progress(piece.size)

    if runs:
        start, end = runs[0].start, runs[-1].start + runs[-1].size
        _Job(runs, move, CACHED if file.is_cached(start, end - start) else READING).run()


class _Turn:
    """Lets the pieces through in the order in which they were taken, each waking only the next."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._come = job.coming
        self._after = job.coming = threading.Event()

    def __enter__(self) -> None:
        # Who fails lets the next one through; but Ctrl-C can hit before it is able to.
        while not self._come.wait(1.0) and self._job.error is None:
            pass
        if self._job.error is not None:
            raise _Stopped

    def __exit__(self, *_: object) -> None:
        self.pass_on()

    def pass_on(self) -> None:
        """Let the next piece through."""
        self._after.set()


class _Stopped(Exception):  # noqa: N818 - never leaves this module
    """Another thread has failed."""


class _Job:
    """The threads that move one file's pieces.

    Attributes:
        coming: set when it is the turn of the piece that will be taken next.
        error: the first of any thread; whoever finds one stops.
    """

    def __init__(
        self, runs: Sequence[Run], move: Callable[[_Piece, Bytes, _Turn], None], crew: Crew
    ) -> None:
        self._pieces = _cut(runs, crew.piece_bytes)
        self._taking = threading.Lock()
        self._move = move
        self._piece_bytes = crew.piece_bytes
        self._threads = min(crew.threads, 1 + sum(run.size for run in runs) // crew.piece_bytes)
        self.coming = threading.Event()
        self.coming.set()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Move everything; raise the first error of any thread."""
        helpers: list[threading.Thread] = []
        mine, *others = self._buffers()
        with contextlib.suppress(RuntimeError):  # where no further thread can be had
            for buffer in others:
                helper = threading.Thread(
                    target=self._work, args=(buffer,), name="slurmspot-disk", daemon=True
                )
                helper.start()
                helpers.append(helper)
        self._work(mine)
        for helper in helpers:
            helper.join()
        if self.error is not None:
            raise self.error

    def _buffers(self) -> list[Bytes]:
        """One a thread; fewer where memory is short.

        Cut from one piece: to map more memory, one would wait for the transfers that have begun.
        """
        threads = self._threads
        while True:
            try:
                return np.split(aligned(threads * self._piece_bytes, inherited=False), threads)
            except OSError:
                if threads == 1:
                    raise
                threads //= 2

    def _work(self, buffer: Bytes) -> None:
        try:
            while self.error is None and self._move_next(buffer):
                pass
        except BaseException as error:  # noqa: BLE001 - raised by run()
            self.error = self.error or error

    def _move_next(self, buffer: Bytes) -> bool:
        with self._taking:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            turn = _Turn(self)
        try:
            self._move(piece, buffer, turn)
        except BaseException as error:
            self.error = self.error or error
            turn.pass_on()  # to those who wait, and will find the error
            raise
        return True


def _cut(runs: Iterable[Run], piece_bytes: int) -> Iterator[_Piece]:
    piece: _Piece | None = None
    for run in runs:
        memory = None if run.memory is None else np.frombuffer(run.memory(), np.uint8)
        done = 0
        while done < run.size:
            start = run.start + done
            if piece is not None:
                end = piece.start + piece.size
                if start - end > _BRIDGE_BYTES or start >= piece.start + piece_bytes:
                    yield piece
                    piece = None
            if piece is None:
                piece = _Piece(start=start - start % BLOCK_BYTES)
            at = start - piece.start
            size = min(run.size - done, piece_bytes - at)
            part = None if memory is None else memory[done : done + size]
            piece.parts.append(_Part(run=run, at=at, size=size, memory=part))
            piece.size = at + size
            done += size
    if piece is not None:
        yield piece
