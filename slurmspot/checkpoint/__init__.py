"""A verified checkpoint store. Knows no Slurm.

::

    checkpointer              what a training loop uses: background saves, restore, retention
    ├── saving, loading       one save, one load: the same outcome on every rank
    │   ├── storage           the store as torch.distributed.checkpoint sees it
    │   ├── objects, state    registered objects, and their states taken apart
    │   └── tagged, host      values as JSON; tensors on the host
    ├── ranks                 doing one thing together
    └── verify                every byte of it, without torch
        └── manifest, hdf5, steps, dtypes    what is on disk
"""
