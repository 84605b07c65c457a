"""What works in a thread of its own beside a ``with`` block, and ends with it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class Companion(ABC):
    """The thread: it starts with the block, and the end of the block waits for it.

    Attributes:
        leaving: set when the block is left.
    """

    def __init__(self, name: str) -> None:
        self.leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leaving.set()
        self._stop()
        self._thread.join()

    @abstractmethod
    def _work(self) -> None:
        """What the thread does; it ends soon after :attr:`leaving` is set."""

    def _stop(self) -> None:  # noqa: B027 - most need nothing else
        """Whatever else it takes to end :meth:`_work`."""
