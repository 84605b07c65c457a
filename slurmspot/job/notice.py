"""Notices that capacity goes away: each sets a flag with a deadline, and nothing more.

A signal's number is written into a pipe by the interpreter's own C handler
(:func:`signal.set_wakeup_fd`), so a notice is seen, timed and logged by a thread even while the
main thread is inside a collective or a kernel launch. Training code is never interrupted. Other
sources (:mod:`slurmspot.job.sources`) are asked by a thread each.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slurmspot.errors import UsageError
from slurmspot.events import Clock
from slurmspot.job.sources import Source

_S = 1_000_000_000
_END = 0  # the number of no signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A warning that this process will be killed.

    Attributes:
        source: the signal's name, or the source's.
        window_s: seconds it leaves, counted from ``mono_ns``.
        t_ns: unix time of arrival, nanoseconds.
        mono_ns: monotonic time of arrival, nanoseconds.
        machine: it is this machine that goes away, and Slurm does not know.
    """

    source: str
    window_s: float
    t_ns: int
    mono_ns: int
    machine: bool = False

    @property
    def deadline_ns(self) -> int:
        """Monotonic time at which the window closes."""
        return self.mono_ns + int(self.window_s * _S)


class NoticeListener:
    """Catches the preemption signals of this process, and asks the other sources of notices.

    Args:
        windows_s: seconds that each signal leaves.
        sources: what else to ask; each until its first notice.
        on_notice: called from a thread of the listener, once for each notice.
    """

    def __init__(
        self,
        windows_s: Mapping[signal.Signals, float],
        *,
        sources: Sequence[Source] = (),
        on_notice: Callable[[Notice], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._windows_s = dict(windows_s)
        self._on_notice = on_notice
        self._clock = clock or Clock()
        self._earliest: Notice | None = None
        self._taking = threading.Lock()
        self._closed = threading.Event()
        self._sources = tuple(sources)
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write_fd, False)
        self._thread = threading.Thread(target=self._listen, name="slurmspot-notice", daemon=True)
        self._former: dict[signal.Signals, Callable[..., object] | int | None] = {}
        self._former_fd = -1

    def start(self) -> NoticeListener:
        """Install the handlers.

        Raises:
            UsageError: not called from the main thread, which alone may install handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "the run must be opened in the main thread",
                why="only the main thread of a Python program may install signal handlers",
                fix="call slurmspot.Run.from_env before starting threads",
            )
        self._thread.start()
        self._former_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in self._windows_s:
            self._former[number] = signal.signal(number, _noted)
        for source in self._sources:
            threading.Thread(
                target=self._ask, args=(source,), name=f"slurmspot-{source.name}", daemon=True
            ).start()
        return self

    @property
    def notice(self) -> Notice | None:
        """The notice whose window closes first, or None."""
        return self._earliest

    def remaining_s(self) -> float | None:
        """Seconds until the window closes (0 when it has), or None without a notice."""
        notice = self._earliest
        if notice is None:
            return None
        return max(0.0, (notice.deadline_ns - self._clock.mono_ns()) / _S)

    def close(self) -> None:
        """Put the former handlers back and end the thread; a question in flight is not heard."""
        if not self._thread.is_alive():
            return
        with self._taking:
            self._closed.set()
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._former_fd)
        # Not by closing the pipe: a forked child that lives on still holds its other end.
        os.write(self._write_fd, bytes([_END]))
        self._thread.join()
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read_fd, 64):
                if number == _END:
                    return
                window_s = self._windows_s.get(signal.Signals(number))
                if window_s is not None:
                    self._take(signal.Signals(number).name, window_s)

    def _ask(self, source: Source) -> None:
        while (window_s := source.ask()) is None:
            if self._closed.wait(source.interval_s):
                return
        self._take(source.name, window_s, machine=True)

    def _take(self, source: str, window_s: float, *, machine: bool = False) -> None:
        notice = Notice(
            source=source,
            window_s=window_s,
            t_ns=self._clock.unix_ns(),
            mono_ns=self._clock.mono_ns(),
            machine=machine,
        )
        with self._taking:
            if machine and self._closed.is_set():
                return
            if self._earliest is None or notice.deadline_ns < self._earliest.deadline_ns:
                self._earliest = notice
            self._on_notice(notice)


def _noted(number: int, frame: object) -> None:
    """Do nothing: the wake-up pipe has already carried the signal to the listener."""
    del number, frame


@contextmanager
def shielded() -> Iterator[None]:
    """Processes started inside (data-loader workers) never see a preemption signal.

    Slurm signals every process of a step. A worker that dies of it takes the training process
    along before it can save. A blocked signal mask is inherited through fork and exec.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
