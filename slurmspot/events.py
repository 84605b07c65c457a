"""The event log: what a run says of itself, one JSON line an event.

``RUN/events/<attempt>/<rank>.jsonl`` is appended to by one process, each line in one ``write``.
A kill can leave a torn last line; readers skip it. Besides the log, each rank keeps a *beat*: the
last step it ran and when, overwritten in place at every step, so that the last step before a
SIGKILL is known without logging every one.

Event names and what belongs to each (besides ``t_ns``, ``mono_ns``, ``event``, ``step``):

===================  =============================================================================
``launched``         srun has started this rank, before the command
``attempt_start``    job_id, restart, rank, world_size, host, pid
``imports_done``     -
``restore_begin``    -
``restore_end``      step restored (null: nothing to restore), tier (``local``: it was on the nodes'
                     disks alone), seconds, rejected and passed_over (lists of {step, problem}:
                     newer ones that did not verify; newer ones on the nodes' disks, of no use,
                     there with damaged: true where it is not that they are incomplete)
``restore_failed``   error: there are checkpoints, and none verifies
``step``             rank 0 only, thinned to about one a second; loss if logged
``first_step``       the first step that no earlier attempt had run; repeated (steps done twice)
``goal``             total: steps of the whole run, null for one epoch; its step: where it begins
``notice``           source (SIGUSR1, SIGTERM, aws, …), window_s; machine: true where it is the
                     machine that goes away, and Slurm does not know
``agreed``           the step at which all ranks save
``snapshot_begin``   trigger (start, period, notice, final)
``snapshot_end``     stall_s: what training has waited, at the boundary and before the optimizer
``snapshot_look``    tensors, seconds: once for a tensor, before it may be copied while training
                     goes on, training waits to see that only its optimizer moves it
``save_skipped``     trigger; every rank skips it: the one before is not durable everywhere yet
``persist_end``      size_bytes, seconds
``commit``           tier (``local``: safe against the loss of processes; ``remote``: of nodes
                     too), trigger; ``restore``: one found on the nodes' disks
``save_failed``      error; tier: ``local`` where the remote one then stood in
``drain_skipped``    a step on the nodes' disks, passed by for a newer one or for want of time
``drain_failed``     error
``requeue_asked``    exit_code, avoiding (nodes that go away); rank name ``batch``
``hang``             seconds without a step (rank name ``watchdog``); the ranks are killed
``held``             phase: a drill holds this rank in it, until ``released``
``exit``             code, error
``finished``         digest, loss
``inject``           kind, job_id, nodes, notice (bool); attempt name ``injector``
``inject_observed``  kind, observed (bool), seconds from the action to its effect
===================  =============================================================================
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BEAT = struct.Struct("<qqq")  # step, t_ns, mono_ns
_LOG_EVERY_NS = 1_000_000_000
_STEP = b'"event":"step"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The two clocks, passed in so that tests own time. Both return nanoseconds."""

    unix_ns: Callable[[], int] = time.time_ns
    mono_ns: Callable[[], int] = time.monotonic_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the event log.

    Attributes:
        t_ns: unix time in nanoseconds, on the clock of the host that wrote it.
        mono_ns: monotonic nanoseconds, comparable only within one process.
        step: the training step it belongs to, or None.
        data: what else the line holds.
    """

    t_ns: int
    mono_ns: int
    event: str
    step: int | None
    attempt: str
    rank: str
    data: Mapping[str, Any] = field(default_factory=dict)


class EventWriter:
    """Appends the events of one process. Safe to call from several threads.

    Losing a log line must not end a training run: a failed write (a full disk) is counted in
    ``dropped`` and never raises.
    """

    def __init__(
        self, events: Path, attempt: str, rank: str | int, clock: Clock | None = None
    ) -> None:
        folder = events / attempt
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clock = clock or Clock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._log = os.open(folder / f"{rank}.jsonl", flags | os.O_APPEND, 0o600)
        self._beat = os.open(folder / f"{rank}.beat", flags, 0o600)
        self.dropped = 0

    def write(
        self,
        event: str,
        *,
        step: int | None = None,
        at: tuple[int, int] | None = None,
        **data: Any,
    ) -> None:
        """Append one event, stamped now or ``at`` (unix ns, monotonic ns)."""
        t_ns, mono_ns = at or (self._clock.unix_ns(), self._clock.mono_ns())
        line = {
            "t_ns": t_ns,
            "mono_ns": mono_ns,
            "event": event,
            "step": step,
            **data,
        }
        # The newline comes first as well: after a torn line the next one still stands alone.
        text = "\n" + json.dumps(line, separators=(",", ":"), default=str) + "\n"
        self._put(lambda: os.write(self._log, text.encode()))

    def beat(self, step: int) -> None:
        """Note that ``step`` has been run. Costs one small write."""
        record = _BEAT.pack(step, self._clock.unix_ns(), self._clock.mono_ns())
        self._put(lambda: os.pwrite(self._beat, record, 0))

    def _put(self, write: Callable[[], int]) -> None:
        try:
            write()
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        """Close the files; the events written so far stay."""
        os.close(self._log)
        os.close(self._beat)


class Thinning:
    """Which steps to log: about one a second, at round numbers.

    Round, so that two runs log the same steps and their losses can be laid over one another. The
    beat keeps every step, so none is lost for the accounting.
    """

    def __init__(self) -> None:
        self._kept: tuple[int, int] | None = None  # step and when, or where counting began

    def keeps(self, step: int, now_ns: int) -> bool:
        """Whether to log ``step``, made at monotonic time ``now_ns``."""
        if self._kept is None:
            self._kept = (step, now_ns)
            return False
        kept_step, kept_ns = self._kept
        steps_a_second = (step - kept_step) * _LOG_EVERY_NS / max(1, now_ns - kept_ns)
        if step % _rounded_up(steps_a_second):
            return False
        self._kept = (step, now_ns)
        return True


def _rounded_up(number: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50 and so on that is not below ``number``."""
    power = 1
    while True:
        for first in (1, 2, 5):
            if first * power >= number:
                return first * power
        power *= 10


