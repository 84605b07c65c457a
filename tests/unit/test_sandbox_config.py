"""The sandbox's configuration files, for what each release of Slurm understands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmspot.sandbox.config import (
    Features,
    Site,
    cgroup_conf,
    gres_conf,
    port_count,
    slurm_conf,
    slurmdbd_conf,
)
from slurmspot.sandbox.spec import Layout, Spec

SITE = Site(layout=Layout(Path("/tmp/s/x")), host="login1", user="ada", first_port=20000)
SPEC = Spec(name="x", nodes=3, gpus_per_node=2, grace_s=7, kill_wait_s=4)
RELEASES = {
    "22.05": Features(cgroup_disabled=False, preempt_parameters=False),
    "24.11": Features(cgroup_disabled=True, preempt_parameters=True),
    "between": Features(cgroup_disabled=False, preempt_parameters=True),
}


def keys(text: str) -> dict[str, str]:
    """The lines of a configuration file by what stands before the first ``=``."""
    once = [line for line in text.splitlines() if not line.startswith("PartitionName=")]
    found = dict(line.split("=", 1) for line in once)
    assert len(found) == len(once), "a key stands twice"
    return found


@pytest.fixture(params=RELEASES)
def features(request: pytest.FixtureRequest) -> Features:
    return RELEASES[request.param]


def test_the_owner_runs_everything_on_private_ports_and_sockets(features: Features) -> None:
    conf = keys(slurm_conf(SPEC, SITE, features))
    assert conf["SlurmUser"] == conf["SlurmdUser"] == "ada"
    assert conf["SlurmctldHost"] == "login1(127.0.0.1)"
    assert conf["SlurmctldPort"] == "20000"
    assert conf["AccountingStoragePort"] == keys(slurmdbd_conf(SITE))["DbdPort"] == "20001"
    assert "Port=20002-20004 " in conf["NodeName"]
    assert port_count(SPEC) == 5
    assert conf["AuthInfo"] == "socket=/tmp/s/x/run/munged/socket"
    assert conf["AccountingStoragePass"] == "/tmp/s/x/run/munged/socket"


def test_nodes_claim_gpus_that_are_devices(features: Features) -> None:
    conf = keys(slurm_conf(SPEC, SITE, features))
    assert conf["NodeName"].startswith("node[0-2] NodeHostname=login1 NodeAddr=127.0.0.1 ")
    assert conf["NodeName"].endswith(" CPUs=4 RealMemory=8000 Gres=gpu:2")
    assert conf["SlurmdParameters"] == "config_overrides"
    assert gres_conf(SPEC, SITE) == "Name=gpu File=/tmp/s/x/gpu/gpu[0-1]\n"


def test_without_gpus_none_is_claimed(features: Features) -> None:
    spec = replace(SPEC, gpus_per_node=0)
    assert "Gres=" not in slurm_conf(spec, SITE, features)
    assert gres_conf(spec, SITE) == ""


def test_spot_yields_to_ondemand_after_the_grace(features: Features) -> None:
    text = slurm_conf(SPEC, SITE, features)
    ondemand, spot = (line for line in text.splitlines() if line.startswith("PartitionName="))
    assert ondemand == "PartitionName=ondemand Nodes=node[0-2] PriorityTier=10 PreemptMode=OFF"
    assert spot == (
        "PartitionName=spot Nodes=node[0-2] PriorityTier=1 PreemptMode=REQUEUE "
        "GraceTime=7 Default=YES"
    )
    assert "KillWait=4\n" in text
    assert "requeue_delay" not in text, "the backoff stays as users meet it"


@pytest.mark.parametrize(
    ("release", "line"),
    [
        ("22.05", "SlurmctldParameters=preempt_send_user_signal"),
        ("between", "PreemptParameters=send_user_signal"),
        ("24.11", "PreemptParameters=send_user_signal"),
    ],
)
def test_the_users_signal_is_asked_for_as_the_release_spells_it(release: str, line: str) -> None:
    text = slurm_conf(SPEC, SITE, RELEASES[release])
    assert text.count("send_user_signal") == 1
    assert line in text.splitlines()


def test_cgroups_are_disabled_only_where_that_is_understood() -> None:
    found = {name: cgroup_conf(features) for name, features in RELEASES.items()}
    assert found == {"22.05": "", "between": "", "24.11": "CgroupPlugin=disabled\n"}


def test_the_database_is_reached_through_its_socket() -> None:
    assert keys(slurmdbd_conf(SITE))["StorageHost"] == "localhost"
