"""The random states of one process as one object to register."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomState:
    """Python's, NumPy's (if imported), torch's CPU and this process's CUDA random state.

    A state that this process cannot take, such as CUDA's on a machine without one, is kept and
    given back unchanged by :meth:`state_dict`.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The current states; taking them draws no number."""
        state: dict[str, Any] = {
            **self._kept,
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
        }
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own omission
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            import numpy as np  # noqa: PLC0415 - only where the saved run used it

            np.random.set_state(state["numpy"])  # noqa: NPY002 - the legacy global state is meant
        self._kept = {}
        if "cuda" in state:
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"])
            else:
                self._kept = {"cuda": state["cuda"]}

    def fresh_state(self, seed: int) -> None:
        """Begin anew from ``seed``, for a rank that the saved run did not have."""
        random.seed(seed)
        torch.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)


@contextmanager
def unmoved() -> Iterator[None]:
    """Random numbers drawn inside are not missing outside."""
    states = RandomState()
    before = states.state_dict()
    try:
        yield
    finally:
        states.load_state_dict(before)
