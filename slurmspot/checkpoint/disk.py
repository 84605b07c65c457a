"""The calls by which data files reach the disk: past the page cache where that is possible.

Direct I/O (``O_DIRECT``) needs offset and size aligned to a block, and memory as the device wants
it, which newer kernels tell (``STATX_DIOALIGN``). File systems that refuse it (some network file
systems) or have nothing to go past (tmpfs) are used through the page cache instead, which is said
once for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

BLOCK_BYTES = 4096
"""What direct I/O is aligned to: a multiple of every disk's logical block."""

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of madvise(2), which Python has no name for
_HUGE_BYTES = 2 << 20  # of the usual architectures; where it is more, there are none here
_IOV_MAX = 1024
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_CACHESTAT = 451  # the number of cachestat(2) on every architecture; Linux 6.5
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
_log = logging.getLogger("slurmspot.checkpoint")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.syscall.restype = ctypes.c_long
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_IN_MEMORY = {0x01021994, 0x858458F6}  # tmpfs, ramfs: TMPFS_MAGIC and RAMFS_MAGIC of statfs(2)


def aligned(size_bytes: int, *, inherited: bool = True) -> Bytes:
    """Memory of this process alone, on huge pages where there are any, for direct I/O.

    Scattered pages would cut one transfer into several.

    Args:
        inherited: give children that are forked a copy. Without, they find zeros there, and no
            fork can come between this process and a transfer that is under way, or slow down
            what writes there next.
    """
    pages = mmap.mmap(
        -1, max(1, size_bytes) + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    begin = -np.frombuffer(pages, np.uint8).ctypes.data % _HUGE_BYTES
    with contextlib.suppress(OSError):  # kernels without huge pages
        if whole := size_bytes - size_bytes % _HUGE_BYTES:
            pages.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    if not inherited:
        pages.madvise(_WIPE_ON_FORK)
    return np.frombuffer(pages, np.uint8, size_bytes, begin)


class Disk:
    """The system calls themselves. A test passes one in that fails."""

    def write(self, fd: int, memory: Sequence[Bytes], offset: int) -> int:
        """Write some of ``memory``; return how many bytes."""
        return os.pwritev(fd, [one.data for one in memory], offset)

    def read(self, fd: int, memory: Sequence[Bytes], offset: int) -> int:
        """Fill some of ``memory``; return how many bytes, 0 at the end of the file."""
        return os.preadv(fd, [one.data for one in memory], offset)

    def sync(self, fd: int) -> None:
        """Make all that was written durable."""
        os.fsync(fd)


REAL = Disk()


class OutFile:
    """A new file of a known size, written in any order by any number of threads.

    Attributes:
        memory_alignment: of whole blocks that are written directly, in bytes.

    Raises:
        OSError: it exists, or there is no room for it.
    """

    def __init__(self, path: Path, size_bytes: int, disk: Disk = REAL) -> None:
        self._disk = disk
        self._size_bytes = size_bytes
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._opened = [self._fd]
        try:
            self._direct = _reopen(self._opened, os.O_WRONLY)
            self.memory_alignment = _memory_alignment(self._fd)
            # Blocks that exist, inside the file's size, are written by several threads at once.
            if not _is_in_memory(self._fd):  # there, it would be to write all of it twice
                _allocate(self._fd, _up(size_bytes) if self._direct is not None else size_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether what is written must be whole blocks, from aligned memory."""
        return self._direct is not None

    def write(self, memory: Sequence[Bytes], offset: int) -> None:
        """Write all of ``memory`` at ``offset``."""
        if (fd := self._direct) is not None:
            try:
                _write_all(self._disk, fd, memory, offset)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._direct = None  # the flag was taken at open, but is not meant
                _say_once(os.fstat(fd).st_dev)
            else:
                return
        _write_all(self._disk, self._fd, memory, offset)

    def finish(self) -> None:
        """Cut the last block to size and make the file durable."""
        os.ftruncate(self._fd, self._size_bytes)
        self._disk.sync(self._fd)

    def close(self) -> None:
        """Let go of the file, finished or not."""
        for fd in self._opened:
            os.close(fd)


class InFile:
    """A file to be read by any number of threads. Owns ``fd``.

    Args:
        direct: past the page cache, for what is not in it; else always through it.

    Attributes:
        memory_alignment: of whole blocks that are read directly, in bytes.
    """

    def __init__(self, fd: int, *, direct: bool = True, disk: Disk = REAL) -> None:
        self._fd = fd
        self._disk = disk
        self._opened = [fd]
        self._direct = _reopen(self._opened, os.O_RDONLY) if direct else None
        self.memory_alignment = _memory_alignment(fd)
        self.size_bytes = os.fstat(fd).st_size
        asks_slowly = self._direct is not None and _cached_pages(fd, 0, 1) < 0
        self._map = _mapped(fd) if asks_slowly else None

    def read_cached(self, memory: Sequence[Bytes], offset: int) -> bool:
        """Fill ``memory``, if the page cache can or must do it; else return False."""
        if not self.is_cached(offset, sum(map(len, memory))):
            return False
        while memory:
            count = self._disk.read(self._fd, memory[:_IOV_MAX], offset)
            if not count:
                raise _truncated()
            memory, offset = _after(memory, count), offset + count
        return True

    def read_direct(self, memory: Sequence[Bytes], offset: int) -> None:
        """Fill blocks of aligned ``memory`` from an aligned ``offset``, as far as the file goes."""
        left = min(sum(map(len, memory)), self.size_bytes - offset)
        while left > 0:
            fd = self._fd if self._direct is None else self._direct
            try:
                count = self._disk.read(fd, memory[:_IOV_MAX], offset)
            except OSError as error:
                if fd == self._fd or error.errno not in _NO_DIRECT:
                    raise
                self._direct = None
                _say_once(os.fstat(fd).st_dev)
                continue
            if not count:
                raise _truncated()
            memory, offset, left = _after(memory, count), offset + count, left - count

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have the page cache read these (offset, size) by and by, for whoever comes later."""
        for offset, size in ranges:
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def is_cached(self, offset: int, size: int) -> bool:
        """Whether the page cache holds all of it, or is the only way. Asking reads nothing."""
        if self._direct is None:
            return True
        wanted = -(-size // mmap.PAGESIZE)
        if self._map is None:
            return _cached_pages(self._fd, offset, size) >= wanted
        pages = np.zeros(wanted, np.uint8)
        _libc.mincore(self._map.ctypes.data + offset, size, pages.ctypes.data)
        return bool((pages & 1).all())

    def close(self) -> None:
        """Let go of the file."""
        self._map = None
        for fd in self._opened:
            os.close(fd)


def _reopen(opened: list[int], access: int) -> int | None:
    """The one file in ``opened`` once more, for direct I/O; None if its file system refuses."""
    (fd,) = opened
    if not _is_in_memory(fd):
        with contextlib.suppress(OSError):
            direct = os.open(f"/proc/self/fd/{fd}", access | os.O_DIRECT | os.O_CLOEXEC)
            opened.append(direct)
            return direct
    _say_once(os.fstat(fd).st_dev)
    return None


def _is_in_memory(fd: int) -> bool:
    answer = (ctypes.c_long * 64)()  # struct statfs begins with the type, as a long
    return not _libc.fstatfs(fd, answer) and answer[0] in _IN_MEMORY


def _memory_alignment(fd: int) -> int:
    """What statx(2) says that direct I/O needs; a block where it says nothing."""
    answer = (ctypes.c_uint32 * 64)()  # struct statx: stx_mask comes first, 256 bytes in all
    try:
        failed = _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer)
    except AttributeError:  # a C library older than the call
        return BLOCK_BYTES
    told = answer[38] if not failed and answer[0] & _STATX_DIOALIGN else 0  # stx_dio_mem_align
    return told or BLOCK_BYTES


def _cached_pages(fd: int, offset: int, size: int) -> int:
    """How many pages of it the page cache holds; -1 where the kernel has no cachestat(2)."""
    stretch, found = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    return -1 if _libc.syscall(_CACHESTAT, fd, stretch, found, 0) else int(found[0])


def _mapped(fd: int) -> Bytes | None:
    """The file's place in the address space, only to ask the kernel about it."""
    try:
        return np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError):
        return None


_said_of: set[int] = set()
_saying = threading.Lock()


def _say_once(device: int) -> None:
    with _saying:  # several threads find it out at once
        if device in _said_of:
            return
        _said_of.add(device)
    _log.info(
        "the file system on device %d:%d has no direct I/O: going through the page cache",
        os.major(device),
        os.minor(device),
    )


def _allocate(fd: int, size_bytes: int) -> None:
    """Reserve the blocks now, so that a full disk shows before anything is written."""
    if not size_bytes:
        return
    # Not posix_fallocate(): where there is no support, glibc would write to every block instead.
    while _libc.fallocate(fd, 0, 0, size_bytes):
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code not in {errno.EOPNOTSUPP, errno.ENOSYS}:
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, size_bytes)
        return


def _write_all(disk: Disk, fd: int, memory: Sequence[Bytes], offset: int) -> None:
    while memory:
        count = disk.write(fd, memory[:_IOV_MAX], offset)
        memory, offset = _after(memory, count), offset + count


def _after(memory: Sequence[Bytes], count: int) -> Sequence[Bytes]:
    """What is left of ``memory`` behind its first ``count`` bytes."""
    for i, one in enumerate(memory):
        if count < one.size:
            return [one[count:], *memory[i + 1 :]]
        count -= one.size
    return []


def _up(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _truncated() -> OSError:
    return OSError(errno.EIO, "the file ends too early")
