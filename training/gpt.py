"""A small GPT on the sources of Python's own standard library: runs on a laptop and on GPUs.

::

    python training/gpt.py --steps 200
    slurmspot launch --nodes 2 --gpus-per-node 2 -- python training/gpt.py --steps 200

Shapes: B samples, T tokens of context, C channels, V vocabulary (bytes).
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import workload
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import slurmspot

VOCABULARY = 256


class StandardLibrary(Dataset[Tensor]):
    """Windows of ``context + 1`` bytes over the standard library's modules, in order of name."""

    def __init__(self, context: int, size_bytes: int) -> None:
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= size_bytes:
                break
        self._text = torch.frombuffer(text[:size_bytes], dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1].long()


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to the stream."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.mix = nn.Linear(channels, channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """B T C → B T C."""
        b, t, c = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        q, k, v = qkv.view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.mix(attended.transpose(1, 2).reshape(b, t, c)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(
        self, *, context: int, channels: int, heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, channels)
        self.position = nn.Embedding(context, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """B T → B T V."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Train."""
    options = _options()
    ranks = workload.start(options.seed)
    sampler, loader = ranks.share(
        StandardLibrary(options.context, options.corpus_bytes),
        global_batch=options.global_batch,
        seed=options.seed,
        workers=options.workers,
    )
    model = ranks.wrap(
        GPT(
            context=options.context,
            channels=options.channels,
            heads=options.heads,
            layers=options.layers,
            dropout=options.dropout,
        )
    )
    torch.manual_seed(options.seed + ranks.rank)  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / options.warmup)
    )

    def train_step(tokens: Tensor) -> Tensor:
        began = time.monotonic()
        tokens = tokens.to(ranks.device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        # A drill needs steps of a known length; a real run leaves this at 0.
        time.sleep(max(0.0, options.step_s - (time.monotonic() - began)))
        return loss.detach()

    with slurmspot.Run.from_env(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler
    ) as run:
        for step, tokens in run.steps(loader, total=options.steps):
            loss = train_step(tokens)
            run.log(loss=loss)
            if ranks.rank == 0 and step % options.print_every == 0:
                print(f"step {step}/{options.steps} loss {float(loss):.4f}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of the whole run")
    parser.add_argument("--global-batch", type=int, default=16, help="samples a step, all ranks")
    parser.add_argument("--context", type=int, default=64, help="tokens of context")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps of learning-rate warm-up")
    parser.add_argument("--corpus-bytes", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=0, help="data-loader processes per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds a step takes")
    parser.add_argument("--print-every", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
