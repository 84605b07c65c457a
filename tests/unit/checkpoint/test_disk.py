import errno
import logging
import os
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmspot.checkpoint import Hdf5StorageReader, Hdf5StorageWriter, disk, manifest, pipeline
from slurmspot.checkpoint.disk import BLOCK_BYTES, Disk, InFile, OutFile
from slurmspot.checkpoint.pipeline import Run
from slurmspot.checkpoint.reading import read
from slurmspot.checkpoint.verify import problems_of


class Faulty(Disk):
    """Fails at the n-th call, or in its own way at every one."""

    def __init__(self, at=-1, code=errno.EIO, most=None):
        self.left = at
        self.code = code
        self.most = most
        self.lock = threading.Lock()

    def count(self):
        with self.lock:
            self.left -= 1
            if self.left == -1:
                raise OSError(self.code, os.strerror(self.code))

    def write(self, fd, memory, offset):
        self.count()
        return super().write(fd, self.some(memory), offset)

    def read(self, fd, memory, offset):
        self.count()
        return super().read(fd, self.some(memory), offset)

    def sync(self, fd):
        self.count()
        super().sync(fd)

    def some(self, memory):
        return memory if self.most is None else [memory[0][: self.most]]


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """A folder on a disk, and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_pieces(monkeypatch):
    for crew in ("WRITING", "READING", "CACHED"):
        monkeypatch.setattr(pipeline, crew, SMALL)


SMALL = pipeline.Crew(threads=4, piece_bytes=4 * BLOCK_BYTES)


def noise(size):
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


def aligned(size, shift):
    """Memory that begins ``shift`` bytes behind a page."""
    room = np.frombuffer(bytearray(size + 2 * BLOCK_BYTES), np.uint8)
    begin = -room.ctypes.data % BLOCK_BYTES + shift
    return room[begin : begin + size]


def write(path, contents, real=disk.REAL):
    """Write contents behind each other; return the runs' (start, digest)."""
    runs = []
    end = 0
    for content in contents:
        memory = lambda content=content: content  # noqa: E731
        runs.append(Run(start=end, size=content.size, digest=xxhash.xxh3_128(), memory=memory))
        end += content.size
    out = OutFile(path, end, real)
    try:
        pipeline.write(out, runs)
        out.finish()
    finally:
        out.close()
    return [(run.start, run.digest.hexdigest()) for run in runs]


def open_in(path, **options):
    return InFile(os.open(path, os.O_RDONLY), **options)


sizes = st.one_of(
    st.integers(1, 50),
    st.integers(1, 40_000),
    st.sampled_from([BLOCK_BYTES, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES, 9 * BLOCK_BYTES]),
)


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.tuples(sizes, st.sampled_from([0, 0, 8, 64, 512])), min_size=1, max_size=12),
    wanted=st.sets(st.integers(0, 11)),
    how=st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, BLOCK_BYTES])),
)
def test_what_is_written_is_what_is_read(pieces, wanted, how, tmp_path_factory):
    direct, warm, most = how
    shifts = [shift for _, shift in pieces]
    before = pipeline.WRITING, pipeline.READING, pipeline.CACHED
    pipeline.WRITING = pipeline.READING = pipeline.CACHED = SMALL
    try:
        path = tmp_path_factory.mktemp("io") / "f"
        contents = []
        for size, shift in pieces:
            content = aligned(size, shift)
            content[:] = noise(size)
            contents.append(content)
        found = write(path, contents, Faulty(most=most))
        whole = b"".join(one.tobytes() for one in contents)
        if warm:
            assert path.read_bytes() == whole
        assert path.stat().st_size == len(whole)
        assert [digest for _, digest in found] == [xxhash.xxh3_128_hexdigest(c) for c in contents]

        rooms = {i: aligned(contents[i].size, shifts[i]) for i in wanted if i < len(contents)}
        arrived = []
        runs = [
            Run(
                start=found[i][0],
                size=room.size,
                digest=xxhash.xxh3_128(),
                memory=lambda room=room: room,
                done=lambda i=i: arrived.append(i),
            )
            for i, room in sorted(rooms.items())
        ]
        file = open_in(path, direct=direct, disk=Faulty(most=most))
        pipeline.read(file, runs)
        file.close()
        assert sorted(arrived) == sorted(rooms)
        for run, (i, room) in zip(runs, sorted(rooms.items()), strict=True):
            assert room.tobytes() == contents[i].tobytes()
            assert run.digest.hexdigest() == found[i][1]
        assert path.read_bytes() == whole
    finally:
        pipeline.WRITING, pipeline.READING, pipeline.CACHED = before


