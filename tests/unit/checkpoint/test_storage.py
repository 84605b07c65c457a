import errno
import pickletools
import warnings

import numpy as np
import plan_scenarios as scenario
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch.distributed.checkpoint.planner import SavePlanner

from slurmspot.checkpoint import hdf5, manifest
from slurmspot.checkpoint.disk import Disk
from slurmspot.checkpoint.dtypes import STORED_AS, item_size
from slurmspot.checkpoint.storage import Hdf5StorageReader, Hdf5StorageWriter
from slurmspot.checkpoint.verify import verify
from slurmspot.errors import CheckpointWriteError, UsageError

SHAPES = [(), (0,), (3, 0, 2), (1,), (5,), (3, 4), (2, 3, 4)]


@pytest.fixture(autouse=True)
def _quiet_single_process():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def save(path, state, **options):
    dcp.save(state, storage_writer=Hdf5StorageWriter(path, **options))


def load(path, state):
    dcp.load(state, storage_reader=Hdf5StorageReader(path))
    return state


def noise(shape, dtype):
    """Random bits of a type, whatever they mean."""
    count = int(torch.Size(shape).numel()) * item_size(dtype)
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_type_is_known_to_torch_and_as_wide():
    for dtype in STORED_AS:
        assert getattr(torch, dtype).itemsize == item_size(dtype)


def test_every_type_and_shape_round_trips_bit_for_bit(tmp_path):
    state = {f"{dtype}-{shape}": noise(shape, dtype) for dtype in STORED_AS for shape in SHAPES}
    save(tmp_path / "c", state)
    back = load(tmp_path / "c", {name: torch.zeros_like(one) for name, one in state.items()})
    assert {name: bits(one) for name, one in back.items()} == {
        name: bits(one) for name, one in state.items()
    }
    assert verify(tmp_path / "c")[0].intact


def test_views_and_conjugates_store_what_they_show(tmp_path):
    base = torch.randn(4, 6, dtype=torch.complex64)
    views = {
        "t": base.T,
        "step": base[::2, 1::2],
        "conj": base.conj(),
        "expand": base[:1].expand(3, 6),
    }
    save(tmp_path / "c", views)
    back = load(
        tmp_path / "c", {name: torch.zeros(v.shape, dtype=v.dtype) for name, v in views.items()}
    )
    for name, view in views.items():
        assert bits(back[name]) == bits(view.resolve_conj()), name


@settings(max_examples=40, deadline=None)
@given(names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), unique=True))
def test_any_name_will_do(names, tmp_path_factory):
    path = tmp_path_factory.mktemp("names") / "c"
    state = {name: torch.tensor([i]) for i, name in enumerate(names)}
    dcp.save(
        state,
        storage_writer=Hdf5StorageWriter(path),
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
    )
    assert all(report.intact for report in verify(path))
    back = {name: torch.tensor([-1]) for name in names}
    dcp.load(
        back,
        storage_reader=Hdf5StorageReader(path),
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
    )
    assert back == state


def test_names_that_clash_as_groups(tmp_path):
    state = {"a": torch.ones(1), "a/b": torch.ones(2), "a/": torch.ones(3), "..": torch.ones(4)}
    state |= {"a/\0": torch.ones(5), "a%": torch.ones(6), "a/%2F": torch.ones(7)}
    save(tmp_path / "c", state)
    assert verify(tmp_path / "c")[0].intact
    back = load(tmp_path / "c", {name: torch.zeros_like(one) for name, one in state.items()})
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_nested_state_with_values_through_the_default_planner(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "extra": {"lr": float("nan"), "shape": (1, 2), "raw": b"\x00"},
    }
    save(tmp_path / "c", state)
    blank = {
        "model": torch.nn.Linear(3, 2).state_dict(),
        "optimizer": optimizer.state_dict(),
        "extra": {"lr": 0.0, "shape": (), "raw": b""},
    }
    back = load(tmp_path / "c", blank)
    assert torch.equal(back["model"]["weight"], model.weight)
    assert back["extra"]["shape"] == (1, 2)
    assert back["extra"]["raw"] == b"\x00"
    assert back["extra"]["lr"] != back["extra"]["lr"]
    assert back["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


def test_nothing_on_disk_is_a_pickle(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(3), "b": (1, 2)})
    for path in (tmp_path / "c").iterdir():
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))


def test_an_object_that_is_not_data_is_refused_and_nothing_is_left_as_a_checkpoint(tmp_path):
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path / "c", {"a": torch.ones(3), "b": {"f": len}})
    assert isinstance(caught.value.failures[0][0], CheckpointWriteError)
    assert "b.f" in str(caught.value.failures[0][0])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [("a\ud800", (2,), "surrogates not allowed"), ("a", (1,) * 33, "too large")],
)
def test_what_hdf5_cannot_hold_is_refused_by_name(tmp_path, name, shape, why):
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(tmp_path / "c", {name: torch.ones(shape)})
    error = caught.value.failures[0][0]
    assert isinstance(error, CheckpointWriteError)
    assert repr(name) in error.what
    assert why in error.why


