"""What the ranks of test_ranks.py do. Every function runs on all ranks of one world."""

import contextlib
import errno
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from slurmspot.checkpoint import loading, steps
from slurmspot.checkpoint.checkpointer import Checkpointer, RandomState
from slurmspot.checkpoint.disk import Disk, aligned
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.storage import Hdf5StorageReader, Hdf5StorageWriter
from slurmspot.errors import CheckpointWriteError, SlurmspotError, UsageError
from slurmspot.job.run import Run


class Holder:
    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


def build(kind):
    """(model, optimizer): ``plain``, ``ddp`` or ``fsdp``, all with the same initial values."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).pow(2).sum().backward()
        optimizer.step()


def weights(model):
    """The whole first weight, on every rank."""
    weight = next(iter(model.parameters())).detach()
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).tolist()


def start(folder, kind, **options):
    model, optimizer = build(kind)
    rank = dist.get_rank()
    objects = {"model": model, "optimizer": optimizer, "random": RandomState()}
    random.seed(100 + rank)
    torch.manual_seed(100 + rank)
    return model, optimizer, Checkpointer(Path(folder), objects, **options)


def save(folder, kind, step=3):
    model, optimizer, checkpointer = start(folder, kind)
    # Other data on every rank: under DDP the running statistics differ between ranks.
    train(model, optimizer, 3, seed=dist.get_rank())
    random.random()
    at_save = checkpointer.digest(), weights(model)
    checkpointer.save(step, trigger="period", meta={"world": dist.get_world_size()})
    # Training goes on at once: none of this may reach the checkpoint.
    after = random.random(), torch.rand(3).tolist()
    train(model, optimizer, 2, seed=dist.get_rank())
    checkpointer.wait()
    answer = *at_save, after
    checkpointer.close()
    return answer


def restore(folder, kind):
    model, _, checkpointer = start(folder, kind)
    restored = checkpointer.restore()
    after = random.random(), torch.rand(3).tolist()
    answer = checkpointer.digest(), weights(model), after, restored
    checkpointer.close()
    return answer


def save_again(folder, kind, *, moved):
    """Restore step 3 and save it once more, changed if ``moved``; why that was refused, if it was.

    A model and its optimizer are the same state however many ranks they are cut for.
    """
    model, optimizer, checkpointer = start(folder, kind)
    checkpointer.restore()
    if moved:
        train(model, optimizer, 1, seed=3)
    problem = ""
    try:
        checkpointer.save(3, trigger="period", meta={}, blocking=True)
    except CheckpointWriteError as error:
        problem = error.why
    checkpointer.close()
    return problem


def restore_on_pages(folder, kind):
    """As :func:`restore`, with pages of their own for small tensors too; how many had them."""
    taken = []

    def counted(size_bytes):
        taken.append(size_bytes)
        return aligned(size_bytes)

    with mock.patch.multiple(loading, _LARGE_BYTES=1, aligned=counted):
        return *restore(folder, kind)[:2], len(taken)


def train_on(folder, kind):
    """Restore, take three more steps, and give the digest at the end."""
    model, optimizer, checkpointer = start(folder, kind)
    checkpointer.restore()
    train(model, optimizer, 3, seed=50 + dist.get_rank())
    digest = checkpointer.digest()
    checkpointer.close()
    return digest


def disk_full_on_one_rank(folder, full_rank):
    """Save; save again with a limit on one rank; save again without. What each attempt gave."""
    holder = Holder(t=torch.zeros(100))
    mine = Holder(t=torch.full((10_000,), float(dist.get_rank())))
    events = []
    checkpointer = Checkpointer(
        Path(folder),
        {"shared": holder, "mine": mine},
        per_rank=frozenset({"mine"}),
        emit=lambda event, **data: events.append(event),
    )
    outcomes = []
    for step, limited in ((1, False), (2, True), (3, False)):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if limited and dist.get_rank() == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            checkpointer.save(step, trigger="period", meta={})
            checkpointer.wait()
            outcomes.append(None)
        except SlurmspotError as error:
            outcomes.append((type(error).__name__, str(error)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
    checkpointer.close()
    return outcomes, events.count("save_failed")


def error_of(call):
    try:
        call()
    except SlurmspotError as error:
        return type(error).__name__, str(error)
    return None


def save_holder(folder, per_rank):
    """Save one object whose value is the rank."""
    holder = Holder(rank=dist.get_rank())
    names = frozenset({"holder"} if per_rank else ())
    checkpointer = Checkpointer(Path(folder), {"holder": holder}, per_rank=names)
    checkpointer.save(1, trigger="period", meta={})
    error = error_of(checkpointer.wait)
    checkpointer.close()
    return error


def restore_holder(folder):
    holder = Holder(rank=None)
    checkpointer = Checkpointer(Path(folder), {"holder": holder}, per_rank=frozenset({"holder"}))
    error = error_of(checkpointer.restore)
    checkpointer.close()
    return error, holder.state["rank"]


def save_what_one_rank_cannot(folder):
    """Only the last rank's state cannot be stored; all must hear of it, and none may hang."""
    bad = dist.get_rank() == dist.get_world_size() - 1
    holder = Holder(value=len if bad else 1)
    checkpointer = Checkpointer(Path(folder), {"holder": holder}, per_rank=frozenset({"holder"}))
    checkpointer.save(1, trigger="period", meta={})
    error = error_of(checkpointer.wait)
    checkpointer.close()
    return error