def test_reading_counts_the_bytes(tmp_path):
    write(tmp_path / "f", [noise(100_000)])
    told = []
    file = open_in(tmp_path / "f")
    pipeline.read(file, [Run(start=0, size=100_000, digest=xxhash.xxh3_128())], told.append)
    file.close()
    assert sum(told) == 100_000


def test_a_file_system_in_memory_goes_through_the_page_cache_and_says_so_once(caplog):
    disk._said_of.clear()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    with caplog.at_level(logging.INFO):
        write(folder / "f", [noise(9000)])
        file = open_in(folder / "f")
    room = aligned(9000, 1)
    assert file.read_cached([room], 0)
    assert room.tobytes() == noise(9000).tobytes()
    file.close()
    assert len([one for one in caplog.messages if "has no direct I/O" in one]) == 1
    shutil.rmtree(folder)


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "f", [noise(10)])
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_the_first_error_of_any_thread_is_told(tmp_path, code):
    contents = [noise(200_000)]
    for at in range(30):
        path = tmp_path / str(at)
        try:
            write(path, contents, Faulty(at, code))
        except OSError as error:
            assert error.errno == code
        else:
            break
    assert at == 14  # 13 pieces and the fsync
    assert path.read_bytes() == contents[0].tobytes()


@pytest.mark.usefixtures("small_pieces")
def test_direct_io_that_is_refused_late_is_given_up_and_said_once(tmp_path, caplog):
    disk._said_of.clear()
    contents = [noise(200_000), noise(77)]

    class Refusing(Disk):
        def write(self, fd, memory, offset):
            return super().write(self.check(fd), memory, offset)

        def read(self, fd, memory, offset):
            return super().read(self.check(fd), memory, offset)

        def check(self, fd):
            if os.O_DIRECT & int(
                Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8
            ):
                raise OSError(errno.EINVAL, "no")
            return fd

    with caplog.at_level(logging.INFO):
        write(tmp_path / "f", contents, Refusing())
        fd = os.open(tmp_path / "f", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        file = InFile(fd, disk=Refusing())
        digest = xxhash.xxh3_128()
        pipeline.read(file, [Run(start=0, size=200_077, digest=digest)])
        file.close()
    whole = b"".join(one.tobytes() for one in contents)
    assert (tmp_path / "f").read_bytes() == whole
    assert digest.hexdigest() == xxhash.xxh3_128_hexdigest(whole)
    assert len([one for one in caplog.messages if "has no direct I/O" in one]) == 1


def test_a_forked_child_gets_a_copy_or_nothing():
    copied, kept_back = (disk.aligned(3 << 20, inherited=one) for one in (True, False))
    copied[:] = kept_back[:] = 1
    child = os.fork()
    if not child:
        told = copied.all() and not kept_back.any()
        copied[:] = kept_back[:] = 2
        os._exit(not told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (copied == 1).all()
    assert (kept_back == 1).all()


def test_a_forked_child_that_lets_go_of_memory_keeps_its_own():
    """Were there a hole instead, what the child takes next would lie in it, and go with it."""
    kept_back = disk.aligned(32 << 20, inherited=False)
    child = os.fork()
    if not child:
        own = [disk.aligned(1 << 20) for _ in range(64)]
        del kept_back
        for one in own:
            one[:] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(params=["a new kernel", "an old kernel"])
def kernel(request, monkeypatch):
    """One that answers cachestat(2) and statx(2) about direct I/O, and one that does not."""
    if request.param == "an old kernel":
        monkeypatch.setattr(disk, "_CACHESTAT", 1 << 20)
        monkeypatch.setattr(disk, "_STATX_DIOALIGN", 0)
    return request.param


def test_what_the_page_cache_holds_is_known_and_not_read_by_asking(tmp_path, kernel):
    size = 64 * BLOCK_BYTES
    write(tmp_path / "f", [noise(size)])
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    file = InFile(fd)
    room = [aligned(size, 0)]
    for _ in range(2):  # where direct I/O is refused, all is read as if it were cached
        assert file.read_cached(room, 0) is (file._direct is None)
    (tmp_path / "f").read_bytes()
    assert file.read_cached(room, 0)
    assert room[0].tobytes() == (tmp_path / "f").read_bytes()
    if kernel == "an old kernel":
        assert file.memory_alignment == BLOCK_BYTES
    file.close()


def test_where_memory_is_short_fewer_threads_do_it(folder, small_pieces, monkeypatch):
    asked = []

    def scarce(size_bytes, **options):
        asked.append(size_bytes)
        if len(asked) < 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return disk.aligned(size_bytes, **options)

    monkeypatch.setattr(pipeline, "aligned", scarce)
    content = noise(64 * BLOCK_BYTES + 1)
    ((_, digest),) = write(folder / "f", [content])
    assert asked == [asked[0], asked[0] // 2, asked[0] // 4]
    assert (folder / "f").read_bytes() == content.tobytes()
    assert digest == xxhash.xxh3_128_hexdigest(content)


def test_no_descriptor_is_left_open(folder):
    before = len(list(Path("/proc/self/fd").iterdir()))
    write(folder / "f", [noise(5000)])
    with pytest.raises(OSError, match="Input/output"):
        write(folder / "g", [noise(5000)], Faulty(0))
    file = open_in(folder / "f")
    pipeline.read(file, [Run(start=0, size=5000, digest=xxhash.xxh3_128())])
    file.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def save(path, real=disk.REAL):
    state = {f"t{i}": torch.full((3000 + i,), float(i)) for i in range(20)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        dcp.save(state, storage_writer=Hdf5StorageWriter(path, disk=real))
    return state


def test_a_checkpoint_round_trips_on_every_file_system(folder):
    state = save(folder / "c")
    assert problems_of(folder / "c") == []
    back = {name: torch.zeros_like(one) for name, one in state.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        dcp.load(back, storage_reader=Hdf5StorageReader(folder / "c"))
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_leaves_no_checkpoint(tmp_path, code):
    for at in range(2):
        with pytest.raises(dcp.api.CheckpointException):
            save(tmp_path / "c", Faulty(at, code))
        assert not (tmp_path / "c").exists()
    save(tmp_path / "c", Faulty(3, code))
    assert problems_of(tmp_path / "c") == []


def test_an_error_while_reading_is_a_problem_and_no_crash(tmp_path):
    save(tmp_path / "c")
    (file,) = manifest.read(tmp_path / "c").files
    (problem,) = read(tmp_path / "c", file, {}, whole=True, disk=Faulty(0))
    assert str(problem) == "rank-00000.h5: cannot be read: Input/output error"


def test_many_small_tensors_take_one_pass(tmp_path):
    state = {f"layer.{i}.bias": torch.full((7,), float(i)) for i in range(2000)}
    calls = []

    class Counting(Disk):
        def write(self, fd, memory, offset):
            calls.append(sum(map(len, memory)))
            return super().write(fd, memory, offset)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        dcp.save(state, storage_writer=Hdf5StorageWriter(tmp_path / "c", disk=Counting()))
    assert len(calls) == 1
    assert problems_of(tmp_path / "c") == []
