"""Campaigns: many injections, planned by a TOML file, into one run or several, resumable.

::

    schedule = "list"        # each [[fault]] once, in order; or "poisson", or "trace"
    seed = 7                 # what is drawn is drawn again the same
    count = 20               # at most so many injections into each run
    stop_after_s = 3600      # and none after so many seconds
    recover_s = 300          # a run that is not training again by then fails the campaign
    mean_s = 60              # poisson: mean time between injections
    trace = "capacity.json"  # trace: see slurmspot.faults.trace
    scale = 0.01             # trace: a second of it lasts this long

    [[fault]]
    profile = "slurm"        # and any other setting of a fault: target, at_step, in_phase …
    weight = 2               # poisson, trace: how often it is drawn

What is planned is a function of this file and of the run's place on the command line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from slurmspot.errors import UsageError
from slurmspot.faults.fault import Fault, Target
from slurmspot.faults.trace import load

SCHEDULES = ("list", "poisson", "trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What a campaign file says; see the module's description.

    Attributes:
        faults: the tables of the file, weight included.
    """

    faults: tuple[Mapping[str, Any], ...]
    schedule: str = "list"
    seed: int = 0
    count: int = 1_000_000
    stop_after_s: float = float("inf")
    recover_s: float = 300.0
    mean_s: float = 60.0
    trace: str = ""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.faults:
            raise UsageError("a campaign needs at least one [[fault]]")
        if self.schedule not in SCHEDULES:
            raise UsageError(
                f"schedule={self.schedule!r} is none", fix=f"use {', '.join(SCHEDULES)}"
            )
        if self.schedule == "trace" and not self.trace:
            raise UsageError("schedule='trace' needs a trace")
        if self.schedule == "trace":
            load(Path(self.trace))
        for name in ("count", "stop_after_s", "recover_s", "mean_s", "scale"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name}={getattr(self, name)} is not above 0")
        for table in self.faults:  # an error in the last one must not show after hours
            Fault.of(_without_weight(table))

    @classmethod
    def read(cls, path: Path) -> Campaign:
        """A campaign from its file.

        Raises:
            UsageError: it cannot be read, or says something that makes no sense.
        """
        try:
            table = tomllib.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"cannot read {path}", why=error.strerror) from None
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML", why=str(error)) from None
        faults = table.pop("fault", [])
        own = {field.name for field in fields(cls)} - {"faults"}
        for name in table.keys() - own:
            raise UsageError(f"a campaign has no setting {name!r}", fix=f"use {', '.join(own)}")
        if table.get("trace"):
            table["trace"] = str(path.parent / table["trace"])
        try:
            return cls(faults=tuple(faults), **table)
        except TypeError as error:
            raise UsageError(f"{path} has a value of the wrong type", why=str(error)) from None

    @property
    def digest(self) -> str:
        """Tells one campaign from another."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def planned(self) -> int | None:
        """How many faults each run gets; None if only time or the trace can tell."""
        return min(len(self.faults), self.count) if self.schedule == "list" else None

    def plan(self, run: int) -> Iterator[Fault]:
        """The faults for the run of that number, in order, each aimed from the one before."""
        draw = random.Random(f"{self.seed}/{run}")  # noqa: S311 - repeatable, not secret
        return itertools.islice(self._faults(draw), self.count)

    def _faults(self, draw: random.Random) -> Iterator[Fault]:
        if self.schedule == "list":
            for number, table in enumerate(self.faults):
                yield Fault.of(_without_weight(table), seed=self.seed + number)
        elif self.schedule == "poisson":
            while True:
                yield self._drawn(draw, after_s=draw.expovariate(1 / self.mean_s))
        else:
            before_s = 0.0
            for reclaim in load(Path(self.trace)):
                after_s = (reclaim.at_s - before_s) * self.scale
                before_s = reclaim.at_s
                yield self._drawn(draw, after_s=after_s, nodes=reclaim.nodes)

    def _drawn(self, draw: random.Random, *, after_s: float, nodes: int = 0) -> Fault:
        weights = [float(table.get("weight", 1)) for table in self.faults]
        (table,) = draw.choices(self.faults, weights)
        fault = Fault.of(_without_weight(table), seed=draw.randrange(2**32))
        if nodes and not fault.how.ranks and fault.profile != "kill":
            fault = replace(fault, target=Target(kind="nodes", count=nodes, at_most=True))
        return fault.aimed(replace(fault.aim, after_s=after_s))


def _without_weight(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "weight"}
