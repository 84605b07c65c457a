"""What `slurmspot doctor` says of a cluster, an environment and storage; no Slurm is needed."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmspot import doctor, filesystem
from slurmspot.checkpoint.disk import Disk
from slurmspot.cluster import fitness
from slurmspot.cluster.command import Output
from slurmspot.cluster.fitness import Cluster
from slurmspot.errors import NoSlurmError, SlurmError, SlurmUnreachableError
from slurmspot.events import Clock
from slurmspot.filesystem import Checkpoint, Kind, Mount, Refusal, Speed
from slurmspot.findings import Level
from slurmspot.settings import JobEnvironment

ROOT = Path(__file__).parents[2]

CONFIG_22_05 = """\
Configuration data as of 2026-11-29T16:10:22
AccountingStorageType   = accounting_storage/slurmdbd
CliFilterPlugins        = (null)
JobRequeue              = 1
JobSubmitPlugins        = (null)
KillWait                = 5 sec
PowerPlugin             = 
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:00:00
SlurmctldHost[0]        = login1(127.0.0.1)
SlurmctldParameters     = preempt_send_user_signal,idle_on_node_suspend
SlurmdTimeout           = 300 sec
SLURM_CONF              = /scratch/site/slurm.conf
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at login1 is UP
"""  # noqa: W291 - as Slurm prints it
CONFIG_26_05 = """\
Configuration data as of 2026-11-29T16:10:12
AccountingStorageType   = accounting_storage/slurmdbd
CliFilterPlugins        = (null)
JobRequeue              = 1
JobSubmitPlugins        = (null)
KillWait                = 5 sec
MaxBatchRequeue         = 5
PreemptMode             = REQUEUE
PreemptParameters       = (null)
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:00:00
SlurmctldHost[0]        = login1(127.0.0.1)
SlurmctldParameters     = preempt_send_user_signal,idle_on_node_suspend
SlurmdTimeout           = 300 sec
SLURM_CONF              = /scratch/site/slurm.conf
SLURM_VERSION           = 26.05.5