def read_events(events: Path, *, steps: bool = True) -> list[Event]:
    """All events under a run's ``events`` folder, in order of time.

    Torn and foreign lines are skipped. The beat of each rank comes back as one more ``step`` event.

    Args:
        steps: False leaves the ``step`` events out, by far the most, without parsing them.
    """
    found: list[Event] = []
    for log in sorted(events.glob("*/*.jsonl")):
        found.extend(_read_log(log, steps=steps))
    for beat in sorted(events.glob("*/*.beat")) if steps else ():
        found.extend(_read_beat(beat))
    found.sort(key=lambda event: event.t_ns)
    return found


def last_step(events: Path, *, before_attempt: str | None = None) -> int | None:
    """The highest step that any attempt has run, from the beats alone; None if none has.

    Args:
        before_attempt: leave this attempt out.
    """
    steps = [
        record.step
        for beat in events.glob("*/*.beat")
        if beat.parent.name != before_attempt
        for record in _read_beat(beat)
        if record.step is not None
    ]
    return max(steps, default=None)


def _read_log(path: Path, *, steps: bool) -> Iterator[Event]:
    for raw in path.read_bytes().split(b"\n"):
        if not raw or (not steps and _STEP in raw):
            continue
        try:
            line = json.loads(raw)
            yield Event(
                t_ns=int(line.pop("t_ns")),
                mono_ns=int(line.pop("mono_ns")),
                event=str(line.pop("event")),
                step=line.pop("step", None),
                attempt=path.parent.name,
                rank=path.stem,
                data=line,
            )
        except (ValueError, KeyError, AttributeError, TypeError):
            continue


def _read_beat(path: Path) -> Iterator[Event]:
    raw = path.read_bytes()
    if len(raw) == _BEAT.size:
        step, t_ns, mono_ns = _BEAT.unpack(raw)
        yield Event(
            t_ns=t_ns,
            mono_ns=mono_ns,
            event="step",
            step=step,
            attempt=path.parent.name,
            rank=path.stem,
        )
