"""The text of a sandbox's configuration files, as functions of values."""

from __future__ import annotations

from dataclasses import dataclass

from slurmspot.sandbox.spec import Layout, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the installed Slurm understands.

    Attributes:
        cgroup_disabled: ``CgroupPlugin=disabled``. Releases that have it refuse to start without
            it where cgroups are absent; releases that lack it refuse to start with it.
        preempt_parameters: the key ``PreemptParameters``, which takes ``send_user_signal``. Before
            it the same is a word of ``SlurmctldParameters``.
    """

    cgroup_disabled: bool
    preempt_parameters: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a spec is carried out.

    Attributes:
        host: short name of this machine.
        user: who runs every daemon.
        first_port: slurmctld's; slurmdbd's and the nodes' follow it.
    """

    layout: Layout
    host: str
    user: str
    first_port: int


def port_count(spec: Spec) -> int:
    """How many consecutive ports a sandbox takes."""
    return 2 + spec.nodes


def slurmdbd_port(first_port: int) -> int:
    """Where slurmdbd listens; slurmctld listens on the first port, the nodes after slurmdbd."""
    return first_port + 1


def slurm_conf(spec: Spec, site: Site, features: Features) -> str:
    """``slurm.conf``: see slurm.conf(5) for every key."""
    layout = site.layout
    nodes = f"node[0-{spec.nodes - 1}]"
    last_port = site.first_port + port_count(spec) - 1
    ports = f"{site.first_port + 2}-{last_port}"
    gpus = f" Gres=gpu:{spec.gpus_per_node}" if spec.gpus_per_node else ""
    user_signal = (
        "PreemptParameters=send_user_signal"
        if features.preempt_parameters
        else "SlurmctldParameters=preempt_send_user_signal"
    )
    return f"""\
ClusterName={spec.name}
SlurmctldHost={site.host}(127.0.0.1)
SlurmctldPort={site.first_port}
SlurmUser={site.user}
SlurmdUser={site.user}
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
StateSaveLocation={layout.run("slurmctld")}
SlurmctldPidFile={layout.run("slurmctld")}/pid
SlurmdSpoolDir={layout.run("%n")}
SlurmdPidFile={layout.run("%n")}/pid
ProctrackType=proctrack/linuxproc
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd_port(site.first_port)}
AccountingStoragePass={layout.munge_socket}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
JobRequeue=1
KillWait={spec.kill_wait_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal}
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={nodes} NodeHostname={site.host} NodeAddr=127.0.0.1 Port={ports} \
CPUs={spec.cpus_per_node} RealMemory=8000{gpus}
PartitionName=ondemand Nodes={nodes} PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes={nodes} PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={spec.grace_s} Default=YES
"""


def gres_conf(spec: Spec, site: Site) -> str:
    """``gres.conf``. Without ``File=`` Slurm would not set ``CUDA_VISIBLE_DEVICES``."""
    if not spec.gpus_per_node:
        return ""
    files = site.layout.gpu(0).with_name(f"gpu[0-{spec.gpus_per_node - 1}]")
    return f"Name=gpu File={files}\n"


def cgroup_conf(features: Features) -> str:
    """``cgroup.conf``: the sandbox tracks processes without cgroups."""
    return "CgroupPlugin=disabled\n" if features.cgroup_disabled else ""


def slurmdbd_conf(site: Site) -> str:
    """``slurmdbd.conf``. ``localhost`` means MariaDB's socket, which the environment names."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={site.layout.munge_socket}
DbdHost={site.host}
DbdAddr=127.0.0.1
DbdPort={slurmdbd_port(site.first_port)}
SlurmUser={site.user}
PidFile={site.layout.run("slurmdbd")}/pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
"""
