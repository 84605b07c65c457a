"""What a look at a cluster, an environment or a folder has found; what `slurmspot doctor` shows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters to a spot run."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at, such as a setting's name.
        found: what it is.
        why: what that means for a run.
        fix: what to do about it; empty if nothing need be done.
    """

    subject: str
    level: Level
    found: str
    why: str
    fix: str = ""


def ok(subject: str, found: str, why: str) -> Finding:
    """Nothing need be done."""
    return Finding(subject=subject, level=Level.OK, found=found, why=why)


def warning(subject: str, found: str, why: str, fix: str) -> Finding:
    """A run works, but worse than it could, or perhaps not."""
    return Finding(subject=subject, level=Level.WARNING, found=found, why=why, fix=fix)


def problem(subject: str, found: str, why: str, fix: str) -> Finding:
    """A run would lose work, or not come back."""
    return Finding(subject=subject, level=Level.PROBLEM, found=found, why=why, fix=fix)


def untold(subject: str, reason: str, why: str, fix: str) -> Finding:
    """It cannot be told, for a ``reason``."""
    return warning(subject, f"cannot be told: {reason}", why, fix)
