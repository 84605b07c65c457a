"""The programs a sandbox is made of: where they are, and what the installed release understands."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from slurmspot.cluster import command
from slurmspot.errors import SlurmUnreachableError
from slurmspot.sandbox.config import Features

# Program: the Debian package it comes from.
_PACKAGES = {
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "sacctmgr": "slurm-client",
    "scontrol": "slurm-client",
    "setsid": "util-linux",
}
# What the programs above load, but Debian's dependencies do not all bring.
_PLUGINS = ("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin")


def search_path() -> str:
    """``PATH`` with the places where daemons lie, which an ordinary user's often leaves out."""
    own = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([own, "/usr/local/sbin", "/usr/sbin", "/sbin"])


def find(path: str | None = None) -> dict[str, str]:
    """The full path of every program, looked for along ``path``, by default :func:`search_path`.

    Raises:
        SlurmUnreachableError: some are not installed; ``fix`` is the command that installs them.
    """
    found = {name: shutil.which(name, path=path or search_path()) for name in _PACKAGES}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        packages = sorted({_PACKAGES[name] for name in missing} | set(_PLUGINS))
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise SlurmUnreachableError(
            "the sandbox needs Slurm, munge and MariaDB",
            why=f"not installed: {', '.join(missing)}",
            fix=f"{sudo}apt-get install --no-install-recommends {' '.join(packages)}",
        )
    return {name: path for name, path in found.items() if path is not None}


def features(programs: dict[str, str], host: str) -> Features:
    """Ask the installed release what it understands, on configurations of one node."""
    with tempfile.TemporaryDirectory(prefix="slurmspot-probe-") as name:
        folder = Path(name)
        base = (
            f"ClusterName=probe\nSlurmctldHost={host}(127.0.0.1)\nSlurmdSpoolDir={folder}\n"
            f"SlurmdLogFile={folder}/log\nProctrackType=proctrack/linuxproc\n"
            "NodeName=probe NodeAddr=127.0.0.1\nPartitionName=probe Nodes=probe\n"
        )
        log, conf, keyed = folder / "log", folder / "slurm.conf", folder / "keyed.conf"
        conf.write_text(base)
        keyed.write_text(base + "PreemptParameters=send_user_signal\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        log.touch()
        gres = command.run(["env", f"SLURM_CONF={conf}", programs["slurmd"], "-G", "-N", "probe"])
        refusal = "cgroup plugin for disabled"
        hostnames = command.run(
            ["env", f"SLURM_CONF={keyed}", programs["scontrol"], "show", "hostnames", "probe"]
        )
        return Features(
            cgroup_disabled=refusal not in log.read_text() + gres.stdout + gres.stderr,
            preempt_parameters=hostnames.returncode == 0,
        )
