"""One real Slurm cluster for all cluster tests; they fail where it cannot be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from slurmspot.runfolder import RunFolder
from slurmspot.sandbox import Sandbox
from slurmspot.sandbox.ports import reserved
from slurmspot.study.soak import Drill, undisturbed


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """The cluster."""
    with Sandbox.up(f"test-{os.getpid()}") as cluster:
        yield cluster


@pytest.fixture(scope="module", autouse=True)
def client(sandbox: Sandbox) -> Iterator[None]:
    """Make this process a client of the cluster, but not for the tests of other folders."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sandbox.env.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def calm(sandbox: Sandbox) -> Iterator[None]:
    """Leave no job and every node idle."""
    yield
    sandbox.reset()


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """Where drills ask for the clouds' notices."""
    with reserved(1) as port:
        yield port


@pytest.fixture(scope="session")
def baselines(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Drill], str]:
    """The digest that an undisturbed run of each drill ends with; each is run once."""
    found: dict[tuple[object, ...], str] = {}

    def digest(drill: Drill) -> str:
        key = (drill.command, drill.steps, drill.nodes)
        if key not in found:
            folder = RunFolder(tmp_path_factory.mktemp("baseline"))
            found[key] = undisturbed(drill, folder)["digest"]
        return found[key]

    return digest
