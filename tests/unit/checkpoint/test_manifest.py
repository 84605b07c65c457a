import contextlib
import dataclasses
import json

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmspot.checkpoint import manifest
from slurmspot.checkpoint.manifest import DataFile, Dataset, Manifest, ObjectRecord
from slurmspot.errors import CheckpointWriteError, CorruptCheckpointError

ZERO = "0" * 32
PIECE = Dataset(
    name="w",
    tensor="w",
    dtype="float32",
    global_shape=(4,),
    offset=(0,),
    shape=(4,),
    start=100,
    size_bytes=16,
    xxh3_128=ZERO,
)
FILE = DataFile(name="rank-00000.h5", size_bytes=200, rest_xxh3_128=ZERO, datasets=(PIECE,))
GOOD = Manifest(
    step=7,
    world_size=1,
    files=(FILE,),
    metadata={"cursor": 3},
    values={"model": {}},
    objects={"model": ObjectRecord(scope="replicated", fingerprints=(ZERO,))},
)


def test_round_trip():
    assert manifest.parse(manifest.dump(GOOD)) == GOOD


def test_the_file_is_one_json_document():
    assert json.loads(manifest.dump(GOOD))["step"] == 7


def test_what_would_be_too_large_to_read_is_not_written(tmp_path, monkeypatch):
    raw = manifest.dump(GOOD)
    (tmp_path / manifest.NAME).write_bytes(raw)
    monkeypatch.setattr(manifest, "_LARGEST_BYTES", len(raw))
    assert manifest.dump(GOOD) == raw
    assert manifest.read(tmp_path) == GOOD
    monkeypatch.setattr(manifest, "_LARGEST_BYTES", len(raw) - 1)
    with pytest.raises(CheckpointWriteError, match="as tensors"):
        manifest.dump(GOOD)
    with pytest.raises(CorruptCheckpointError):
        manifest.read(tmp_path)


def test_every_changed_or_missing_byte_is_noticed():
    raw = manifest.dump(GOOD)
    for i in range(len(raw)):
        for bad in (
            raw[:i] + bytes([raw[i] ^ 0x20]) + raw[i + 1 :],
            raw[:i],
            raw[:i] + raw[i + 1 :],
        ):
            with pytest.raises(CorruptCheckpointError):
                manifest.parse(bad)


def with_file(**changes):
    return dataclasses.replace(GOOD, files=(dataclasses.replace(FILE, **changes),))


def with_piece(**changes):
    return with_file(datasets=(dataclasses.replace(PIECE, **changes),))


HALF = dataclasses.replace(PIECE, name="w@0", shape=(2,), size_bytes=8)
OTHER_HALF = dataclasses.replace(HALF, name="w@2", offset=(2,), start=108)


@pytest.mark.parametrize(
    "bad",
    [
        with_file(name="../rank-00000.h5"),
        with_file(name="/etc/passwd"),
        with_file(name="rank-00000.h5\n"),
        with_file(size_bytes=-1),
        with_file(size_bytes=True),
        with_file(size_bytes=110),
        with_file(rest_xxh3_128=""),
        with_file(rest_xxh3_128=None),
        with_file(datasets=(PIECE, PIECE)),
        with_file(datasets=(HALF,)),
        with_file(datasets=(HALF, dataclasses.replace(OTHER_HALF, start=104))),
        with_file(datasets=(HALF, dataclasses.replace(OTHER_HALF, dtype="int32"))),
        with_piece(start=190),
        with_piece(start=-100),
        with_piece(size_bytes=17),
        with_piece(shape=(2**60,), global_shape=(2**60,), size_bytes=2**62),
        with_piece(offset=(1,)),
        with_piece(offset=()),
        with_piece(dtype="object"),
        with_piece(xxh3_128=""),
        with_piece(name=None),
        dataclasses.replace(GOOD, files=(FILE, FILE)),
        dataclasses.replace(GOOD, step="7"),
        dataclasses.replace(GOOD, world_size=0),
        dataclasses.replace(GOOD, values={"w": 1}),
        dataclasses.replace(GOOD, nodes={"rank-00000.h5": 3}),
        dataclasses.replace(GOOD, nodes={"rank-00000.h5": "n0", "rank-00001.h5": []}),
        dataclasses.replace(GOOD, nodes={"rank-00001.h5": "n0"}),
        dataclasses.replace(GOOD, nodes=[]),
        dataclasses.replace(GOOD, objects={"m": ObjectRecord(scope="odd", fingerprints=(ZERO,))}),
        dataclasses.replace(GOOD, objects={"m": ObjectRecord(scope="per_rank", fingerprints=())}),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(bad):
    with pytest.raises(CorruptCheckpointError):
        manifest.parse(manifest.dump(bad))


def test_the_files_of_a_node_are_told():
    known = dataclasses.replace(GOOD, nodes={FILE.name: "n0", "rank-00001.h5": "n1"})
    assert manifest.parse(manifest.dump(known)) == known
    assert known.files_of("n0") == [FILE]
    assert known.files_of("n1") == []


def test_halves_that_fill_a_tensor_are_accepted():
    whole = with_file(datasets=(HALF, OTHER_HALF))
    assert manifest.parse(manifest.dump(whole)) == whole
    assert whole.files[0].gaps() == [(0, 100), (116, 84)]


@pytest.mark.parametrize(
    "change",
    [
        lambda doc: doc.update(format=2),
        lambda doc: doc.pop("format"),
        lambda doc: doc.pop("files"),
        lambda doc: doc.update(more=1),
        lambda doc: doc["files"][0].update(more=1),
        lambda doc: doc.update(files=3),
        lambda doc: doc.update(objects=[]),
    ],
)
def test_another_format_is_refused(change):
    document = json.loads(manifest.dump(GOOD))
    document.pop("xxh3_128")
    change(document)
    body = json.dumps(document).encode()[:-1]
    seal = b',"xxh3_128":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
    with pytest.raises(CorruptCheckpointError):
        manifest.parse(body + seal)


def nodes(value, path=()):
    """The place of every value in a document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*path, key))


PARSED = json.loads(manifest.dump(GOOD))
del PARSED["xxh3_128"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300)
@given(path=st.sampled_from(list(nodes(PARSED))[1:]), junk=JSON)
def test_junk_anywhere_is_refused_or_harmless_but_never_a_crash(path, junk):
    document = json.loads(json.dumps(PARSED))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = junk
    body = json.dumps(document).encode()[:-1]
    seal = b',"xxh3_128":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
    with contextlib.suppress(CorruptCheckpointError):
        manifest.parse(body + seal)


def test_a_body_that_is_not_json_is_refused_whatever_its_seal():
    for body in (b"", b"[1", b"[" * 100_000, b'{"a":NaN', b"\xff"):
        seal = b',"xxh3_128":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
        with pytest.raises(CorruptCheckpointError):
            manifest.parse(body + seal)