def restore_another_model_on_one_rank(folder):
    """The last rank has a wider model: nothing may be loaded anywhere."""
    torch.manual_seed(1)
    bad = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Linear(3, 4 if bad else 2)
    before = model.weight.clone()
    checkpointer = Checkpointer(Path(folder), {"model": model})
    error = error_of(checkpointer.restore)
    checkpointer.close()
    return error, torch.equal(before, model.weight)


def save_linear(folder):
    checkpointer = Checkpointer(Path(folder), {"model": nn.Linear(3, 2)})
    checkpointer.save(1, trigger="period", meta={})
    error = error_of(checkpointer.wait)
    checkpointer.close()
    return error


def dcp_save(path, kind):
    """Plain dcp.save of a model's and optimizer's own state dicts."""
    model, optimizer = build(kind)
    train(model, optimizer, 2, seed=0)
    state = {"model": model.state_dict(), "note": {"lr": 0.1, "shape": (1, 2)}}
    dcp.save(state, storage_writer=Hdf5StorageWriter(path))
    return weights(model)


def dcp_load(path, kind):
    model, _ = build(kind)
    state = {"model": model.state_dict(), "note": {"lr": None, "shape": None}}
    dcp.load(state, storage_reader=Hdf5StorageReader(path))
    model.load_state_dict(state["model"])
    return weights(model), state["note"]


def hold_and_put_back(folder, kind):
    """Whether a throwaway step leaves no trace, with gradients and optimizer state gone again."""
    model, optimizer, checkpointer = start(folder, kind)
    before = checkpointer.digest(["model", "optimizer", "random"])
    held = checkpointer.hold()
    train(model, optimizer, 2, seed=3)
    moved = checkpointer.digest(["model", "optimizer", "random"]) != before
    checkpointer.put_back(held)
    back = checkpointer.digest(["model", "optimizer", "random"]) == before
    bare = not optimizer.state and all(p.grad is None for p in model.parameters())
    checkpointer.close()
    return moved, back, bare


def train_while_saving(folder, steps):
    """Save at every step without waiting: back-pressure and two users of gloo at once."""
    model, optimizer, checkpointer = start(folder, "ddp", keep=2)
    seen = {}
    for step in range(1, steps + 1):
        train(model, optimizer, 1, seed=step)
        checkpointer.save(step, trigger="period", meta={"step": step})
        with contextlib.suppress(SlurmspotError):
            seen[step] = checkpointer.digest()
    checkpointer.wait()
    checkpointer.close()
    return seen


def skip_alike(folder):
    """Try to save while only the first rank is still busy with the save before."""
    gate = threading.Event()

    def emit(event, **_):
        if event == "commit":  # told by the first rank alone, after the others are done
            assert gate.wait(30)

    checkpointer = Checkpointer(Path(folder), {"holder": Holder(t=torch.ones(3))}, emit=emit)
    begun = [checkpointer.save(1, trigger="period", meta={}, may_skip=True)]
    busy = checkpointer._saving
    if dist.get_rank() != 0:
        checkpointer.wait()
    begun.append(checkpointer.save(2, trigger="period", meta={}, may_skip=True))
    still_busy = not busy.is_set()
    gate.set()
    checkpointer.wait()
    begun.append(checkpointer.save(3, trigger="period", meta={}, may_skip=True))
    checkpointer.close()
    return begun, still_busy


