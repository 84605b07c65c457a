import json
import shutil
import subprocess
import sys
import warnings

import pytest
import rank_scenarios as scenario
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from rank_pool import RankPool
from safetensors.torch import load_file

from slurmspot.checkpoint import Hdf5StorageReader, Hdf5StorageWriter, manifest
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.dtypes import STORED_AS
from slurmspot.checkpoint.export import export
from slurmspot.checkpoint.verify import problems_of
from slurmspot.cli.export import command
from slurmspot.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    NotFoundError,
    UsageError,
)


@pytest.fixture(autouse=True)
def _quiet_single_process():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        yield


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {"weight": torch.randn(300, 400), "bias": torch.randn(3).bfloat16()},
        "more": {"flags": torch.tensor([True, False]), "none": torch.ones(0, 4)},
    }
    path = tmp_path / "step-00000007"
    dcp.save(state, storage_writer=Hdf5StorageWriter(path))
    return path, state


def test_every_tensor_comes_back_through_the_safetensors_library(saved, tmp_path):
    path, state = saved
    assert export(path, tmp_path / "all.safetensors") == 4
    back = load_file(tmp_path / "all.safetensors")
    assert torch.equal(back["model.weight"], state["model"]["weight"])
    assert torch.equal(back["model.bias"], state["model"]["bias"])
    assert back["more.flags"].tolist() == [True, False]
    assert back["more.none"].shape == (0, 4)


def test_what_can_be_exported_instead_of_a_damaged_checkpoint_is_named(saved, tmp_path):
    _, state = saved  # at step 7
    for step in (8, 9, 10):
        path = tmp_path / f"step-{step:08d}"
        dcp.save(state, storage_writer=Hdf5StorageWriter(path))
        if step > 8:
            data = path / "rank-00000.h5"
            data.write_bytes(data.read_bytes()[:-1])
    argv = [str(tmp_path), "-o", str(tmp_path / "x")]
    with pytest.raises(CorruptCheckpointError) as caught:
        CliRunner().invoke(command, argv, standalone_mode=False, catch_exceptions=False)
    assert f"do:  export the newest intact one: {tmp_path / 'step-00000008'}" in str(caught.value)
    for step in (7, 8):
        shutil.rmtree(tmp_path / f"step-{step:08d}")
    with pytest.raises(CorruptCheckpointError, match="no checkpoint beside it is intact"):
        CliRunner().invoke(command, argv, standalone_mode=False, catch_exceptions=False)
    assert not (tmp_path / "x").exists()


def test_every_type_that_safetensors_knows(tmp_path):
    names = [name for name in STORED_AS if name not in {"complex32", "complex128"}]
    names = [name for name in names if not name.endswith("fnuz")]
    state = {name: torch.ones(3).to(getattr(torch, name)) for name in names}
    dcp.save(state, storage_writer=Hdf5StorageWriter(tmp_path / "c"))
    export(tmp_path / "c", tmp_path / "f")
    back = load_file(tmp_path / "f")
    assert {name: one.dtype for name, one in back.items()} == {
        name: one.dtype for name, one in state.items()
    }
    assert all(torch.equal(back[n].float(), state[n].float()) for n in names if n != "complex64")
    dcp.save({"c": torch.ones(3).cdouble()}, storage_writer=Hdf5StorageWriter(tmp_path / "d"))
    with pytest.raises(UsageError, match="c cannot be exported"):
        export(tmp_path / "d", tmp_path / "g")


def save_object(folder, state):
    """Checkpoint an object that has this state, as ``it``."""
    holder = scenario.Holder(**state)
    checkpointer = Checkpointer(folder, {"it": holder})
    checkpointer.save(1, trigger="period", meta={})
    checkpointer.close()
    return folder / "step-00000001"


def test_single_numbers_keep_their_values(tmp_path):
    norm = torch.nn.BatchNorm1d(2)
    norm.num_batches_tracked.fill_(7)
    state = norm.state_dict()
    for dtype in ("bool", "uint8", "int32", "float16", "bfloat16", "float32", "float64"):
        state[dtype] = torch.tensor(1.5).to(getattr(torch, dtype))
    dcp.save(state, storage_writer=Hdf5StorageWriter(tmp_path / "c"))
    export(tmp_path / "c", tmp_path / "f")
    back = load_file(tmp_path / "f")
    assert {name: (one.dtype, one.tolist()) for name, one in back.items()} == {
        name: (one.dtype, one.tolist()) for name, one in state.items()
    }
    assert back["num_batches_tracked"].item() == 7


