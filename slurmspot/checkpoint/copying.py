"""Copy a state to the host, most of it while training goes on.

Only an optimizer's step moves parameters and the optimizer's own state, so these can be copied
*late*: during the forward and backward pass that follow, as long as the next step waits for the
end. Everything else is copied at the boundary, before training goes on.

That nobody but the optimizer moves a tensor is not taken on trust:

- A tensor is copied late only after a *look*: once it was copied at the boundary and still had the
  same bits when the optimizer's next step began. A model whose weights are clipped, or exchanged
  for averaged ones, between two steps is found out here.
- Torch counts the changes of every tensor. If the count has moved by the time the copy is used,
  the copy is refused, and that tensor is never copied late again.
- Changes through ``.data``, as when averaged weights are swapped in and out for an evaluation, and
  those of fused optimizers are not counted. So a few elements of each tensor are taken at the
  boundary, and the copy must have the same; if not, it is refused, and nothing of it is copied
  late again. (What writes to single elements behind torch's back is not noticed.)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slurmspot.checkpoint import host
from slurmspot.errors import CheckpointWriteError

_PIECE_BYTES = 16 << 20


@dataclass(slots=True)
class _Item:
    """One tensor to copy; ``changes`` is torch's count of its changes when the copy was asked for.

    Attributes:
        live: as the state gave it.
        mine: this rank's part of it, as it lies in memory.
    """

    path: str
    live: torch.Tensor
    mine: torch.Tensor
    room: torch.Tensor
    changes: int

    def copy(self) -> None:
        """Copy it; a copy from a GPU is queued on the current stream."""
        with torch.no_grad():
            host.part(self.room).copy_(self.mine, non_blocking=self.live.is_cuda)

    def copy_aside(self) -> None:
        """Copy it from memory to memory, on one core and without keeping other threads waiting.

        Torch's own copy would take all cores from the training it runs beside.
        """
        source = self.mine.detach()
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            self.copy()
            return
        target, content = (
            np.frombuffer(host.content(one), np.uint8) for one in (host.part(self.room), source)
        )
        for begin in range(0, content.size, _PIECE_BYTES):
            piece = slice(begin, begin + _PIECE_BYTES)
            np.copyto(target[piece], content[piece])

    @property
    def changed(self) -> bool:
        return _changes(self.live, self.mine) != self.changes

    @property
    def same_bits(self) -> bool:
        return host.digest(self.path, self.live) == host.digest(self.path, self.room)


class Steadiness:
    """What is known of tensors that only an optimizer should move, by path."""

    def __init__(self) -> None:
        self._steady: dict[str, bool] = {}

    def unknown(self, path: str) -> bool:
        """Whether it has yet to be looked at."""
        return path not in self._steady

    def steady(self, path: str) -> bool:
        """Whether it was looked at, and has never been seen to move between two steps."""
        return self._steady.get(path, False)

    def learn(self, path: str, *, steady: bool) -> None:
        """Note what was seen; once unsteady is unsteady for ever."""
        self._steady[path] = steady and self._steady.get(path, True)


class Copying:
    """One copy of a state, part of which may still be under way.

    The thread that trains makes it, which copies what cannot wait, and calls :meth:`settle`
    before anything that is copied late may change. A second thread calls :meth:`carry_out`. A
    third may use each room once :meth:`ready` returns, and asks :meth:`confirm`, when the second
    is done, before it makes anything of them final.

    Args:
        tensors: the state, by path.
        rooms: where to copy them to, by path; those without one need not be copied.
        movers: where in memory the tensors lie that only an optimizer's step moves.
        known: what earlier copies have learnt.
        late: copy late what may be; otherwise everything is copied now.

    Attributes:
        size_bytes: of this rank's parts of all of the state.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        rooms: Mapping[str, torch.Tensor],
        *,
        movers: Collection[tuple[int, int]],
        known: Steadiness,
        late: bool,
    ) -> None:
        self.size_bytes = 0
        self._known = known
        self._late: list[_Item] = []
        self._looks: list[_Item] = []
        self._samples: list[tuple[str, torch.Tensor, bytes | torch.Tensor]] = []
        self._missing = {path for path in rooms if tensors[path].is_cuda}
        devices = {tensors[path].device for path in self._missing}
        for path, tensor in tensors.items():
            mine = host.part(tensor)
            address = host.address(mine)
            self.size_bytes += address[1]
            if (room := rooms.get(path)) is None:
                continue
            moved = address in movers and not tensor.is_inference()
            item = _Item(path, tensor, mine, room, _changes(tensor, mine) if moved else 0)
            sample = host.sample(mine) if moved and late and known.steady(path) else None
            if sample is not None:
                self._late.append(item)
                self._samples.append((path, room, sample))
                continue
            if moved and known.unknown(path):
                self._looks.append(item)
            item.copy()
        self._missing.update(item.path for item in self._late)
        self._streams = [
            _Stream(one, [item for item in self._late if item.live.device == one])
            for one in devices  # without any, there is no call of CUDA
        ]
        self._arrived = threading.Condition()
        self._over = threading.Event()
        self._waiting_since: float | None = None
        self._lock = threading.Lock()
        self._changed: list[str] | None = None
        self._error: Exception | None = None
        self._abandoned = False

    def abandon(self) -> None:
        """Have it refused: what need not be copied may change from now on."""
        self._abandoned = True

    def settle(self) -> None:
        """Return when all that was to be copied may change."""
        self._wait()
        with self._lock:
            if self._changed is None:
                self._changed = self._found_changed()
                self._late = []  # tensors that training has replaced since may go

    def look(self) -> int:
        """Now that an optimizer's step begins, see whether what it moves has stayed till now.

        Returns:
            How many tensors had to be looked at.
        """
        for stream in self._streams if self._looks else ():
            stream.wait()
        for item in self._looks:
            self._known.learn(item.path, steady=not item.changed and item.same_bits)
        return len(self._looks)

    def carry_out(self) -> float:
        """Copy what is left; return the seconds for which :meth:`settle` has waited for it."""
        with self._errors_kept():
            for item in self._late:
                if not item.live.is_cuda:
                    item.copy_aside()
                    self._have({item.path})
        since = self._waiting_since
        waited_s = 0.0 if since is None else time.monotonic() - since
        self._over.set()
        with self._errors_kept():
            waited_s += sum(stream.wait() for stream in self._streams)
        self._have(self._missing)
        return waited_s

    def ready(self, path: str) -> None:
        """Return when the copy of ``path`` is complete, or will never be."""
        with self._arrived:
            self._arrived.wait_for(lambda: path not in self._missing)

    def confirm(self) -> None:
        """Check that what was copied is the state at the boundary, and nothing later.

        Raises:
            CheckpointWriteError: something that was copied late has been changed meanwhile, or
                the copy was abandoned.
            Exception: whatever went wrong in :meth:`carry_out`.
        """
        if self._error is not None:
            raise self._error
        if self._abandoned:
            raise CheckpointWriteError(
                "the save was interrupted", why="training may have gone on", fix="save again"
            )
        with self._lock:
            changed = self._found_changed() if self._changed is None else self._changed
            changed = changed or self._found_other()
        if changed:
            raise CheckpointWriteError(
                f"{changed[0]} was changed while it was being copied",
                why=f"{len(changed)} tensors moved between two steps of their optimizer",
                fix="nothing: from now on these are copied before training goes on",
            )

    def _have(self, paths: set[str]) -> None:
        with self._arrived:
            self._missing -= paths
            self._arrived.notify_all()

    @contextlib.contextmanager
    def _errors_kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - confirm() raises it
            self._error = error

    def _wait(self) -> None:
        for stream in self._streams:
            stream.hold_training()
        if not self._over.is_set():
            self._waiting_since = time.monotonic()
            self._over.wait()

    def _found_other(self) -> list[str]:
        """What has other elements than at the boundary; then nothing here can be trusted."""
        other = [path for path, room, sample in self._samples if not host.has(room, sample)]
        for path, *_ in self._samples if other else ():
            self._known.learn(path, steady=False)
        return other

    def _found_changed(self) -> list[str]:
        changed = [item.path for item in self._late if item.changed]
        for path in changed:
            self._known.learn(path, steady=False)
        return changed