def one_after_the_other(folder, count):
    """Checkpointers made and closed in one process, each using every group that it has."""
    for step in range(1, count + 1):
        checkpointer = Checkpointer(Path(folder), {"holder": Holder(t=torch.ones(3))})
        checkpointer.save(step, trigger="period", meta={})
        checkpointer.save(step + 100, trigger="period", meta={}, may_skip=True)
        checkpointer.close()


def save_other_steps(folder):
    """What a rank is told that saves another step than its peers do."""
    checkpointer = Checkpointer(Path(folder), {"holder": Holder(t=torch.ones(3))})
    checkpointer.save(10 + dist.get_rank(), trigger="period", meta={})
    told = checkpointer.failed(within_s=30)
    checkpointer.close()
    return str(told)


def tier_on_one_rank(folder):
    """What a rank is told when only the first has a local tier."""
    local = Path(folder) if dist.get_rank() == 0 else None
    claim = Claim(job_id="1", restart=0)
    try:
        Checkpointer(Path(folder) / "remote", {"holder": Holder()}, claim=claim, local=local)
    except UsageError as error:
        return str(error)
    return ""


def learn_of_a_failure_apart(folder, period):
    """A run whose save of step 4 fails, which the first rank learns of only later.

    Returns:
        What was saved of each rank in the newest checkpoints, by step.
    """
    rank, full = dist.get_rank(), threading.Event()
    real_write, real_remove = Disk.write, steps.remove

    def write(self, fd, memory, offset):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(self, fd, memory, offset)

    def remove(*args):  # of a large folder, on a network file system
        if full.is_set():
            assert removed.wait(30)
        real_remove(*args)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    holder = Holder(t=distribute_tensor(torch.zeros(2 * dist.get_world_size()), mesh, [Shard(0)]))
    environment = {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), **period}
    removed = threading.Event()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(Disk, "write", write),
        mock.patch.object(steps, "remove", remove),
        Run.from_env(folder=folder, holder=holder) as run,
    ):
        for step, _ in run.steps(range(14), total=14):
            holder.state["t"].to_local().fill_(step)
            if step == 4:  # it is saved in vain, and evaluated
                full.set()
                for _ in range(10):
                    run.check()
                    time.sleep(0.05)
            if step == 5:  # the first rank learns of it now, when no save is due
                removed.set()
                if rank == 0:
                    assert run._checkpointer._saving.wait(30)
                full.clear()
    return {
        step: saved_by_ranks(path)
        for step, path in steps.committed(run._folder.checkpoints).items()
    }


def saved_by_ranks(path):
    """The first number that each rank has in the checkpoint at ``path``."""
    whole = torch.zeros(2 * dist.get_world_size())
    dcp.load({"holder/t": whole}, storage_reader=Hdf5StorageReader(path), no_dist=True)
    return whole[::2].tolist()


def sharded_object(folder, saves):
    """An object that is no model and has a DTensor, cut unevenly: saved, or loaded from zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5)
    tensor = distribute_tensor(whole if saves else torch.zeros(7, 5), mesh, [Shard(0)])
    holder = Holder(average=tensor, note="x")
    checkpointer = Checkpointer(Path(folder), {"holder": holder})
    if saves:
        checkpointer.save(1, trigger="period", meta={})
        checkpointer.wait()
    else:
        checkpointer.restore()
    checkpointer.close()
    back = holder.state["average"]
    return back.full_tensor().tolist(), back.to_local().shape[0]


def familiar_fsdp(folder):
    """Whether a sharded model's parameters get to be copied late, and are right then."""
    model, optimizer, checkpointer = start(folder, "fsdp")
    for step in range(4):
        at_save = checkpointer.digest()
        checkpointer.save(step, trigger="period", meta={})
        late = {item.path for item in checkpointer._copying._late}
        train(model, optimizer, 1, seed=step)
        checkpointer.wait()
    checkpointer.close()
    return at_save, sorted(path for path in late if path.startswith("model/"))
