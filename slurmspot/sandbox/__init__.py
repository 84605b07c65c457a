"""A private, real Slurm cluster on this machine."""

from slurmspot.sandbox.cluster import Sandbox, Status
from slurmspot.sandbox.spec import Spec

__all__ = ["Sandbox", "Spec", "Status"]
