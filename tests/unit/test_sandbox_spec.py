"""What a sandbox may be asked to be, and where it may lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmspot.errors import UsageError
from slurmspot.sandbox.spec import Layout, Spec


@pytest.mark.parametrize(
    "bad",
    [
        {"name": ""},
        {"name": "Upper"},
        {"name": "../up"},
        {"name": "a b"},
        {"name": "x" * 33},
        {"nodes": 0},
        {"nodes": 65},
        {"gpus_per_node": -1},
        {"grace_s": -1},
        {"kill_wait_s": 0},
    ],
)
def test_what_cannot_be_built_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Spec(**bad)


def test_nodes_are_numbered() -> None:
    assert Spec(nodes=3).node_names == ("node0", "node1", "node2")


def test_every_socket_fits_where_the_layout_is_accepted() -> None:
    longest = "/" + "x" * 60
    while True:
        try:
            layout = Layout(Path(longest))
        except UsageError as error:
            assert "107 bytes" in str(error)
            break
        for socket in (
            layout.munge_socket,
            layout.database_socket,
            layout.run("node63") / "node63_4294967295.4294967295",
        ):
            assert len(str(socket)) <= 107
        longest += "x"


@pytest.mark.parametrize("path", ["/tmp/a b", "/tmp/a#b", "/tmp/%n", "/tmp/x[0-3]", "relative"])
def test_paths_that_slurm_would_read_otherwise_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="cannot live"):
        Layout(Path(path))