def test_tensors_are_named_as_in_the_objects_own_state(tmp_path):
    state = {"a/b": torch.tensor([1]), "100%": torch.tensor([2]), "%2F": torch.tensor([3])}
    path = save_object(tmp_path / "run", state)
    export(path, tmp_path / "f", only="it")
    assert load_file(tmp_path / "f") == state
    export(path, tmp_path / "all")
    assert load_file(tmp_path / "all") == {f"it/{name}": one for name, one in state.items()}


def test_names_that_would_clash_stay_encoded(tmp_path):
    path = save_object(tmp_path / "run", {"a/b": torch.tensor([1]), "a": {"b": torch.tensor([2])}})
    export(path, tmp_path / "f", only="it")
    assert load_file(tmp_path / "f") == {"a%2Fb": torch.tensor([1]), "a/b": torch.tensor([2])}


def test_names_given_to_dcp_are_exported_as_they_are(tmp_path):
    state = {"a%2Fb": torch.tensor([1]), "100%25": torch.tensor([2])}
    dcp.save(state, storage_writer=Hdf5StorageWriter(tmp_path / "c"))
    export(tmp_path / "c", tmp_path / "f")
    assert load_file(tmp_path / "f") == state


@pytest.mark.parametrize(
    "state",
    [
        {"__metadata__": torch.ones(1)},
        {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}, "a%2Fb": torch.ones(1)},
    ],
)
def test_names_that_safetensors_cannot_hold(tmp_path, state):
    path = save_object(tmp_path / "run", state)
    with pytest.raises(UsageError, match="cannot be exported"):
        export(path, tmp_path / "f", only="it")
    assert not (tmp_path / "f").exists()


def test_nothing_is_exported_into_the_checkpoint(saved, tmp_path):
    path, _ = saved
    (tmp_path / "link").symlink_to(path)
    for folder in (path, path / "deeper", tmp_path / "link"):
        with pytest.raises(UsageError, match="lies in the checkpoint"):
            export(path, folder / "model.safetensors")
    assert problems_of(path) == []


@pytest.mark.parametrize("name", ["x" * 300, "file/f", "nowhere/f"])
def test_a_target_that_cannot_be_written_is_told(saved, tmp_path, name):
    path, _ = saved
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match="cannot be written") as caught:
        export(path, tmp_path / name)
    assert caught.value.why
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", path.name]


def test_shards_are_put_together(tmp_path):
    pool = RankPool(2)
    try:
        saved = pool.run(2, scenario.save, tmp_path, "fsdp")
    finally:
        pool.close()
    export(tmp_path / "step-00000003", tmp_path / "f", only="model")
    back = load_file(tmp_path / "f")
    first = torch.tensor(saved[0][1])
    assert [name for name, one in back.items() if torch.equal(one, first)] != []


def test_a_damaged_checkpoint_is_not_exported(saved, tmp_path):
    path, _ = saved
    file = manifest.read(path).files[0]
    with (path / file.name).open("r+b") as raw:
        raw.seek(file.datasets[0].start + 5)
        raw.write(b"\x99\x98")
    with pytest.raises(CorruptCheckpointError) as caught:
        export(path, tmp_path / "f")
    assert file.datasets[0].name in caught.value.why
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]


def test_nothing_is_overwritten_and_nothing_invented(saved, tmp_path):
    path, _ = saved
    (tmp_path / "f").write_text("mine")
    with pytest.raises(UsageError, match="there is something"):
        export(path, tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"
    with pytest.raises(NotFoundError, match="'other'"):
        export(path, tmp_path / "g", only="other")


def test_the_command_takes_the_newest_of_a_run(saved, tmp_path):
    path, _ = saved
    (tmp_path / "run").mkdir()
    path.rename(tmp_path / "run" / path.name)
    argv = [str(tmp_path / "run"), "-o", str(tmp_path / "f")]
    done = CliRunner().invoke(command, argv, standalone_mode=False)
    assert done.exception is None
    assert "4 tensors of step 7" in done.stdout
    header = (tmp_path / "f").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + size])["__metadata__"] == {"step": "7"}


def test_the_storage_classes_load_torch_only_when_asked_for():
    code = (
        "import sys, slurmspot.checkpoint\n"
        "assert 'torch' not in sys.modules\n"
        "from slurmspot.checkpoint import Hdf5StorageReader, Hdf5StorageWriter\n"
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Hdf5StorageReader.__name__ == "Hdf5StorageReader"
