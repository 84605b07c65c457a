"""A verified checkpoint store. Knows no Slurm.

::

    checkpointer              what a training loop uses: background saves, restore, retention
    ├── copying, staging      the copy that is taken while training goes on, and its memory
    ├── saving, loading       one save, one load: the same outcome on every rank
    │   ├── storage           the store as torch.distributed.checkpoint sees it
    │   ├── objects, state    registered objects, and their states taken apart
    │   └── tagged, host      values as JSON; tensors on the host
    ├── ranks                 doing one thing together
    └── verify, export        every byte of it, without torch
        ├── reading, hdf5     one data file: checked while it is read; laid out and written
        ├── pipeline, disk    its bytes: several threads, past the page cache
        └── manifest, steps, dtypes    what is on disk
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmspot.checkpoint.storage import Hdf5StorageReader, Hdf5StorageWriter

__all__ = ["Hdf5StorageReader", "Hdf5StorageWriter"]


def __getattr__(name: str) -> Any:
    """Load torch only for whoever asks for the storage classes."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurmspot.checkpoint import storage  # noqa: PLC0415 - loads torch

    return getattr(storage, name)
