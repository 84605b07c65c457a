"""A thread that waits for work: to start one takes the thread that starts it a millisecond."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_Given = tuple[Callable[[], None], threading.Event]


class Worker:
    """Does one thing after another in a daemon thread, which is started when first needed.

    The thread ends once nobody has the worker any more and all it was given is done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[_Given | None]

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Have ``work`` done, which must not raise; the event is set afterwards.

        At once and here, if no further thread can be had.
        """
        done = threading.Event()
        if self._thread is None or not self._thread.is_alive():  # a fork leaves threads behind
            queue: SimpleQueue[_Given | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=(queue,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                work()
                done.set()
                return done
            weakref.finalize(self, queue.put, None)
            self._queue, self._thread = queue, thread
        self._queue.put((work, done))
        return done


def _work(queue: SimpleQueue[_Given | None]) -> None:
    while (given := queue.get()) is not None:
        work, done = given
        try:
            work()
        finally:
            done.set()
        del given, work, done  # whatever they hold is not needed while this waits
