"""One real Slurm cluster for all cluster tests; they fail where it cannot be had."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurmspot.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """The cluster, with this process as its client."""
    with Sandbox.up(f"test-{os.getpid()}") as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(autouse=True)
def calm(sandbox: Sandbox) -> Iterator[None]:
    """Leave no job and every node idle."""
    yield
    sandbox.reset()
