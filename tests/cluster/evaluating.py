"""A workload for drills that evaluates after every fifth step, so that evaluation can be hit too.

::

    python tests/cluster/evaluating.py --steps 100 --step-s 0.05
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurmspot


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    if size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with slurmspot.Run.from_env(model=model, optimizer=optimizer) as run:
        for step, _ in run.steps(range(options.steps)):
            data = torch.randn(4, 8)
            loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss.detach())
            time.sleep(options.step_s)
            if step % 5 == 0 and not run.rehearsing:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(1, 8))
                model.train()


if __name__ == "__main__":
    main()
