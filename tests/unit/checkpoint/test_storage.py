import pickletools
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmspot.checkpoint import hdf5, manifest
from slurmspot.checkpoint.dtypes import STORED_AS, item_size
from slurmspot.checkpoint.storage import Hdf5StorageReader, Hdf5StorageWriter
from slurmspot.checkpoint.verify import verify
from slurmspot.errors import CheckpointWriteError

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