Slurmctld(primary) at login1 is UP
"""
PARTITIONS = (
    "PartitionName=ondemand AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
    "Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO "
    "Nodes=node[0-3] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO OverSubscribe=NO "
    "PreemptMode=OFF State=UP TotalCPUs=16 TotalNodes=4 SelectTypeParameters=NONE\n"
    "PartitionName=spot AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
    "Default=YES QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=15 "
    "Hidden=NO Nodes=node[0-3] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO OverSubscribe=NO "
    "PreemptMode=REQUEUE State=UP TotalCPUs=16 TotalNodes=4 SelectTypeParameters=NONE\n"
)
SACCT_FIELDS = "Account             AdminComment        AllocCPUS\nJobID               State\n"
TAKEN = "sbatch: Job 1 to start at 2026-12-01T07:28:43 using 1 processors on nodes node0\n"


class Slurm:
    """A cluster that prints what it is given; a command without an answer here ends a test."""

    def __init__(self, config=CONFIG_22_05, partitions=PARTITIONS, **answers):
        self.asked = []
        self.answers = {
            "show config": Output(stdout=config, stderr="", returncode=0),
            "show partition": Output(stdout=partitions, stderr="", returncode=0),
            "--test-only": Output(stdout="", stderr=TAKEN, returncode=0),
            "--helpformat": Output(stdout=SACCT_FIELDS, stderr="", returncode=0),
            "--format=JobID": Output(stdout="JobID\n", stderr="", returncode=0),
            **{name.replace("_", " "): answer for name, answer in answers.items()},
        }

    def __call__(self, argv, stdin=None):
        self.asked.append(list(argv))
        line = " ".join(argv)
        answer = next(answer for words, answer in self.answers.items() if words in line)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def examined(self, partition="spot"):
        return fitness.examine(partition, runner=self, which=lambda name: f"/usr/bin/{name}")

    def found(self, subject, partition="spot"):
        """The one finding about ``subject``."""
        (one,) = [f for f in self.examined(partition).findings if f.subject == subject]
        return one


def refusal(words, returncode=1):
    return Output(stdout="", stderr=words, returncode=returncode)


# ---------------------------------------------------------------- Slurm


@pytest.mark.parametrize("config", [CONFIG_22_05, CONFIG_26_05], ids=["22.05", "26.05"])
def test_a_cluster_as_it_should_be(config):
    examination = Slurm(config).examined()
    assert [one for one in examination.findings if one.level is not Level.OK] == []
    assert not [one for one in examination.findings if one.fix]
    assert {one.subject: one.found for one in examination.findings} == {
        "commands": "all there",
        "release": config.partition("VERSION           = ")[2].split()[0],
        "JobRequeue": "1",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "notice signal": "on",
        "KillWait": "5 s",
        "MaxBatchRequeue": "5"
        if config == CONFIG_26_05
        else "not shown by this release; 5 is built in",
        "SlurmdTimeout": "300 s",
        "partition spot": "up, 4 nodes",
        "PreemptMode of spot": "REQUEUE",
        "GraceTime of spot": "15 s",
        "preemptor of spot": "ondemand (tier 10, above 1)",
        "submission to spot": "sbatch takes a job that may be requeued",
        "scontrol requeue": "the owner of a job submitted with --requeue may",
        "accounting": "sacct answers (accounting_storage/slurmdbd)",
    }


def test_nothing_is_submitted_or_changed():
    slurm = Slurm()
    slurm.examined()
    assert [argv for argv in slurm.asked if argv[0] not in {"scontrol", "sacct"}] == [
        [
            *("sbatch", "--test-only", "--requeue", "--partition=spot", "--nodes=1", "--time=1"),
            *("--wrap", "true"),
        ]
    ]
    assert {argv[-2] for argv in slurm.asked if argv[0] == "scontrol"} == {"show"}


@pytest.mark.parametrize(
    ("change", "subject", "level", "found", "fix"),
    [
        (
            ("JobRequeue              = 1", "JobRequeue              = 0"),
            "JobRequeue",
            "warning",
            "0",
            "set JobRequeue=1 in /scratch/site/slurm.conf, then `scontrol reconfigure`",
        ),
        (
            ("preempt/partition_prio", "(null)"),
            "PreemptType",
            "problem",
            "none",
            "set PreemptType=preempt/partition_prio",
        ),
        (
            ("preempt/partition_prio", "preempt/none"),
            "PreemptType",
            "problem",
            "preempt/none",
            "set PreemptType",
        ),
        (
            ("preempt/partition_prio", "preempt/qos"),
            "PreemptType",
            "warning",
            "preempt/qos",
            "sacctmgr show qos",
        ),
        (
            ("preempt/partition_prio", "preempt/qos"),
            "GraceTime of spot",
            "warning",
            "cannot be told: the QOS of a job decides, not 15",
            "sacctmgr show qos",
        ),
        (
            ("preempt/partition_prio", "preempt/qos"),
            "PreemptMode of spot",
            "warning",
            "cannot be told: the QOS of a job decides, not REQUEUE",
            "sacctmgr show qos",
        ),
        (("= REQUEUE", "= OFF"), "PreemptMode", "problem", "OFF", "set PreemptMode=REQUEUE in"),
        (
            ("= REQUEUE", "= CANCEL"),
            "PreemptMode",
            "ok",
            "CANCEL",
            "",
        ),
        (
            ("= REQUEUE", "= GANG,SUSPEND"),
            "PreemptMode",
            "ok",
            "GANG,SUSPEND",
            "",
        ),
        (("= REQUEUE", "= GANG,REQUEUE"), "PreemptMode", "ok", "GANG,REQUEUE", ""),
        (
            ("PreemptMode=REQUEUE", "PreemptMode=OFF"),
            "PreemptMode of spot",
            "problem",
            "OFF",
            "set PreemptMode=REQUEUE in the line PartitionName=spot in /scratch/site/slurm.conf",
        ),
        (
            ("PreemptMode=REQUEUE", "PreemptMode=CANCEL"),
            "PreemptMode of spot",
            "problem",
            "CANCEL",
            "PartitionName=spot",
        ),
        (
            ("GraceTime=15", "GraceTime=0"),
            "GraceTime of spot",
            "problem",
            "0 s",
            "set GraceTime=120",
        ),
        (
            ("GraceTime=15", "GraceTime=5"),
            "GraceTime of spot",
            "warning",
            "5 s",
            "set GraceTime=120",
        ),
        (("= 5 sec", "= 2 sec"), "KillWait", "warning", "2 s", "set KillWait=30"),
        (("= 300 sec", "= 900 sec"), "SlurmdTimeout", "warning", "900 s", "set SlurmdTimeout=300"),
        (
            ("= 300 sec", "= 0 sec"),
            "SlurmdTimeout",
            "warning",
            "0, which is never",
            "SlurmdTimeout=300",
        ),
        (("22.05.8", "21.08.1"), "release", "warning", "21.08.1", "slurmspot inject"),
        (("22.05.8", "27.05.0-rc1"), "release", "warning", "27.05.0-rc1", "slurmspot inject"),
        (
            ("State=UP", "State=DOWN"),
            "partition spot",
            "problem",
            "its state is DOWN",
            "scontrol update PartitionName=spot State=UP",
        ),
        (
            ("TotalNodes=4", "TotalNodes=0"),
            "partition spot",
            "problem",
            "it has no nodes",
            "set Nodes=",
        ),
        (
            ("PriorityTier=10", "PriorityTier=1"),
            "preemptor of spot",
            "warning",
            "no partition of a higher tier shares its nodes",
            "a higher PriorityTier",
        ),
        (
            ("PartitionName=spot", "PartitionName=other"),
            "partition spot",
            "problem",
            "there is none; there are: ondemand, other",
            "choose one with --partition, or add PartitionName=spot to /scratch/site/slurm.conf",
        ),
        (
            ("JobSubmitPlugins        = (null)", "JobSubmitPlugins        = lua"),
            "scontrol requeue",
            "warning",
            "cannot be told: JobSubmitPlugins=lua may take --requeue off a job",
            "Requeue=1 in `scontrol show job`",
        ),
    ],
)
def test_a_setting_that_is_not_as_it_should_be(change, subject, level, found, fix):
    assert change[0] in CONFIG_22_05 + PARTITIONS
    slurm = Slurm(CONFIG_22_05.replace(*change), PARTITIONS.replace(*change))
    one = slurm.found(subject)
    assert (one.level, one.found) == (level, found)
    assert fix in one.fix
    assert bool(one.fix) == (level != "ok")
    assert one.why


def test_a_higher_tier_on_other_nodes_preempts_nobody_here():
    elsewhere = PARTITIONS.replace("Nodes=node[0-3]", "Nodes=other[0-3]", 1)
    assert Slurm(partitions=elsewhere).found("preemptor of spot").level == "warning"
    some = PARTITIONS.replace("Nodes=node[0-3]", "Nodes=other[0-3],node3", 1)
    assert Slurm(partitions=some).found("preemptor of spot").level == "ok"


def without_signal(config):
    return config.replace("preempt_send_user_signal,", "")


def test_the_notice_signal_is_spelt_as_the_release_spells_it():
    """Which it is shows in whether the release has PreemptParameters at all."""
    old, new = (
        Slurm(without_signal(c)).found("notice signal") for c in (CONFIG_22_05, CONFIG_26_05)
    )
    assert (old.level, old.found, new.level, new.found) == ("warning", "off", "warning", "off")
    assert "set SlurmctldParameters=preempt_send_user_signal" in old.fix
    assert "set PreemptParameters=send_user_signal" in new.fix
    other = without_signal(CONFIG_26_05)
    spelt = other.replace(
        "PreemptParameters       = (null)", "PreemptParameters       = send_user_signal"
    )
    assert Slurm(spelt).found("notice signal").level == "ok"


def test_the_window_is_what_the_first_signal_leaves():
    def window(config, partitions=PARTITIONS):
        return Cluster.read(config, partitions).window_s("spot")

    assert window(CONFIG_22_05) == 15
    assert window(without_signal(CONFIG_22_05)) == 5
    assert window(CONFIG_22_05, PARTITIONS.replace("GraceTime=15", "GraceTime=0")) == 5
    assert window(CONFIG_22_05.replace("/partition_prio", "/qos")) == 5
    assert window("", "") == 30


SUBJECTS = {
    "AccountingStorageType": "accounting",
    "JobRequeue": "JobRequeue",
    "KillWait": "KillWait",
    "MaxBatchRequeue": "MaxBatchRequeue",
    "PreemptMode": "PreemptMode",
    "PreemptType": "PreemptType",
    "SLURM_VERSION": "release",
    "SlurmdTimeout": "SlurmdTimeout",
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_an_odd_value_cannot_be_told(name):
    odd = re.sub(rf"^({name} *=).*", r"\1 ~~", CONFIG_26_05, flags=re.MULTILINE)
    assert odd != CONFIG_26_05
    one = Slurm(odd).found(SUBJECTS[name])
    if name == "AccountingStorageType":
        assert one.found == "sacct answers (~~)"
    else:
        assert (one.level, one.found[:15]) == ("warning", "cannot be told:")


@pytest.mark.parametrize("name", [*SUBJECTS, "SlurmctldParameters"])
def test_a_value_that_is_missing_cannot_be_told(name):
    without = re.sub(rf"^{name} *=.*\n", "", CONFIG_22_05, flags=re.MULTILINE)
    one = Slurm(without).found(SUBJECTS.get(name, "notice signal"))
    if name == "MaxBatchRequeue":
        assert (one.level, without) == ("ok", CONFIG_22_05)
    elif name == "AccountingStorageType":
        assert one.found == "sacct answers (of unknown kind)"
    else:
        assert (one.level, one.found[:15]) == ("warning", "cannot be told:")


@pytest.mark.parametrize("name", ["GraceTime", "PreemptMode", "PriorityTier", "Nodes"])
@pytest.mark.parametrize("value", ["", "=~~[0-", "=UNLIMITED"])
def test_an_odd_partition_cannot_be_told(name, value):
    spot = PARTITIONS.index("PartitionName=spot")
    odd = PARTITIONS[:spot] + re.sub(rf" {name}=\S+", f" {name}{value}", PARTITIONS[spot:])
    subject = {"PriorityTier": "preemptor", "Nodes": "preemptor"}.get(name, name)
    one = Slurm(partitions=odd).found(f"{subject} of spot")
    assert one.level == "warning"
    assert "cannot be told" in one.found or (name, one.found[:12]) == ("Nodes", "no partition")


line = st.sampled_from([*CONFIG_26_05.splitlines(), *PARTITIONS.splitlines(), "=", " = ", "A="])


@given(st.lists(line | st.text(max_size=40)), st.lists(line | st.text(max_size=40)))
def test_whatever_slurm_prints_is_no_traceback(config, partitions):
    cluster = Cluster.read("\n".join(config), "\n".join(partitions))
    found = [*fitness.settings(cluster, "spot"), *fitness.of_partition(cluster, "spot")]
    assert all(one.found and one.why for one in found)
    assert cluster.window_s("spot") >= 0


def test_slurm_that_does_not_answer():
    down = "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"
    for answer, words in (
        (refusal(down), "Slurm's controller does not answer"),
        (NoSlurmError("scontrol is not on PATH", fix="load it"), "scontrol is not on PATH"),
    ):
        examination = Slurm(show_config=answer).examined()
        assert examination.cluster is None
        commands, slurm = examination.findings
        assert (slurm.subject, slurm.level) == ("Slurm", "problem")
        assert words in slurm.found
        assert commands.subject == "commands"


def test_slurm_that_refuses_to_show_its_settings():
    denied = refusal("slurm_load_ctl_conf error: Access/permission denied")
    examination = Slurm(show_config=denied).examined()
    assert examination.cluster is not None
    first = examination.findings[1]
    assert first.subject == "`scontrol show config`"
    assert first.found == ("cannot be told: slurm_load_ctl_conf error: Access/permission denied")
    told = {one.subject: one.level for one in examination.findings}
    assert told["PreemptMode of spot"] == told["GraceTime of spot"] == "ok"
    assert told["JobRequeue"] == told["scontrol requeue"] == "warning"


def test_commands_that_are_missing():
    paths = dict.fromkeys(("scontrol", "sbatch", "srun", "scancel", "sacct", "sacctmgr"), "/bin/x")
    for name, level in (("srun", "problem"), ("sacct", "warning")):
        one = fitness.commands({**paths, name: None})
        assert (one.level, one.found) == (level, f"missing: {name}")
    assert fitness.commands(paths).level == "ok"


def test_a_job_that_sbatch_would_not_take():
    words = "sbatch: error: invalid partition specified\nallocation failure: Invalid account\n"
    one = Slurm(**{"--test-only": refusal(words)}).found("submission to spot")
    assert (one.level, one.found) == ("warning", "refused: allocation failure: Invalid account")
    assert Slurm(**{"--test-only": refusal("")}).found("submission to spot").found == (
        "refused: no reason given"
    )
    missing = Slurm(**{"--test-only": NoSlurmError("sbatch is not on PATH")})
    assert missing.found("submission to spot").found == "refused: sbatch is not on PATH"


def test_a_partition_that_does_not_exist_is_not_submitted_to():
    slurm = Slurm()
    slurm.examined("nope")
    assert not any("--test-only" in argv for argv in slurm.asked)


@pytest.mark.parametrize(
    ("kind", "answer", "level", "found"),
    [
        (
            *("", SlurmError("no accounts", why="Slurm accounting storage is disabled"), "warning"),
            "none is kept: Slurm accounting storage is disabled",
        ),
        (
            "accounting_storage/slurmdbd",
            SlurmUnreachableError("does not answer", why="Connection refused"),
            *("problem", "sacct gets no answer: Connection refused"),
        ),
        (
            *("accounting_storage/slurmdbd", SlurmError("sacct refused"), "warning"),
            "cannot be told: sacct refused",
        ),
    ],
)
def test_accounts_that_cannot_be_read(kind, answer, level, found):
    one = fitness.accounting(kind, answer, "slurm.conf")
    assert (one.level, one.found) == (level, found)
    assert one.fix


def test_a_dead_slurmdbd_is_seen_through_sacct():
    dead = refusal(
        "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection "
        "to host:127.0.0.1:16819: Connection refused\n"
        "sacct: error: Problem talking to the database: Connection refused\n"
    )
    one = Slurm(**{"--format=JobID": dead}).found("accounting")
    assert one.level == "problem"
    assert "Problem talking to the database" in one.found


# ---------------------------------------------------------------- storage

MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 0:40 / /home rw,relatime shared:5 - nfs4 server:/home rw,vers=4.2
32 27 0:41 / /scratch/with\\040blank rw - lustre mds@tcp:/fs rw
33 27 0:42 / /hidden rw - xfs /dev/sdb rw
34 33 0:43 / /hidden rw - tmpfs tmpfs rw
35 27 0:44 / /fuse rw - fuse.something x rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "type_", "kind"),
    [
        ("/home/ann/run", "nfs4", Kind.NETWORK),
        ("/home", "nfs4", Kind.NETWORK),
        ("/homes/ann", "ext4", Kind.ONE_NODE),
        ("/scratch/with blank/run", "lustre", Kind.NETWORK),
        ("/hidden/run", "tmpfs", Kind.MEMORY),
        ("/fuse/run", "fuse.something", Kind.UNKNOWN),
    ],
)
def test_what_a_path_is_mounted_from(path, type_, kind):
    mount = filesystem.mount_of(Path(path), MOUNTINFO)
    assert (mount.type, mount.kind) == (type_, kind)


def test_a_path_without_a_mount():
    assert filesystem.mount_of(Path("/x"), "nothing\n") is None
    assert filesystem.mounted(Path("/")) is not None


def mount(type_):
    return Mount(point="/", type=type_)


@pytest.mark.parametrize(
    ("type_", "shared", "own"),
    [
        ("nfs4", "ok", "warning"),
        ("ext4", "warning", "ok"),
        ("overlay", "warning", "ok"),
        ("tmpfs", "warning", "warning"),
        ("fuse.something", "warning", "warning"),
    ],
)
def test_a_file_system_is_good_for_one_thing_or_the_other(type_, shared, own):
    path = Path("/x")
    assert filesystem.shared("run folder", path, mount(type_), why="so").level == shared
    assert filesystem.own("local tier", path, mount(type_)).level == own


def test_a_file_system_of_no_known_type_cannot_be_told():
    for one in (
        filesystem.shared("x", Path("/x"), mount("fuse.y"), why="so"),
        filesystem.shared("x", Path("/x"), None, why="so"),
        filesystem.own("x", Path("/x"), None),
    ):
        assert one.found.startswith("cannot be told: /x: ")


def test_a_folder_is_tried_out_and_left_as_it_was(tmp_path):
    assert filesystem.try_out(tmp_path) is None
    speed = filesystem.measure(tmp_path, 3 << 20)
    assert speed.size_bytes == 3 << 20
    assert speed.seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_system_refuses_is_named(tmp_path):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    refused = filesystem.try_out(tmp_path, sync=fail)
    assert refused == Refusal(operation="fsync a file", reason="Input/output error")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for folder, reason in ((Path("/proc"), "No such file"), (tmp_path / "file", "Not a directory")):
        refused = filesystem.try_out(folder)
        assert refused.operation == "make a folder in it"
        assert refused.reason.startswith(reason)
    found = filesystem.commits("run folder", refused)
    assert (found.level, found.found) == (
        "problem",
        "cannot make a folder in it: Not a directory",
    )


class Full(Disk):
    """A disk, or a quota, that is used up."""

    def write(self, fd, memory, offset):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path):
    refused = filesystem.measure(tmp_path, 1 << 20, disk=Full())
    assert refused == Refusal(operation="write 1 MiB", reason="Disk quota exceeded")
    assert list(tmp_path.iterdir()) == []
    one = filesystem.pace("run folder", refused, 15, None)
    assert (one.level, one.found) == ("problem", "cannot write 1 MiB: Disk quota exceeded")


def test_the_rate_includes_the_fsync(tmp_path):
    times = iter([10**9, 3 * 10**9])
    speed = filesystem.measure(tmp_path, 1 << 20, clock=Clock(mono_ns=lambda: next(times)))
    assert (speed.seconds, speed.bytes_per_s) == (2.0, float(1 << 19))


def at(mib_per_s):
    return Speed(size_bytes=mib_per_s << 20, seconds=1.0, direct=True)


@pytest.mark.parametrize(
    ("rate", "window_s", "largest_mib", "level", "why"),
    [
        (100, 15, None, "ok", "in 15 s a rank saves up to 750 MiB, with a margin of 2"),
        (49, 15, None, "warning", "in 15 s a rank saves up to 368 MiB"),
        (100, 15, 750, "ok", "up to 750 MiB"),
        (100, 15, 751, "warning", "up to 750 MiB"),
        (100, 15, 1501, "problem", "every preemption costs steps"),
        (10, 15, 70, "ok", "up to 75 MiB"),
        (100, None, None, "ok", "how often one can save"),
        (10, None, None, "warning", "how often one can save"),
    ],
)
def test_what_a_rate_means_for_the_window(rate, window_s, largest_mib, level, why):
    size = None if largest_mib is None else largest_mib << 20
    checkpoint = None if size is None else Checkpoint(size_bytes=4 * size, largest_bytes=size)
    one = filesystem.pace("run folder", at(rate), window_s, checkpoint)
    assert one.level == level
    assert why in one.why
    assert f"{rate} MiB/s by one writer" in one.found


def test_a_window_that_is_too_short_is_told_how_long_it_should_be():
    large = Checkpoint(size_bytes=8 << 30, largest_bytes=2 << 30)
    one = filesystem.pace("run folder", at(64), 15, large)
    assert one.fix.startswith("a GraceTime of 64 s or more")


@pytest.mark.parametrize(
    ("free", "size", "level"),
    [
        (None, None, "warning"),
        (9 << 30, None, "warning"),
        (11 << 30, None, "ok"),
        (9 << 30, 8 << 30, "ok"),
        (9 << 30, 10 << 30, "problem"),
    ],
)
def test_room_is_counted_in_checkpoints(free, size, level):
    checkpoint = None if size is None else Checkpoint(size_bytes=size, largest_bytes=size)
    assert filesystem.space("run folder", free, checkpoint).level == level


def test_the_newest_checkpoint_tells_how_large_one_is(tmp_path):
    assert filesystem.newest_checkpoint(tmp_path / "none") is None
    for step, sizes in ((1, (1, 1)), (2, (10, 30))):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        for rank, size in enumerate(sizes):
            (folder / f"rank-{rank:05d}.h5").write_bytes(b"x" * size)
    (tmp_path / "step-00000003.partial-0").mkdir()
    assert filesystem.newest_checkpoint(tmp_path) == Checkpoint(size_bytes=40, largest_bytes=30)


def test_direct_io_is_told_where_something_was_written():
    (yes,) = filesystem.direct_io("x", at(1))
    (no,) = filesystem.direct_io("x", Speed(size_bytes=1, seconds=1, direct=False))
    assert (yes.found, no.found, no.level) == ("yes", "no: through the page cache", "ok")
    assert list(filesystem.direct_io("x", Refusal(operation="write", reason="full"))) == []


def test_a_run_folder_that_does_not_exist_is_judged_by_where_it_would_be(tmp_path):
    found = {one.subject: one for one in doctor.run_storage(tmp_path / "a" / "b", window_s=15)}
    assert list(found) == [
        "run folder",
        *(f"run folder: {what}" for what in ("commit", "free space", "direct I/O", "speed")),
    ]
    assert str(tmp_path) in found["run folder"].found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_not_measured():
    subjects = [one.subject for one in doctor.run_storage(Path("/proc/run"), window_s=15)]
    assert subjects == ["run folder", "run folder: commit", "run folder: free space"]


def test_a_local_tier_is_missing_for_sure_only_on_a_node(tmp_path):
    def found(name, job_id="local"):
        job = JobEnvironment(local=name and f"{tmp_path}/{name}", host="n1", job_id=job_id)
        return list(doctor.local_storage(job))

    (on_login,), (on_node,) = found("{node}"), found("{node}", "7_0")
    assert (on_login.level, on_node.level) == ("warning", "problem")
    assert on_node.found == f"there is no folder {tmp_path}/n1"
    assert f"srun slurmspot doctor --local '{tmp_path}/{{node}}'" in on_login.fix
    assert found("") == []
    (tmp_path / "n1").mkdir()
    subjects = [one.subject for one in found("{node}")]
    assert subjects[0] == "local tier"
    assert subjects[-1] == "local tier: speed"


# ---------------------------------------------------------------- Python


class Module:
    def __init__(self, version):
        self.__version__ = version


def test_a_package_that_is_missing_broken_or_old():
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    def package(find, least="2.5", name="no-such-package"):
        return doctor.package(name, extra="[train]", least=least, find=find)

    assert package(missing).found == "cannot be imported: No module named 'no-such-package'"
    assert package(broken).found.endswith("cannot open shared object file")
    assert package(broken).level == "problem"
    assert "pip install 'slurmspot[train]'" in package(missing).fix
    old = package(lambda _: Module("2.4.1+cu121"))
    assert (old.level, old.found) == ("problem", "2.4.1+cu121 is older than 2.5")
    assert package(lambda _: Module("2.13.0")).level == "ok"
    assert package(lambda _: Module("2.4.1"), least="").level == "ok"
    assert package(lambda _: Module("unknown")).found == "cannot be told: unknown is told"
    assert package(lambda _: object()).found == "cannot be told: no version is told"


def test_this_environment_is_fit():
    found = {one.subject: one for one in doctor.environment(find=__import__)}
    for name in ("torch", "h5py", "numpy", "submitit", "xxhash"):
        assert found[name].level == "ok", found[name]
    assert sys.prefix in found["python"].found


def test_least_versions_are_the_packages_own():
    lines = ["click>=8.1", "torch>=2.5; extra == 'train'", "pyslurm ; extra == 'pyslurm'"]
    assert doctor.least_versions(lines) == {"click": "8.1", "torch": "2.5"}


@pytest.mark.parametrize(
    ("installed", "cluster", "level"),
    [
        ("22.5.3", "22.05.8", "ok"),
        ("24.11.0", "22.05.8", "warning"),
        ("24.11.0", "", "warning"),
        ("dev", "22.05.8", "warning"),
    ],
)
def test_pyslurm_is_for_one_release(installed, cluster, level):
    assert doctor.pyslurm(installed, cluster).level == level


# ---------------------------------------------------------------- all of it


def nothing_is_wrong(_):
    return Module("99.0")


@pytest.mark.parametrize(
    ("slurm", "code"),
    [
        (Slurm(), 0),
        (Slurm(partitions=PARTITIONS.replace("GraceTime=15", "GraceTime=0")), 1),
        (Slurm(show_config=NoSlurmError("scontrol is not on PATH")), 4),
    ],
    ids=["fit", "problem", "no Slurm"],
)
def test_the_exit_code(tmp_path, slurm, code, monkeypatch):
    monkeypatch.setattr(fitness.shutil, "which", lambda name: name)
    job = JobEnvironment(run=tmp_path)
    found = doctor.diagnose("spot", job, runner=slurm, find=nothing_is_wrong)
    assert found.exit_code == code
    assert found.fit == (code == 0)
    assert found.python
    assert [one.subject for one in found.storage][-1] == "run folder: speed"


def call(*argv, **env):
    return subprocess.run(
        [sys.executable, "-m", "slurmspot", "doctor", *map(str, argv)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )


def test_without_slurm_all_else_is_still_looked_at(tmp_path):
    done = call("--run", tmp_path / "run", "--local", tmp_path, PATH=str(tmp_path))
    assert done.returncode == 4, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["STATE", "LOOKED", "AT", "FOUND"]
    assert any(
        re.match(r"problem +Slurm +scontrol is not on PATH .*; do: run this", x) for x in lines
    )
    for subject in ("torch", "run folder: commit", "local tier: speed"):
        assert any(re.match(rf"ok +{subject} ", x) for x in lines), subject
    assert len(lines) == len({line[:30] for line in lines})  # one line each


def test_the_same_as_json(tmp_path):
    done = call("--run", tmp_path, "--json", PATH=str(tmp_path))
    document = json.loads(done.stdout)
    assert (document["schema_version"], document["slurm_reached"]) == (1, False)
    assert document["fit"] is False
    assert document["slurm"][-1]["subject"] == "Slurm"
    assert set(document["storage"][0]) == {"subject", "level", "found", "why", "fix"}
    assert {one["level"] for one in document["python"]} <= {"ok", "warning", "problem"}


def test_a_relative_local_folder_is_refused():
    done = call("--local", "nvme")
    assert done.returncode == 2
    assert "is not an absolute path" in done.stderr


def test_help_loads_nothing_heavy():
    script = (
        "import sys, slurmspot.cli\n"
        "try: slurmspot.cli.main(['doctor', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'numpy', 'h5py', 'submitit'} "
        "& sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_line_of_the_administrators_page_is_one_of_doctor_s(tmp_path):
    page = (ROOT / "docs" / "administrators.md").read_text()
    named = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", page, re.MULTILINE)
    found = doctor.diagnose(
        "spot", JobEnvironment(run=tmp_path), runner=Slurm(), find=nothing_is_wrong
    )
    subjects = {one.subject for one in found.findings}
    assert len(named) > 15
    assert set(named) <= subjects
    assert subjects - set(named) == {
        *("commands", "release", "partition spot"),
        *("torch", "h5py", "numpy", "submitit", "xxhash"),
    }
