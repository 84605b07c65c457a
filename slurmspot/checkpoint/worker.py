"""A thread that waits for work: to start one takes the thread that starts it a millisecond.

Python stops daemon threads wherever they are when it leaves; one that is inside torch then takes
the whole process down with it. So Python waits here for all work before it leaves.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_Given = tuple[Callable[[], None], threading.Event]

_unfinished: set[threading.Event] = set()


class Worker:
    """Does one thing after another in a daemon thread, which is started when first needed.

    The thread ends once nobody has the worker any more and all it was given is done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[_Given | None]

    def do(self, work: Callable[[], None]) -> threading.Event:
        """Have ``work`` done, which must not raise; then it is let go, and the event is set.

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
        _unfinished.add(done)
        self._queue.put((work, done))
        return done


def _work(queue: SimpleQueue[_Given | None]) -> None:
    while (given := queue.get()) is not None:
        work, done = given
        del given
        try:
            work()
        finally:
            del work  # it may hold tensors
            done.set()
            _unfinished.discard(done)


@atexit.register
def _finish() -> None:
    for done in list(_unfinished):
        done.wait()


os.register_at_fork(after_in_child=_unfinished.clear)
