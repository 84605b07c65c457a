"""A run copied with its nodes' disks: unlike a copy of its folder alone, it goes on from them."""

import shutil

from slurmspot.checkpoint import ownership, steps


def copy(run, to):
    """Copy ``run``, whose nodes' disks lie beside its folder ``remote``."""
    shutil.copytree(run, to)
    for path in to.glob("n*/slurmspot-*"):
        key = ownership._owners(to / "remote")[-1].key()
        path.rename(path.with_name(steps.node_name(key, path.name.split("-", 2)[2])))
