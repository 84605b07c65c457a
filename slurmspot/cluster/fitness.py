"""Whether a cluster is fit for spot jobs, by what Slurm says of itself before one is submitted.

Everything but :func:`examine` is a function of what Slurm's commands print. A value that is
missing or cannot be understood is a finding, too. Settings: slurm.conf(5).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from slurmspot.cluster import sacct
from slurmspot.cluster.command import Output, Runner, checked, run
from slurmspot.cluster.scontrol import fields
from slurmspot.errors import SlurmError, SlurmUnreachableError
from slurmspot.findings import Finding, ok, problem, untold, warning
from slurmspot.hostlist import expand
from slurmspot.settings import DEFAULT_KILL_WAIT_S

_NEEDED = ("scontrol", "sbatch", "srun", "scancel")
_USEFUL = ("sacct", "sacctmgr")
_OLDEST, _NEWEST = (22, 5), (26, 5)  # what the tests run on
_SHORT_GRACE_S = 10  # a step, a snapshot and an fsync
_SHORT_KILL_WAIT_S = 5  # the sandbox's: what the tests show to be enough for the requeue
_USUAL_SILENCE_S = 300  # Slurm's own default of SlurmdTimeout
_BY_QOS = "preempt/qos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What Slurm says of itself.

    Attributes:
        config: ``scontrol show config``; what is ``(null)`` there is empty.
        partitions: the fields of each partition, by its name.
    """

    config: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, config: str, partitions: str) -> Cluster:
        """From the text of ``scontrol show config`` and ``--oneliner show partition``."""
        pairs = re.findall(r"^([A-Za-z_][\w\[\]]*) *= ?(.*?) *$", config, re.MULTILINE)
        lines = [line for line in partitions.splitlines() if line.startswith("PartitionName=")]
        records = map(fields, lines)
        return cls(
            config={name: "" if value == "(null)" else value for name, value in pairs},
            partitions={one["PartitionName"]: one for one in records},
        )

    @property
    def version(self) -> str:
        """The controller's release, such as ``22.05.8``; empty if it does not say."""
        return self.config.get("SLURM_VERSION", "")

    @property
    def conf(self) -> str:
        """Where the controller's settings stand."""
        return self.config.get("SLURM_CONF") or "slurm.conf"

    @property
    def sends_user_signal(self) -> bool:
        """Whether a preempted job gets the signal that it asked for by ``--signal``.

        Releases that know PreemptParameters still heed the older spelling.
        """
        older = _words(self.config.get("SlurmctldParameters", ""))
        newer = _words(self.config.get("PreemptParameters", ""))
        return "preempt_send_user_signal" in older or "send_user_signal" in newer

    def window_s(self, partition: str) -> float:
        """Seconds that a preemption in ``partition`` leaves a run for its last checkpoint."""
        grace_s = _whole(self.partitions.get(partition, {}).get("GraceTime"))
        if self.sends_user_signal and grace_s and self.config.get("PreemptType") != _BY_QOS:
            return grace_s
        kill_wait_s = _whole(self.config.get("KillWait"))
        return DEFAULT_KILL_WAIT_S if kill_wait_s is None else kill_wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a look at the cluster gave.

    Attributes:
        cluster: what Slurm said; None if it was not reached.
    """

    findings: tuple[Finding, ...]
    cluster: Cluster | None


def examine(
    partition: str, *, runner: Runner = run, which: Callable[[str], str | None] = shutil.which
) -> Examination:
    """Ask the cluster all that matters to a spot job in ``partition``. Submits nothing."""
    found = [commands({name: which(name) for name in (*_NEEDED, *_USEFUL)})]
    texts = []
    for argv in (
        ("scontrol", "show", "config"),
        ("scontrol", "--all", "--oneliner", "show", "partition"),
    ):
        try:
            texts.append(checked(runner, argv))
        except SlurmUnreachableError as error:
            found.append(_unreachable(error))
            return Examination(findings=tuple(found), cluster=None)
        except SlurmError as error:
            found.append(_refused(" ".join(argv), error))
            texts.append("")
    config, partitions = texts
    cluster = Cluster.read(config, partitions)
    found += [*settings(cluster, partition), *of_partition(cluster, partition)]
    if partition in cluster.partitions:
        found.append(_submission(partition, runner))
    found += [requeue_right(cluster), _accounting(cluster, runner)]
    return Examination(findings=tuple(found), cluster=cluster)


def commands(paths: Mapping[str, str | None]) -> Finding:
    """Whether Slurm's commands are on ``PATH``; ``paths`` has None for those that are not."""
    subject, fix = "commands", "run this on a login node, or load Slurm's module"
    if missing := [name for name in _NEEDED if not paths.get(name)]:
        why = "a run is submitted, watched and requeued by them"
        return problem(subject, f"missing: {', '.join(missing)}", why, fix)
    if missing := [name for name in _USEFUL if not paths.get(name)]:
        why = "timelines and bills are read from the accounts by them"
        return warning(subject, f"missing: {', '.join(missing)}", why, fix)
    return ok(subject, "all there", "a run is submitted, watched and requeued by them")


