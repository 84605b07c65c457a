"""What the ranks of test_tiers.py do. Every function runs on all ranks of one world."""

import errno
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import Disk
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.ranks import Ranks


class Broken(Disk):
    """A remote tier that cannot be written to."""

    def write(self, fd, memory, offset):
        raise OSError(errno.EIO, "Input/output error")


def attempt(root, restart, node, *, disk=None, log=None):
    """(model, checkpointer) of this rank, sharded over all of them."""
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    checkpointer = Checkpointer(
        Path(root) / "remote",
        {"model": model},
        claim=Claim(job_id="7", restart=restart),
        local=Path(root) / node,
        node=node,
        disk=disk or Disk(),
        emit=lambda event, **data: (log if log is not None else []).append((event, data)),
    )
    return model, checkpointer


def fill(model, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)


def save(model, checkpointer, step):
    fill(model, step)
    checkpointer.save(step, trigger="period", meta={})
    checkpointer.wait()
    checkpointer.drain()


def node_of(ranks_per_node):
    return f"n{dist.get_rank() // ranks_per_node}"


def drained(root, ranks_per_node):
    """Step 1 is on both tiers."""
    node = node_of(ranks_per_node)
    (Path(root) / node).mkdir(exist_ok=True)
    model, checkpointer = attempt(root, 0, node)
    save(model, checkpointer, 1)
    checkpointer.close()


def drained_again(root, ranks_per_node):
    """A second attempt has step 2 on both tiers."""
    model, checkpointer = attempt(root, 1, node_of(ranks_per_node))
    assert checkpointer.restore().step == 1
    save(model, checkpointer, 2)
    checkpointer.close()


def not_drained(root, ranks_per_node):
    """Step 2 is on the nodes' disks alone."""
    model, checkpointer = attempt(root, 1, node_of(ranks_per_node), disk=Broken())
    assert checkpointer.restore().step == 1
    save(model, checkpointer, 2)
    assert "Input/output error" in str(checkpointer.failed())
    checkpointer.close()


def not_drained_elsewhere(root, ranks_per_node, nodes):
    """A third attempt on ``nodes`` has gone on from step 1, and made another step 2."""
    node = nodes[dist.get_rank() // ranks_per_node]
    (Path(root) / node).mkdir(exist_ok=True)
    model, checkpointer = attempt(root, 2, node, disk=Broken())
    assert checkpointer.restore().step == 1
    fill(model, 2.5)
    checkpointer.save(2, trigger="period", meta={})
    checkpointer.wait()
    checkpointer.drain()
    checkpointer.close()


def resume(root, ranks_per_node, nodes, restart=2):
    """(step, tier, passed_over) of a later attempt on ``nodes``."""
    model, checkpointer = attempt(root, restart, nodes[dist.get_rank() // ranks_per_node])
    restored = checkpointer.restore()
    for parameter in model.parameters():
        assert (parameter.to_local() == restored.step).all()
    save(model, checkpointer, restored.step + 1)
    assert checkpointer.failed() is None
    checkpointer.close()
    return restored.step, restored.tier, restored.passed_over


def save_without_disk(root, ranks_per_node):
    """Which commits each rank tells of when the second node has no disk."""
    node = node_of(ranks_per_node)
    (Path(root) / "n0").mkdir(exist_ok=True)
    log = []
    model, checkpointer = attempt(root, 0, node, log=log)
    save(model, checkpointer, 3)
    checkpointer.close()
    return [(data["step"], data["tier"]) for event, data in log if event == "commit"]


class Cutting(Disk):
    """Cuts this rank off from the others in the midst of a drain."""

    def write(self, fd, memory, offset):
        self.ranks.close()
        return super().write(fd, memory, offset)


def cut_off(root, ranks_per_node):
    """What this rank is told after each step, when the drain of the first one breaks down."""
    node = node_of(ranks_per_node)
    (Path(root) / node).mkdir(exist_ok=True)
    disk = Cutting() if dist.get_rank() == 1 else Disk()
    model, checkpointer = attempt(root, 0, node, disk=disk)
    disk.ranks = checkpointer._local._ranks
    told = []
    for step in (1, 2, 3):
        save(model, checkpointer, step)
        told.append(str(checkpointer.failed()))
    checkpointer.close()
    return told


def late(timeout_s):
    """Whether this rank gave up waiting for the second one, which takes two seconds."""
    ranks = Ranks.every(timedelta(seconds=timeout_s))
    try:
        ranks.reduce(lambda: time.sleep(2 * ranks.rank), lambda _: None)
    except RuntimeError:
        return True
    return False


def remote(root, step):
    return (Path(root) / "remote" / f"step-{step:08d}").is_dir()