def _changes(tensor: torch.Tensor, mine: torch.Tensor) -> int:
    """A number that grows whenever torch sees the tensor change, or this rank's part of it."""
    return tensor._version + mine._version  # noqa: SLF001 - there is no other such count


class _Stream:
    """Copies from one GPU, on a stream of their own."""

    def __init__(self, device: torch.device, late: Sequence[_Item]) -> None:
        self._device = device
        self._late = bool(late)
        self._held: Any = None
        stream: Any = torch.cuda.Stream
        side = stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for item in late:
                item.copy()
        self._done = _mark(side)

    def hold_training(self) -> None:
        """Let the training stream, but not this process, wait for the copies."""
        if self._late:
            training = torch.cuda.current_stream(self._device)
            self._held = _mark(training)
            training.wait_event(self._done)

    def wait(self) -> float:
        """Wait for the copies; the seconds for which the training stream has waited for them."""
        self._done.synchronize()
        if self._held is None or not self._held.query():
            return 0.0
        return max(0.0, float(self._held.elapsed_time(self._done))) / 1000


def _mark(stream: torch.cuda.Stream) -> Any:
    """An event that has happened when all that is queued on ``stream`` by now is done."""
    event: Any = torch.cuda.Event
    return stream.record_event(event(enable_timing=True))