def settings(cluster: Cluster, partition: str) -> Iterator[Finding]:
    """What is set for the cluster as a whole, for jobs in ``partition``."""
    own = cluster.partitions.get(partition, {}).get("PreemptMode", "")
    yield _release(cluster)
    yield _job_requeue(cluster)
    yield _preempt_type(cluster)
    yield _preempt_mode(cluster, own)
    yield _notice_signal(cluster)
    yield _kill_wait(cluster)
    yield _batch_requeues(cluster)
    yield _silence(cluster)


def of_partition(cluster: Cluster, name: str) -> Iterator[Finding]:
    """What is set for the partition ``name``."""
    record = cluster.partitions.get(name)
    if record is None:
        known = ", ".join(cluster.partitions) or "none"
        yield problem(
            f"partition {name}",
            f"there is none; there are: {known}",
            "it is where spot jobs are submitted to",
            f"choose one with --partition, or add PartitionName={name} to {cluster.conf}",
        )
        return
    yield _state(cluster, name, record)
    yield _mode_of(cluster, name, record)
    yield _grace(cluster, name, record)
    yield _preemptors(cluster, name, record)


def accounting(kind: str | None, answer: SlurmError | None, conf: str) -> Finding:
    """Whether past attempts can be told from the accounts.

    Args:
        kind: AccountingStorageType; None if it is not known.
        answer: the error that sacct ended with; None if it answered.
    """
    subject, why = "accounting", "timelines, bills and studies are made from it"
    fix = f"set AccountingStorageType=accounting_storage/slurmdbd in {conf}, and run slurmdbd"
    if answer is None:
        return ok(subject, f"sacct answers ({kind or 'of unknown kind'})", why)
    words = answer.why or answer.what
    if kind in {"", "accounting_storage/none"}:
        return warning(subject, f"none is kept: {words}", why, fix)
    if isinstance(answer, SlurmUnreachableError):
        fix = "start slurmdbd and its database; `sacctmgr ping` tells whether it answers"
        return problem(subject, f"sacct gets no answer: {words}", why, fix)
    return untold(subject, words, why, "see what `sacct` says")


def submission(partition: str, output: Output) -> Finding:
    """Whether ``sbatch --test-only`` would take a job that may be requeued."""
    subject = f"submission to {partition}"
    why = "account, limits and groups decide who may submit"
    lines = [line for line in output.stderr.strip().splitlines() if line.strip()]
    if output.returncode == 0:
        return ok(subject, "sbatch takes a job that may be requeued", why)
    words = lines[-1].strip() if lines else "no reason given"
    fix = "launch with what it wants: --account, --qos or GPUs; or ask for the right to submit"
    return warning(subject, f"refused: {words}", why, fix)


