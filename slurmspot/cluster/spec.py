"""What to launch: one frozen value, from a TOML file, then the environment, then flags."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from slurmspot.errors import UsageError
from slurmspot.settings import DEFAULT_KEEP, DEFAULT_PERIOD_S, checked_local, checked_notice

ENV_PREFIX = "SLURMSPOT_LAUNCH_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A run as the user asked for it.

    Attributes:
        command: what every rank runs; exactly one of ``command`` and ``call`` is given.
        call: ``module:function``, called in every rank.
        nodes: a number, or Slurm's range ``2-4``.
        gpus_per_node: GPUs on each node; 0 asks for none.
        tasks_per_node: ranks on each node; 0 is one for each GPU.
        time_min: Slurm's time limit in minutes, for each attempt.
        period_s: seconds between periodic checkpoints.
        period_steps: steps between periodic checkpoints; 0 means time alone decides.
        keep: committed checkpoints to keep.
        local: a folder on each node's own disk, to which periodic checkpoints go first;
            ``{node}`` in it is the node's name; empty: there is none.
        window_s: seconds that a SIGUSR1 leaves; 0 asks the partition (GraceTime).
        kill_wait_s: seconds from SIGTERM to SIGKILL; 0 asks the cluster (KillWait).
        lead_s: send SIGUSR1 this many seconds before the time limit.
        notice: sources of notices besides the signals: ``aws``, ``gcp``, ``azure``, ``file:PATH``.
        metadata_url: asked in place of the clouds' metadata services; ``%n`` is the node's name.
        hang_s: seconds without a step after which the ranks are killed and the job is requeued;
            longer than an evaluation or a checkpoint takes; 0 is never.
        setup: shell lines to run on the first node before the ranks start (``module load …``).
    """

    command: tuple[str, ...] = ()
    call: str = ""
    name: str = "slurmspot"
    partition: str = "spot"
    nodes: str = "1"
    gpus_per_node: int = 1
    tasks_per_node: int = 0
    cpus_per_task: int = 1
    mem_gb: float = 0.0
    time_min: int = 1440
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    nodelist: str = ""
    period_s: float = DEFAULT_PERIOD_S
    period_steps: int = 0
    keep: int = DEFAULT_KEEP
    local: str = ""
    window_s: float = 0.0
    kill_wait_s: float = 0.0
    lead_s: int = 60
    notice: tuple[str, ...] = ()
    metadata_url: str = ""
    hang_s: float = 0.0
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.call):
            raise UsageError(
                "give either a command or --call, not both or neither",
                fix="slurmspot launch [OPTIONS] -- python train.py …",
            )
        if self.call and not re.fullmatch(r"[\w.]+:\w+", self.call):
            raise UsageError(f"call={self.call!r} is not of the form module:function")
        if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", self.nodes):
            raise UsageError(f"nodes={self.nodes!r} is neither a number nor a range such as 2-4")
        for name, least in (
            ("gpus_per_node", 0),
            ("tasks_per_node", 0),
            ("cpus_per_task", 1),
            ("mem_gb", 0),
            ("time_min", 1),
            ("period_s", 0),
            ("period_steps", 0),
            ("keep", 1),
            ("window_s", 0),
            ("kill_wait_s", 0),
            ("lead_s", 1),
            ("hang_s", 0),
        ):
            if not getattr(self, name) >= least:
                raise UsageError(f"{name}={getattr(self, name)} is less than {least}")
        checked_notice(self.notice)
        checked_local(self.local)

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def most_nodes(self) -> int:
        """The largest number of nodes asked for."""
        return int(self.nodes.rpartition("-")[2])

    def to_json(self) -> str:
        """The frozen spec, as ``run.json`` holds it."""
        return json.dumps({"schema_version": 1, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec that :meth:`to_json` wrote."""
        document = json.loads(text)
        document.pop("schema_version")
        return cls(**_typed(document, "run.json"))


def build(
    *, file: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any]
) -> Spec:
    """The spec from a TOML file < ``SLURMSPOT_LAUNCH_*`` variables < flags.

    Keys of the file may be spelled like the flags (``period-s``) or like the variables.

    Raises:
        UsageError: an unknown key (the nearest valid one is named) or a value that makes no sense.
    """
    env = os.environ if env is None else env
    from_file = {} if file is None else _typed(_read_toml(file), str(file))
    from_env = _typed(
        {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in env.items()
            if name.startswith(ENV_PREFIX)
        },
        "the environment",
        spelled=_variable,
    )
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    if {"command", "call"} & given.keys():  # a command on the command line replaces the file's
        from_file = {k: v for k, v in from_file.items() if k not in {"command", "call"}}
    try:
        return Spec(**{**from_file, **from_env, **_typed(given, "the command line")})
    except UsageError as error:
        variables = ", ".join(f"{_variable(name)}={env[_variable(name)]}" for name in from_env)
        why = f"the environment sets {variables}" if variables else None
        raise UsageError(error.what, why=error.why or why, fix=error.fix) from None


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        written = tomllib.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {file}", why=error.strerror) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not valid TOML", why=str(error)) from None
    settings: dict[str, Any] = {}
    for key, value in written.items():
        name = key.replace("-", "_")
        if name in settings:
            raise UsageError(f"{file} sets {key!r} twice", fix="keep one spelling of it")
        settings[name] = value
    return settings


def _typed(
    values: Mapping[str, Any], source: str, *, spelled: Callable[[str], str] = str
) -> dict[str, Any]:
    """The settings that ``source`` gives, which spells their names in a way of its own."""
    kinds = get_type_hints(Spec)
    typed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            raise UsageError(
                f"{source} sets {spelled(name)!r}, which is no setting of a launch",
                fix=f"did you mean {spelled(near[0])}?"
                if near
                else f"valid: {', '.join(map(spelled, sorted(kinds)))}",
            )
        typed[name] = _convert(spelled(name), value, kinds[name], source)
    return typed


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    if kind == tuple[str, ...]:
        return (value,) if isinstance(value, str) else tuple(str(item) for item in value)
    wrong = UsageError(f"{source} sets {name}={value!r}, which is not of type {kind.__name__}")
    if isinstance(value, bool):
        raise wrong
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise wrong from None
