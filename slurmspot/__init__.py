"""Spot GPUs on Slurm, made safe and measured.

In a training script::

    import slurmspot

    with slurmspot.Run.from_env(model=model, optimizer=optimizer) as run:
        for step, batch in run.steps(loader):
            ...

Importing this package loads neither torch nor pandas; :class:`Run` is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmspot.job.run import Preempted, Run

__all__ = ["Preempted", "Run", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in {"Run", "Preempted"}:
        from slurmspot.job import run  # noqa: PLC0415 - keeps `import slurmspot` free of torch

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