def requeue_right(cluster: Cluster) -> Finding:
    """Whether an ordinary user's ``scontrol requeue`` of a job of their own will be heeded."""
    subject, why = "scontrol requeue", "the batch script puts its own job back into the queue by it"
    names = ("JobSubmitPlugins", "CliFilterPlugins")
    plugins = [f"{name}={cluster.config[name]}" for name in names if cluster.config.get(name)]
    if plugins:
        reason = f"{', '.join(plugins)} may take --requeue off a job"
        fix = "submit a job and look for Requeue=1 in `scontrol show job`"
        return untold(subject, reason, why, fix)
    if not cluster.config:
        fix = "submit a job with --requeue and requeue it"
        return untold(subject, "Slurm does not show its settings", why, fix)
    return ok(subject, "the owner of a job submitted with --requeue may", why)


def _unreachable(error: SlurmUnreachableError) -> Finding:
    found = f"{error.what} ({error.why})" if error.why else error.what
    return problem(
        "Slurm", found, "nothing can be said of the cluster", error.fix or "`scontrol ping`"
    )


def _refused(command: str, error: SlurmError) -> Finding:
    why, fix = "settings are read from it", "ask an administrator to run `slurmspot doctor`"
    return untold(f"`{command}`", error.why or error.what, why, error.fix or fix)


def _accounting(cluster: Cluster, runner: Runner) -> Finding:
    answer = None
    now = datetime.now(tz=UTC)
    page = sacct.pages(
        runner,
        user=None,
        partition=None,
        fields=("JobID",),
        since=now - timedelta(seconds=1),
        until=now,
    )
    try:
        next(page)
    except SlurmError as error:
        answer = error
    return accounting(cluster.config.get("AccountingStorageType"), answer, cluster.conf)


def _submission(partition: str, runner: Runner) -> Finding:
    options = ("--test-only", "--requeue", f"--partition={partition}", "--nodes=1", "--time=1")
    try:
        return submission(partition, runner(["sbatch", *options, "--wrap", "true"]))
    except SlurmUnreachableError as error:
        return submission(partition, Output(stdout="", stderr=error.what, returncode=1))


def _release(cluster: Cluster) -> Finding:
    subject = "release"
    found = re.match(r"(\d{2})\.(\d{2})\b", cluster.version)
    if found is None:
        why, fix = "what a job may rely on differs by release", "see `scontrol --version`"
        return untold(subject, f"{cluster.version or 'no version'} was answered", why, fix)
    release = (int(found[1]), int(found[2]))
    if _OLDEST <= release <= _NEWEST:
        return ok(subject, cluster.version, "within 22.05 to 26.05, which are tested")
    why, fix = (
        "22.05 to 26.05 are tested",
        "try it out with `slurmspot inject` before relying on it",
    )
    return warning(subject, cluster.version, why, fix)


def _job_requeue(cluster: Cluster) -> Finding:
    subject, value = "JobRequeue", cluster.config.get("JobRequeue")
    fix = _setting("JobRequeue=1", cluster)
    if value == "1":
        return ok(subject, value, "a job comes back after a preemption or a lost node")
    why = "only jobs submitted with --requeue come back, as those of `launch` and the templates are"
    if value == "0":
        return warning(subject, value, why, fix)
    return untold(subject, _odd(value), why, fix)


def _preempt_type(cluster: Cluster) -> Finding:
    subject, value = "PreemptType", cluster.config.get("PreemptType")
    fix = _setting("PreemptType=preempt/partition_prio and PreemptMode=REQUEUE", cluster)
    if value == "preempt/partition_prio":
        return ok(subject, value, "jobs of a higher PriorityTier preempt those of a lower one")
    if value == _BY_QOS:
        why = "what a QOS says then counts for mode and grace, not the partition"
        return warning(subject, value, why, _LOOK_AT_QOS)
    if value in {"", "preempt/none"}:
        why = "no job is ever preempted for another; at most a cloud takes capacity away"
        return problem(subject, value or "none", why, fix)
    return untold(subject, _odd(value), "it decides which jobs may be preempted", fix)


