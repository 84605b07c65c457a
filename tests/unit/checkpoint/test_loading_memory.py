import pytest
import torch
from run_script import answer_of

from slurmspot.checkpoint import loading, manifest
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.memory import available_bytes
from slurmspot.checkpoint.objects import parts
from slurmspot.checkpoint.ranks import Ranks
from slurmspot.errors import CorruptCheckpointError


def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def saved(tmp_path):
    objects = build(1)
    checkpointer = Checkpointer(tmp_path, objects)
    checkpointer.save(1, trigger="period", meta={})
    checkpointer.wait()
    return tmp_path / "step-00000001", checkpointer.digest()


def load(path, objects, available):
    return loading.load(
        path,
        parts(objects),
        ranks=Ranks(None),
        per_rank=frozenset(),
        available_bytes=lambda: available,
    )


def digest(tmp_path, objects):
    return Checkpointer(tmp_path / "none", objects).digest()


def tensors(objects):
    found = list(objects["model"].state_dict().values())
    for state in objects["optimizer"].state.values():
        found += state.values()
    return found


@pytest.mark.parametrize("available", [0, 1 << 40])
def test_loading_gives_the_same_with_little_memory(saved, tmp_path, available):
    path, expected = saved
    objects = build(2)
    assert digest(tmp_path, objects) != expected
    load(path, objects, available)
    assert digest(tmp_path, objects) == expected


def test_with_little_memory_the_live_tensors_are_loaded_in_place(saved):
    path, _ = saved
    objects = build(2)
    before = [one.data_ptr() for one in tensors(objects)]
    load(path, objects, 0)
    assert [one.data_ptr() for one in tensors(objects)] == before


@pytest.mark.parametrize("available", [0, 1 << 40])
def test_damage_is_found_before_anything_is_loaded(saved, tmp_path, available):
    path, _ = saved
    last = max(manifest.read(path).files[0].datasets, key=lambda d: d.start)
    with (path / "rank-00000.h5").open("r+b") as file:
        file.seek(last.start)
        byte = file.read(1)[0]
        file.seek(last.start)
        file.write(bytes([byte ^ 1]))
    objects = build(2)
    before = digest(tmp_path, objects)
    with pytest.raises(CorruptCheckpointError) as caught:
        load(path, objects, available)
    assert last.name in caught.value.why
    assert digest(tmp_path, objects) == before


def test_a_file_that_no_tensor_needs_is_checked_too(saved):
    path, _ = saved
    (path / "rank-00001.h5").touch()
    with pytest.raises(CorruptCheckpointError) as caught:
        load(path, build(2), 1 << 40)
    assert caught.value.why == "rank-00001.h5: is not in the manifest"


def put(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_memory_is_the_least_of_machine_and_control_groups(tmp_path):
    assert available_bytes() > 1 << 20
    put(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert available_bytes(tmp_path) == 1_024_000
    put(tmp_path, "proc/self/cgroup", "0::/slurm/job_1\n")
    put(tmp_path, "sys/fs/cgroup/slurm/job_1/memory.max", "max\n")
    put(tmp_path, "sys/fs/cgroup/slurm/memory.max", "9000\n")
    put(tmp_path, "sys/fs/cgroup/slurm/memory.current", "2000\n")
    assert available_bytes(tmp_path) == 7000
    put(tmp_path, "proc/self/cgroup", "9:cpu:/x\n8:memory:/x\n")
    put(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "100")
    put(tmp_path, "sys/fs/cgroup/memory/x/memory.usage_in_bytes", "300")
    assert available_bytes(tmp_path) == 0


def test_a_state_larger_than_half_of_the_memory_is_streamed_and_not_doubled(tmp_path):
    answer_of("little_memory.py", tmp_path, "save")
    assert answer_of("little_memory.py", tmp_path, "load", "0.9") < 0.2
    assert (
        answer_of("little_memory.py", tmp_path, "load", "2") > 0.95
    )  # which shows that this can be measured
