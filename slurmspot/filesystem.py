"""What a folder's file system can do for checkpoints: tried out, measured, and judged.

:func:`try_out` and :func:`measure` write to the folder, and remove what they wrote; the rest is
pure.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from slurmspot.checkpoint import steps
from slurmspot.events import Clock
from slurmspot.findings import Finding, ok, problem, untold, warning

if TYPE_CHECKING:
    from slurmspot.checkpoint.disk import Disk

MEASURED_BYTES = 64 << 20
"""How much :func:`measure` writes."""

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})
_ONE_NODE = frozenset({
    *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "reiserfs"),
    *("squashfs", "vfat", "xfs", "zfs"),
})  # fmt: skip
_NETWORK = frozenset({
    *("afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
    *("fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
})  # fmt: skip
_NOT_INSTALLED = "is not installed"
_LITTLE_BYTES = 10 << 30  # a model of a billion parameters, with its optimizer
_MARGIN = 2.0  # a save may take twice as long as it should: see slurmspot.checkpoint.tiers
_ASSUMED_BYTES_PER_S = 50 << 20  # before the first save is measured: see there


class Kind(Enum):
    """Where the content of a file system is."""

    MEMORY = auto()
    ONE_NODE = auto()
    NETWORK = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system; ``type`` is the kernel's name for it, such as ``ext4``."""

    point: str
    type: str

    @property
    def kind(self) -> Kind:
        """Where its content is, as far as the type tells."""
        for kind, types in (
            (Kind.MEMORY, _MEMORY),
            (Kind.ONE_NODE, _ONE_NODE),
            (Kind.NETWORK, _NETWORK),
        ):
            if self.type in types:
                return kind
        return Kind.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An operation that a file system, or its rights, did not allow."""

    operation: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How a durable write went, by the calls that write checkpoints.

    Attributes:
        seconds: from opening the file to the fsync of its folder.
        direct: past the page cache (O_DIRECT).
    """

    size_bytes: int
    seconds: float
    direct: bool

    @property
    def bytes_per_s(self) -> float:
        """The rate of one writer."""
        return self.size_bytes / max(1e-6, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """How large a checkpoint of the run is.

    Attributes:
        size_bytes: of all its files.
        largest_bytes: of its largest file: what one rank writes.
    """

    size_bytes: int
    largest_bytes: int


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """What ``path``, absolute and without links, lies on; None if that does not stand there.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``, see proc(5).
    """
    found = None
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        words = before.split(" ")
        if not dash or len(words) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        nearer = found is None or len(point) >= len(found.point)  # the last one hides the others
        if nearer and path.is_relative_to(point):
            found = Mount(point=point, type=after.split(" ")[0])
    return found


def mounted(path: Path) -> Mount | None:
    """What ``path`` lies on; None if the kernel does not tell."""
    try:
        return mount_of(path.resolve(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        return None


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if is_there(one))


def is_there(path: Path) -> bool:
    """Whether ``path`` exists, and this user may see that."""
    try:
        return path.exists()
    except OSError:
        return False


def try_out(folder: Path, *, sync: Callable[[int], None] = os.fsync) -> Refusal | None:
    """Do in ``folder`` what a commit does; the first thing that is refused, or None.

    Args:
        sync: fsync of the file; a test passes one in that fails.
    """
    operation = "make a folder in it"
    try:
        with _desk(folder) as desk:
            file = desk / "file"
            operation = "write a file"
            with file.open("xb") as opened:
                opened.write(b"slurmspot")
                opened.flush()
                operation = "fsync a file"
                sync(opened.fileno())
            operation = "rename a file"
            file.rename(desk / "renamed")
            operation = "rename a folder"
            begun, committed = desk / "step.partial", desk / "step"
            begun.mkdir()
            begun.rename(committed)
            operation = "fsync a folder"
            steps.sync(desk)
    except OSError as error:
        return Refusal(operation=operation, reason=error.strerror or str(error))
    return None


def measure(
    folder: Path,
    size_bytes: int = MEASURED_BYTES,
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> Speed | Refusal:
    """Write ``size_bytes`` to ``folder`` as a checkpoint is written, and remove them again."""
    operation = f"write {_size(size_bytes)}"
    try:
        # numpy is not there where slurmspot is installed without [train].
        from slurmspot.checkpoint.disk import REAL, OutFile, aligned  # noqa: PLC0415
    except ModuleNotFoundError as error:
        return Refusal(operation=operation, reason=f"{error.name} {_NOT_INSTALLED}")
    clock = clock or Clock()
    try:
        memory = aligned(size_bytes)
        memory.data.cast("B")[:] = os.urandom(size_bytes)  # some file systems pack what they hold
        with _desk(folder) as desk:
            begin_ns = clock.mono_ns()
            file = OutFile(desk / "file", size_bytes, disk or REAL)
            try:
                file.write([memory], 0)
                file.finish()
            finally:
                file.close()
            steps.sync(desk)
            seconds = (clock.mono_ns() - begin_ns) / 1e9
            return Speed(size_bytes=size_bytes, seconds=seconds, direct=file.direct)
    except OSError as error:
        return Refusal(operation=operation, reason=error.strerror or str(error))


def newest_checkpoint(checkpoints: Path) -> Checkpoint | None:
    """The size of the newest checkpoint in a folder of them; None if there is none to be seen."""
    try:
        newest = next(iter(steps.committed(checkpoints).values()))
        sizes = [file.stat().st_size for file in newest.iterdir()]
    except (OSError, StopIteration):
        return None
    return Checkpoint(size_bytes=sum(sizes), largest_bytes=max(sizes, default=0))


def shared(subject: str, path: Path, mount: Mount | None, *, why: str) -> Finding:
    """Whether every node can see what lies at ``path``, as far as one can tell from here."""
    fix = "put it on a file system that all nodes mount, or check with `srun ls`"
    if mount is None or mount.kind is Kind.UNKNOWN:
        kind = f"{mount.type} is no type known here" if mount else "no mount is shown"
        return untold(subject, f"{path}: {kind}", why, fix)
    if mount.kind is Kind.NETWORK:
        return ok(subject, f"{path} on {mount.type}", why)
    of_node = "in this node's memory" if mount.kind is Kind.MEMORY else "of this node alone"
    return warning(subject, f"{path} on {mount.type}, {of_node} by its type", why, fix)


def own(subject: str, path: Path, mount: Mount | None) -> Finding:
    """Whether ``path`` is on a disk of this node, as the local tier should be."""
    why = "periodic checkpoints go there at the speed of the node's own disk"
    fix = "name a folder on the nodes' own NVMe"
    if mount is None or mount.kind is Kind.UNKNOWN:
        kind = f"{mount.type} is no type known here" if mount else "no mount is shown"
        return untold(subject, f"{path}: {kind}", why, fix)
    if mount.kind is Kind.ONE_NODE:
        return ok(subject, f"{path} on {mount.type}", why)
    if mount.kind is Kind.MEMORY:
        why = "checkpoints there take memory from the training"
        return warning(subject, f"{path} on {mount.type}, in memory", why, fix)
    why = "the network gains nothing over the run folder"
    return warning(subject, f"{path} on {mount.type}, over the network", why, fix)


def commits(subject: str, refusal: Refusal | None) -> Finding:
    """Whether checkpoints can be committed: see :func:`try_out`."""
    subject, why = f"{subject}: commit", "a checkpoint becomes real by fsync and rename"
    if refusal is None:
        return ok(subject, "write, rename and fsync of files and folders work", why)
    found = f"cannot {refusal.operation}: {refusal.reason}"
    return problem(subject, found, why, "choose another folder, or have it made writable")


def space(subject: str, free_bytes: int | None, checkpoint: Checkpoint | None) -> Finding:
    """Whether there is room. ``checkpoint``: the run's newest, if it has one."""
    subject, why = f"{subject}: free space", "a full disk costs the checkpoint, not the run"
    fix = "free space, or choose another folder"
    if free_bytes is None:
        return untold(subject, "the file system does not say", why, fix)
    found = _size(free_bytes)
    if checkpoint is not None:
        found = f"{found}; the newest checkpoint has {_size(checkpoint.size_bytes)}"
        fits = free_bytes >= checkpoint.size_bytes
        return ok(subject, found, why) if fits else problem(subject, found, why, fix)
    if free_bytes < _LITTLE_BYTES:
        return warning(subject, found, why, fix)
    return ok(subject, found, why)


def direct_io(subject: str, speed: Speed | Refusal) -> Iterator[Finding]:
    """Whether files are written past the page cache; nothing if none could be written."""
    if isinstance(speed, Speed):
        found = "yes" if speed.direct else "no: through the page cache"
        why = "O_DIRECT leaves memory to the training; without it checkpoints work as well"
        yield ok(f"{subject}: direct I/O", found, why)


def pace(
    subject: str, speed: Speed | Refusal, window_s: float | None, checkpoint: Checkpoint | None
) -> Finding:
    """What the measured rate means.

    Args:
        window_s: seconds that a notice leaves; None where nothing is saved in it.
        checkpoint: the run's newest, if it has one.
    """
    subject = f"{subject}: speed"
    if isinstance(speed, Refusal):
        return _unmeasured(subject, speed)
    if window_s is None:
        return _against_assumed(subject, speed, "how often one can save depends on it")
    fits_bytes = speed.bytes_per_s * window_s / _MARGIN
    why = f"in {window_s:g} s a rank saves up to {_size(fits_bytes)}, with a margin of {_MARGIN:g}"
    if checkpoint is None:
        return _against_assumed(subject, speed, why)
    return _against_checkpoint(subject, speed, window_s, checkpoint.largest_bytes, why)


def _unmeasured(subject: str, refusal: Refusal) -> Finding:
    why = "what a notice leaves time for depends on it"
    if refusal.reason.endswith(_NOT_INSTALLED):
        return untold(subject, refusal.reason, why, "pip install 'slurmspot[train]'")
    found = f"cannot {refusal.operation}: {refusal.reason}"
    return problem(subject, found, why, "free space, or choose another folder")


def _against_checkpoint(
    subject: str, speed: Speed, window_s: float, largest_bytes: int, why: str
) -> Finding:
    needs_s = largest_bytes / speed.bytes_per_s
    found = f"{_rate(speed)}; the newest checkpoint's largest file has {_size(largest_bytes)}"
    fix = (
        f"a GraceTime of {_MARGIN * needs_s:.0f} s or more, more ranks, or a local tier "
        "(--local of `launch`)"
    )
    if needs_s > window_s:
        return problem(subject, found, f"{why}: every preemption costs steps", fix)
    if _MARGIN * needs_s > window_s:
        return warning(subject, found, why, fix)
    return ok(subject, found, why)


def _against_assumed(subject: str, speed: Speed, why: str) -> Finding:
    if speed.bytes_per_s >= _ASSUMED_BYTES_PER_S:
        return ok(subject, _rate(speed), why)
    found = f"{_rate(speed)}, less than the {_size(_ASSUMED_BYTES_PER_S)}/s assumed of any storage"
    return warning(subject, found, why, "choose faster storage, or a local tier")


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user may still write there, but for a quota; None if it is not told."""
    try:
        told = os.statvfs(folder)
    except OSError:
        return None
    return told.f_bavail * told.f_frsize


@contextmanager
def _desk(folder: Path) -> Iterator[Path]:
    desk = Path(tempfile.mkdtemp(prefix=".slurmspot-doctor-", dir=folder))
    try:
        yield desk
    finally:
        shutil.rmtree(desk, ignore_errors=True)


def _rate(speed: Speed) -> str:
    return f"{speed.bytes_per_s / 2**20:.0f} MiB/s by one writer"


def _size(size_bytes: float) -> str:
    for unit, bytes_each in (("TiB", 2**40), ("GiB", 2**30)):
        if size_bytes >= bytes_each:
            return f"{size_bytes / bytes_each:.1f} {unit}"
    return f"{size_bytes / 2**20:.0f} MiB"