def _preempt_mode(cluster: Cluster, own: str) -> Finding:
    """The cluster's mode; ``own`` is the partition's, which overrides all but OFF."""
    subject, value = "PreemptMode", cluster.config.get("PreemptMode")
    others = {"CANCEL", "SUSPEND", "GANG"}
    if value and "REQUEUE" in _words(own.upper()) and others >= _words(value.upper()):
        return ok(subject, value, f"of the cluster; the partition has its own, {own}")
    return _mode(subject, value, fix=_setting("PreemptMode=REQUEUE", cluster), by_qos=False)


def _mode_of(cluster: Cluster, name: str, record: Mapping[str, str]) -> Finding:
    return _mode(
        f"PreemptMode of {name}",
        record.get("PreemptMode"),
        fix=_in_partition(name, "PreemptMode=REQUEUE", cluster),
        by_qos=cluster.config.get("PreemptType") == _BY_QOS,
    )


def _mode(subject: str, value: str | None, *, fix: str, by_qos: bool) -> Finding:
    why = "a preempted job goes back into the queue"
    if by_qos:
        return untold(subject, f"the QOS of a job decides, not {value}", why, _LOOK_AT_QOS)
    modes = _words((value or "").upper())
    if "REQUEUE" in modes:
        return ok(subject, str(value), why)
    ends = {
        "OFF": "nothing is preempted",
        "CANCEL": "a preempted job ends for good",
        "SUSPEND": "a preempted job stays on its nodes, stopped",
        "GANG": "jobs take turns and are not preempted",
    }
    for mode, why_not in ends.items():
        if mode in modes:
            return problem(subject, str(value), why_not, fix)
    return untold(subject, _odd(value), why, fix)


def _notice_signal(cluster: Cluster) -> Finding:
    subject = "notice signal"
    newer = "PreemptParameters" in cluster.config
    if cluster.sends_user_signal:
        return ok(subject, "on", "SIGUSR1 comes as soon as the job is preempted")
    setting = (
        "PreemptParameters=send_user_signal"
        if newer
        else "SlurmctldParameters=preempt_send_user_signal"
    )
    why = "the first signal is SIGTERM, of which a run knows only that KillWait is left"
    fix = _setting(f"{setting} (beside what stands there)", cluster)
    if not newer and "SlurmctldParameters" not in cluster.config:
        return untold(subject, "no such parameters are shown", why, fix)
    return warning(subject, "off", why, fix)


def _kill_wait(cluster: Cluster) -> Finding:
    subject, value = "KillWait", cluster.config.get("KillWait")
    seconds = _whole(value)
    why = "from SIGTERM to SIGKILL, in which a job without an earlier notice saves"
    fix = _setting("KillWait=30", cluster)
    if seconds is None:
        return untold(subject, _odd(value), why, fix)
    if seconds < _SHORT_KILL_WAIT_S:
        return warning(subject, f"{seconds} s", f"{why}: too short to requeue in", fix)
    return ok(subject, f"{seconds} s", why)


def _batch_requeues(cluster: Cluster) -> Finding:
    subject, value = "MaxBatchRequeue", cluster.config.get("MaxBatchRequeue")
    why = (
        "a job that merely exits when preempted is held after so many; `scontrol requeue`, as in "
        "`launch` and the templates, does not count, and `watch` releases what is held"
    )
    if value is None:
        return ok(subject, "not shown by this release; 5 is built in", why)
    if _whole(value) is None:
        return untold(subject, _odd(value), why, _setting("MaxBatchRequeue=5", cluster))
    return ok(subject, value, why)


