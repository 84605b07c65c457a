"""What to take away, how it ends, and when: as the command line and campaigns write it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slurmspot.errors import NotFoundError, UsageError
from slurmspot.job.hold import PHASES as HELD_PHASES

PHASES = ("startup", *HELD_PHASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A way in which capacity ends.

    Attributes:
        summary: one line for people.
        notice: the job is warned.
        window_s: seconds the warning leaves; 0 where the cluster decides.
        machines: whole machines end, and must be started again.
        ranks: it is aimed at processes, not at nodes.
    """

    summary: str
    notice: bool = True
    window_s: float = 0.0
    machines: bool = False
    ranks: bool = False


PROFILES: Mapping[str, Profile] = {
    "slurm": Profile(summary="a higher-tier job preempts: signal, GraceTime, SIGTERM, SIGKILL"),
    "requeue": Profile(summary="put back into the queue: SIGTERM, KillWait, SIGKILL"),
    "requeue-hold": Profile(summary="put back into the queue, held, and released after hold_s"),
    "cloud-aws": Profile(
        summary="EC2's notice, then the machine is gone", window_s=120, machines=True
    ),
    "cloud-gcp": Profile(
        summary="Compute Engine's notice, then the machine is gone", window_s=30, machines=True
    ),
    "cloud-azure": Profile(
        summary="Azure's notice, then the machine is gone", window_s=30, machines=True
    ),
    "kubernetes": Profile(
        summary="SIGTERM to all on the node, a grace, SIGKILL", window_s=30, machines=True
    ),
    "forced": Profile(
        summary="the machine is gone; Slurm is told after detect_s", notice=False, machines=True
    ),
    "node-down": Profile(summary="an operator sets the node down, or drains it", notice=False),
    "kill": Profile(summary="SIGKILL to every rank; the nodes stay", notice=False),
    "kill-rank": Profile(summary="SIGKILL to one rank", notice=False, ranks=True),
    "hang-rank": Profile(summary="SIGSTOP to one rank: it hangs", notice=False, ranks=True),
}
CLOUDS = ("cloud-aws", "cloud-gcp", "cloud-azure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is hit.

    Attributes:
        kind: ``gang`` (all nodes of the job), ``nodes`` or ``rank``.
        names: these nodes; empty: ``count`` of them.
        count: how many nodes, the last ones of the job (the first runs the batch script); or,
            of a ``rank``, its number.
        at_most: fewer than ``count`` will do.
    """

    kind: str = "gang"
    names: tuple[str, ...] = ()
    count: int = 1
    at_most: bool = False

    @classmethod
    def parse(cls, text: str) -> Target:
        """``gang``, ``node``, ``node:NAME``, ``nodes:2``, ``nodes:a,b`` or ``rank:0``.

        Raises:
            UsageError: it is none of these.
        """
        kind, _, what = text.partition(":")
        if kind == "gang" and not what:
            return cls()
        if kind == "rank" and what.isdecimal():
            return cls(kind="rank", count=int(what))
        if kind in {"node", "nodes"} and (what or "1").isdecimal() and int(what or 1):
            return cls(kind="nodes", count=int(what or 1))
        if kind in {"node", "nodes"} and not what.isdecimal():
            return cls(kind="nodes", names=tuple(what.split(",")))
        raise UsageError(
            f"target={text!r} is nothing that can be hit",
            fix="use gang, node, node:NAME, nodes:COUNT, nodes:NAME,NAME or rank:NUMBER",
        )

    def pick(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """The nodes that are hit, of those that the job has.

        Raises:
            NotFoundError: the job has no such node, or not as many.
        """
        if self.kind != "nodes":
            return tuple(nodes)
        picked = self.names or tuple(nodes[-self.count :])
        for missing in [name for name in picked if name not in nodes]:
            raise NotFoundError(
                f"the job does not run on {missing}", fix=f"choose one of: {', '.join(nodes)}"
            )
        if len(picked) < self.count and not (self.names or self.at_most):
            raise NotFoundError(f"the job has {len(nodes)} nodes, not {self.count}")
        return picked

    def __str__(self) -> str:
        if self.kind == "gang":
            return "gang"
        return f"{self.kind}:{','.join(self.names) or self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """When to hit; several conditions are met one after the other, in this order.

    Attributes:
        after_s: so many seconds from the moment of aiming.
        at_step: once the run has made this step.
        at_fraction: once it has made this share of its steps.
        in_phase: while the ranks are in this phase; with ``at_step``, at that step or later.
    """

    after_s: float = 0.0
    at_step: int | None = None
    at_fraction: float | None = None
    in_phase: str | None = None

    def __post_init__(self) -> None:
        if self.in_phase is not None and self.in_phase not in PHASES:
            raise UsageError(
                f"phase {self.in_phase!r} is none that can be hit", fix=f"use {', '.join(PHASES)}"
            )
        if self.at_fraction is not None and not 0 <= self.at_fraction <= 1:
            raise UsageError(f"at_fraction={self.at_fraction} is not between 0 and 1")
        if self.after_s < 0 or (self.at_step or 0) < 0:
            raise UsageError("an aim lies in the future: no negative step or time")


def at_fraction(text: str, seed: int) -> float:
    """``0.5``, or a value drawn by ``seed`` from a range such as ``0.2-0.8``.

    Raises:
        UsageError: it is neither.
    """
    low, dash, high = text.partition("-")
    try:
        ends = (float(low), float(high if dash else low))
    except ValueError:
        raise UsageError(f"at_fraction={text!r} is neither a number nor a range") from None
    return random.Random(seed).uniform(*ends)  # noqa: S311 - repeatable, not secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One injection, as asked for.

    Attributes:
        window_s: seconds between the notice and the end; 0 is the profile's own.
        hold_s: how long a preempting job keeps the nodes, or a requeued one is held.
        detect_s: how long Slurm is left to believe in a machine that is gone.
        partition: of the preempting job; empty is the nearest higher tier.
        node_state: what an operator sets a node to: DOWN, DRAIN, POWER_DOWN_FORCE.
        keep_machine: of a node that is set down, leave the processes to Slurm.
    """

    profile: str
    target: Target = field(default_factory=Target)
    aim: Aim = field(default_factory=Aim)
    window_s: float = 0.0
    hold_s: int = 5
    detect_s: float = 10.0
    partition: str = ""
    node_state: str = "DOWN"
    keep_machine: bool = False

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise UsageError(
                f"{self.profile!r} is no way to take capacity away",
                fix=f"use {', '.join(PROFILES)}",
            )
        if min(self.window_s, self.hold_s, self.detect_s) < 0:
            raise UsageError("window_s, hold_s and detect_s are not negative")
        if self.how.ranks != (self.target.kind == "rank"):
            raise UsageError(
                f"{self.profile} cannot be aimed at {self.target}",
                fix="use --target rank:NUMBER" if self.how.ranks else "use gang, node or nodes",
            )
        if self.profile == "kill" and self.target.kind != "gang":
            raise UsageError("kill ends every rank", fix="use kill-rank for one")

    @property
    def how(self) -> Profile:
        """What the profile says of itself."""
        return PROFILES[self.profile]

    @property
    def kind(self) -> str:
        """What the event log calls it."""
        return "preempt" if self.profile == "slurm" else self.profile

    @property
    def window(self) -> float:
        """Seconds between the notice and the end."""
        return self.window_s or self.how.window_s

    @classmethod
    def of(cls, table: Mapping[str, Any], *, seed: int = 0) -> Fault:
        """A fault as a table of a campaign file writes it.

        Raises:
            UsageError: it sets something that is no setting of a fault, or wrongly.
        """
        own = {one.name: one for one in fields(cls)} | {one.name: one for one in fields(Aim)}
        for name in table.keys() - own.keys():
            raise UsageError(f"a fault has no setting {name!r}", fix=f"use {', '.join(own)}")
        given = dict(table)
        try:
            profile = str(given.pop("profile"))
            target = str(given.pop("target", "")) or default_target(profile)
            aimed = {one.name: given.pop(one.name) for one in fields(Aim) if one.name in given}
            if "at_fraction" in aimed:
                aimed["at_fraction"] = at_fraction(str(aimed["at_fraction"]), seed)
            return cls(profile=profile, target=Target.parse(target), aim=Aim(**aimed), **given)
        except KeyError:
            raise UsageError(
                "a fault needs a profile", fix=f"one of {', '.join(PROFILES)}"
            ) from None
        except TypeError as error:
            raise UsageError("a fault has a value of the wrong type", why=str(error)) from None

    def aimed(self, aim: Aim) -> Fault:
        """The same at another moment."""
        return replace(self, aim=aim)


def default_target(profile: str) -> str:
    """What a profile hits unless told otherwise."""
    if profile in PROFILES and PROFILES[profile].ranks:
        return "rank:0"
    return "node" if profile in {"forced", "node-down"} else "gang"
