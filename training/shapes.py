"""A small convolutional classifier of drawn shapes: data that needs no download.

::

    python training/shapes.py --steps 100
    slurmspot launch --nodes 2 --gpus-per-node 2 -- python training/shapes.py --steps 100

BatchNorm keeps buffers that change outside the optimizer, and the loader has worker processes:
two things that a resumed run has to get right. Shapes: B samples, one channel, S x S pixels.
"""

from __future__ import annotations

import argparse

import torch
import workload
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import slurmspot

SIDE = 16
KINDS = ("disc", "square", "cross", "ring")


class Shapes(Dataset[tuple[Tensor, int]]):
    """Noisy pictures; each depends on the seed and its own index alone, in any worker."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        axis = torch.arange(SIDE, dtype=torch.float32)
        self._y, self._x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        kind = index % len(KINDS)
        centre = 5 + 6 * torch.rand(2, generator=random)
        radius = 2 + 3 * torch.rand(1, generator=random)
        dx, dy = (self._x - centre[0]).abs(), (self._y - centre[1]).abs()
        distance = (dx**2 + dy**2).sqrt()
        inside = {
            "disc": distance < radius,
            "square": torch.maximum(dx, dy) < radius,
            "cross": (torch.minimum(dx, dy) < 1) & (torch.maximum(dx, dy) < radius),
            "ring": (distance - radius).abs() < 1,
        }[KINDS[kind]]
        noise = 0.5 * torch.randn(SIDE, SIDE, generator=random)
        return (inside.float() + noise)[None], kind


def network(channels: int) -> nn.Module:
    """B 1 S S → B K."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, len(KINDS)),
    )


def main() -> None:
    """Train."""
    options = _options()
    ranks = workload.start(options.seed)
    sampler, loader = ranks.share(
        Shapes(options.samples, options.seed),
        global_batch=options.global_batch,
        seed=options.seed,
        workers=options.workers,
    )
    model = ranks.wrap(network(options.channels))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)

    def train_step(pictures: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(pictures.to(ranks.device))
        kinds = kinds.to(ranks.device)
        loss = functional.cross_entropy(logits, kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), (logits.argmax(1) == kinds).float().mean()

    with slurmspot.Run.from_env(model=model, optimizer=optimizer, sampler=sampler) as run:
        for step, (pictures, kinds) in run.steps(loader, total=options.steps):
            loss, accuracy = train_step(pictures, kinds)
            run.log(loss=loss, accuracy=accuracy)
            if ranks.rank == 0 and step % 20 == 0:
                print(f"step {step}/{options.steps} loss {float(loss):.4f}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the whole run")
    parser.add_argument("--global-batch", type=int, default=32, help="samples a step, all ranks")
    parser.add_argument("--samples", type=int, default=2048, help="pictures in the data set")
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=1, help="data-loader processes per rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