def _silence(cluster: Cluster) -> Finding:
    subject, value = "SlurmdTimeout", cluster.config.get("SlurmdTimeout")
    seconds = _whole(value)
    why = "a job whose node vanished comes back only after it"
    fix = _setting(f"SlurmdTimeout={_USUAL_SILENCE_S}", cluster)
    if seconds is None:
        return untold(subject, _odd(value), why, fix)
    if seconds == 0:
        return warning(subject, "0, which is never", "a vanished node is not noticed", fix)
    if seconds > _USUAL_SILENCE_S:
        return warning(subject, f"{seconds} s", why, fix)
    return ok(subject, f"{seconds} s", why)


def _state(cluster: Cluster, name: str, record: Mapping[str, str]) -> Finding:
    subject, state = f"partition {name}", record.get("State", "")
    total = _whole(record.get("TotalNodes"))
    if state != "UP":
        fix = f"scontrol update PartitionName={name} State=UP"
        return problem(subject, f"its state is {state or 'not told'}", "it starts no job", fix)
    if total == 0:
        fix = _in_partition(name, "Nodes=…", cluster)
        return problem(subject, "it has no nodes", "it starts no job", fix)
    count = "an unknown number of" if total is None else total
    return ok(subject, f"up, {count} nodes", "it is where spot jobs are submitted to")


def _grace(cluster: Cluster, name: str, record: Mapping[str, str]) -> Finding:
    subject, value = f"GraceTime of {name}", record.get("GraceTime")
    why = "from the notice to SIGTERM: in it ranks agree, save and leave"
    fix = _in_partition(name, "GraceTime=120", cluster)
    if cluster.config.get("PreemptType") == _BY_QOS:
        return untold(subject, f"the QOS of a job decides, not {value}", why, _LOOK_AT_QOS)
    seconds = _whole(value)
    if seconds is None:
        return untold(subject, _odd(value), why, fix)
    if seconds == 0:
        return problem(
            subject, "0 s", "no time before SIGTERM: only KillWait is left to save in", fix
        )
    if seconds < _SHORT_GRACE_S:
        return warning(subject, f"{seconds} s", f"{why}; that is little", fix)
    return ok(subject, f"{seconds} s", why)


def _preemptors(cluster: Cluster, name: str, record: Mapping[str, str]) -> Finding:
    subject = f"preemptor of {name}"
    why = "a job there preempts spot jobs, and drills with `inject preempt` need it"
    fix = (
        f"add a partition on the same nodes with a higher PriorityTier to {cluster.conf}, "
        "or pass over this if capacity is taken by a cloud alone"
    )
    tier = _whole(record.get("PriorityTier"))
    nodes = _nodes(record)
    if tier is None or nodes is None:
        return untold(subject, "tier or nodes of the partition are odd", why, fix)
    above = []
    for other, its in cluster.partitions.items():
        its_tier = _whole(its.get("PriorityTier"))
        if its_tier is not None and its_tier > tier and nodes & (_nodes(its) or frozenset()):
            above.append(f"{other} (tier {its_tier}, above {tier})")
    if above:
        return ok(subject, ", ".join(above), why)
    return warning(subject, "no partition of a higher tier shares its nodes", why, fix)


_LOOK_AT_QOS = "look at `sacctmgr show qos format=name,preempt,preemptmode,gracetime`"


def _setting(text: str, cluster: Cluster) -> str:
    return f"set {text} in {cluster.conf}, then `scontrol reconfigure`"


def _in_partition(name: str, text: str, cluster: Cluster) -> str:
    return _setting(f"{text} in the line PartitionName={name}", cluster)


def _whole(text: str | None) -> int | None:
    """The number in ``300 sec`` or ``15``; None if it is none."""
    found = re.fullmatch(r"(\d{1,9})(?: sec)?", (text or "").strip())
    return int(found[1]) if found else None


def _words(text: str) -> set[str]:
    return {word.strip() for word in text.split(",")}


def _nodes(record: Mapping[str, str]) -> frozenset[str] | None:
    try:
        return frozenset(expand(record.get("Nodes", "")))
    except ValueError:
        return None


def _odd(value: str | None) -> str:
    return "Slurm does not show it" if value is None else f"{value!r} is no value known here"