class FullDisk(Disk):
    def write(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_fails_takes_no_space(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match="No space left"):
        save(tmp_path / "c", {"a": torch.ones(100)}, disk=FullDisk())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, "7", 1.5, True, 2**62])
def test_a_step_that_no_manifest_can_tell_is_refused_before_anything_is_written(tmp_path, step):
    with pytest.raises(UsageError, match="cannot be checkpointed"):
        save(tmp_path / "c", {"a": torch.ones(1)}, step=step)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_any_whole_number(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(1)}, step=np.int64(7))
    assert [(one.step, one.intact) for one in verify(tmp_path / "c")] == [(7, True)]


def test_a_save_that_cannot_be_committed_leaves_nothing(tmp_path):
    with pytest.raises(dcp.api.CheckpointException, match="metadata/f"):
        save(tmp_path / "c", {"a": torch.ones(100)}, metadata={"f": len})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _no_cached_plans(monkeypatch):
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(SavePlanner, name, {})


@pytest.mark.usefixtures("_no_cached_plans")
def test_a_plan_of_an_earlier_save_is_refused_before_anything_is_written(tmp_path):
    def save_caching(name, dtype):
        dcp.save(
            {"a": torch.ones(3, dtype=dtype)},
            storage_writer=Hdf5StorageWriter(tmp_path / name),
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
        )

    save_caching("1", torch.float32)
    for dtype in (torch.float32, torch.int32):  # to the planner, plans of both are the same
        with pytest.raises(dcp.api.CheckpointException) as caught:
            save_caching("2", dtype)
        error = caught.value.failures[0][0]
        assert isinstance(error, CheckpointWriteError)
        assert "enable_plan_caching" in error.fix
    assert [one.name for one in tmp_path.iterdir()] == ["1"]
    assert verify(tmp_path / "1")[0].intact


def test_no_rank_writes_by_a_plan_of_an_earlier_save(tmp_path):
    small, large, another = (3, "float32"), (4, "float32"), (3, "int32")
    pool = RankPool(2)
    try:
        first = [{"a": small, "b": small}, {"b": small}]
        assert pool.run(2, scenario.save_caching, tmp_path / "1", *first) == [[], []]
        for later in (
            first,
            [{"a": large, "b": small}, {"b": small, "a": large}],  # the second writes b as before
            [{"a": another, "b": small}, {"d": small}],  # the first writes b too, and a as it was
        ):
            for told in pool.run(2, scenario.save_caching, tmp_path / "2", *later):
                assert told
                assert all("enable_plan_caching" in error for error in told)
    finally:
        pool.close()
    assert [one.name for one in tmp_path.iterdir()] == ["1"]


def test_an_existing_folder_is_not_overwritten(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(3)})
    before = (tmp_path / "c" / manifest.NAME).read_bytes()
    with pytest.raises(dcp.api.CheckpointException, match="there is something at"):
        save(tmp_path / "c", {"a": torch.zeros(3)})
    assert (tmp_path / "c" / manifest.NAME).read_bytes() == before


def test_a_file_is_laid_out_once_for_all_the_saves_of_a_state(tmp_path, monkeypatch):
    def state(shape):
        return {"w": torch.randn(shape), "step": torch.tensor(shape[0], dtype=torch.int64)}

    save(tmp_path / "1", state((3, 5000)))
    monkeypatch.setattr(hdf5, "_Layout", None)
    later = state((3, 5000))
    save(tmp_path / "2", later)
    back = load(tmp_path / "2", state((3, 5000)))
    assert {name: bits(one) for name, one in back.items()} == {
        name: bits(one) for name, one in later.items()
    }
    assert verify(tmp_path / "2")[0].intact
    with pytest.raises(dcp.api.CheckpointException, match="NoneType"):
        save(tmp_path / "3", state((4, 5000)))  # another state needs another layout


def test_step_and_metadata_are_kept(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(3)}, step=12, metadata={"cursor": (1, 2)})
    known = manifest.read(tmp_path / "c")
    assert known.step == 12
    assert known.world_size == 1
    assert verify(tmp_path / "c")[0].step == 12


def test_damage_is_noticed_while_loading(tmp_path):
    save(tmp_path / "c", {"a": torch.ones(100)})
    file = manifest.read(tmp_path / "c").files[0]
    with (tmp_path / "c" / file.name).open("r+b") as raw:
        raw.seek(file.datasets[0].start + 17)
        raw.write(b"\x99")
    with pytest.raises(dcp.api.CheckpointException, match="is damaged"):
        load(tmp_path / "c", {"a": torch.zeros(100)})
