"""What both reference workloads share: process group, device, data, and being repeatable."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from slurmspot.job.sampler import GlobalBatchSampler

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, averaged over the ranks if there are several."""
        model = model.to(self.device)
        return DistributedDataParallel(model) if self.world_size > 1 else model

    def share(
        self, data: Dataset[_T], *, global_batch: int, seed: int, workers: int
    ) -> tuple[GlobalBatchSampler, DataLoader[_T]]:
        """This rank's share of ``data``: the sampler, which a run registers, and its loader."""
        sampler = GlobalBatchSampler(
            len(data),  # type: ignore[arg-type]  # Dataset does not say that it has a length
            global_batch,
            seed=seed,
            rank=self.rank,
            world_size=self.world_size,
        )
        return sampler, DataLoader(data, batch_sampler=sampler, num_workers=workers)


def start(seed: int) -> Ranks:
    """Join the process group (NCCL on GPUs, gloo on CPUs) and fix everything random."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        torch.set_num_threads(1)  # the order of summation must not depend on the machine
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.use_deterministic_algorithms(mode=True)
    random.seed(seed + rank)
    torch.manual_seed(seed)  # the same weights on every rank
    return Ranks(rank=rank, world_size=world_size, device=device)
