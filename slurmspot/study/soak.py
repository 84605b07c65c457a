"""Many interruptions of every kind in one run, without a hand: ``make soak COUNT=100``.

A small model trains on two nodes of a private cluster, once undisturbed and once hit again and
again, each time in another way, aimed and drawn by a seed. ``summary.json`` says what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmspot.cluster import scontrol
from slurmspot.cluster.spec import Spec
from slurmspot.errors import SlurmspotError
from slurmspot.events import Event, read_events
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.conduct import Hand, Wait, conduct
from slurmspot.faults.fault import PROFILES
from slurmspot.faults.injector import Injector
from slurmspot.faults.keeper import Keeper
from slurmspot.faults.machines import SandboxMachines
from slurmspot.faults.record import Record
from slurmspot.report import history
from slurmspot.runfolder import RunFolder
from slurmspot.sandbox import Sandbox, processes
from slurmspot.sandbox.ports import reserved
from slurmspot.study.runs import launch

_GPT = Path(__file__).parents[2] / "training" / "gpt.py"
_TINY = ("--channels", "16", "--layers", "1", "--context", "16", "--global-batch", "4")
_NODES = 2
_STRIDE = 20  # steps from one injection to the next
_END_S = 300.0

# What each profile may hit in the soak, and how long it may take: a drill's clock runs faster.
_TARGETS: dict[str, Sequence[str]] = {
    "requeue-hold": ("gang",),
    "node-down": ("node",),
    "kill": ("gang",),
    "kill-rank": ("rank:0", "rank:1"),
    "hang-rank": ("rank:0", "rank:1"),
}
_QUICK: dict[str, dict[str, Any]] = {
    "slurm": {"hold_s": 1},
    "requeue-hold": {"hold_s": 1},
    "cloud-aws": {"window_s": 12, "detect_s": 2},
    "cloud-gcp": {"window_s": 8, "detect_s": 2},
    "cloud-azure": {"window_s": 8, "detect_s": 2},
    "kubernetes": {"window_s": 8, "detect_s": 2},
    "forced": {"detect_s": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A run that is to be hit.

    Attributes:
        steps: steps of the whole run.
        step_s: least seconds a step takes, so that there is time to be hit in.
        metadata_port: where the run asks for clouds' notices.
        command: the workload; takes ``--steps`` and ``--step-s``.
    """

    steps: int
    step_s: float = 0.05
    nodes: int = _NODES
    period_steps: int = 5
    hang_s: float = 6.0
    metadata_port: int
    command: tuple[str, ...] = (sys.executable, str(_GPT), *_TINY)

    def spec(self, name: str, partition: str) -> Spec:
        """The run, to be launched into ``partition``."""
        spot = partition == "spot"
        length = ("--steps", str(self.steps), "--step-s", str(self.step_s if spot else 0))
        return Spec(
            command=(*self.command, *length),
            name=name,
            partition=partition,
            nodes=str(self.nodes),
            gpus_per_node=1,
            period_steps=self.period_steps,
            time_min=60,
            notice=("aws", "gcp", "azure") if spot else (),
            metadata_url=f"http://127.0.0.1:{self.metadata_port}/%n",
            hang_s=self.hang_s if spot else 0,
        )


def undisturbed(drill: Drill, folder: RunFolder) -> dict[str, Any]:
    """Carry the run out on capacity that nobody takes; what ``finished.json`` holds."""
    return finish(folder, Keeper(launch(drill.spec("baseline", "ondemand"), folder)))


def finish(folder: RunFolder, keeper: Keeper) -> dict[str, Any]:
    """Wait until a run is over; what ``finished.json`` holds.

    Raises:
        SlurmspotError: it ended otherwise, or not in time.
    """
    with keeper:
        over = keeper.wait(_END_S)
    if not over or not folder.finished.exists():
        raise SlurmspotError(
            f"{folder.path} did not finish",
            why=f"its job was last seen {', '.join(keeper.states[-3:]).lower()}",
            fix=f"its output is in {folder.logs}",
        )
    return dict(json.loads(folder.finished.read_text()))


def faults(count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` faults, every profile equally often, in an order and at targets that are drawn."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    profiles: list[str] = []
    while len(profiles) < count:
        profiles += draw.sample(list(PROFILES), len(PROFILES))
    return [
        {
            "profile": profile,
            "target": draw.choice(_TARGETS.get(profile, ("node", "gang"))),
            "at_step": number * _STRIDE + draw.randrange(_STRIDE),
            **_QUICK.get(profile, {}),
        }
        for number, profile in enumerate(profiles[:count], start=1)
    ]


def soak(
    out: Path, sandbox: Sandbox, *, count: int, seed: int = 0, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Hit one run ``count`` times; this process must be a client of ``sandbox``.

    Returns:
        the summary, also in ``out/summary.json``; and what went wrong, a sentence each.

    Raises:
        SlurmspotError: it could not be carried through.
    """
    folders = {name: RunFolder((out / name).absolute()) for name in ("baseline", "spot")}
    for folder in folders.values():
        shutil.rmtree(folder.path, ignore_errors=True)
    record_path = out / "campaign.jsonl"
    record_path.unlink(missing_ok=True)
    with reserved(1) as port:
        drill = Drill(steps=(count + 2) * _STRIDE, metadata_port=port)
        say("baseline: the same run, undisturbed")
        baseline = undisturbed(drill, folders["baseline"])
        say(f"baseline: digest {baseline['digest']}")
        spot = folders["spot"]
        job_id = launch(drill.spec("spot", "spot"), spot)
        campaign = Campaign(faults=tuple(faults(count, seed)), seed=seed)
        record = Record(record_path, campaign.digest)

        def hand(wait: Wait) -> Hand:
            return Injector(spot, machines=SandboxMachines(sandbox), wait=wait)

        with Keeper(job_id) as keeper:
            problems = conduct(campaign, {"spot": hand}, record, say=say)
            record.close()
            keeper.wait(_END_S)
    if problems:
        scontrol.cancel(job_id)
    summary = summarise(
        spot, baseline["digest"], orphans=orphans(sandbox), down=len(sandbox.status().down)
    )
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary, problems + failings(summary, count)


def summarise(spot: RunFolder, baseline_digest: str, *, orphans: int, down: int) -> dict[str, Any]:
    """What ``summary.json`` holds."""
    events = read_events(spot.events, steps=False)
    asked = [event for event in events if event.event == "inject"]
    seen = [event for event in events if event.event == "inject_observed"]
    suffered = history.of_run(spot).interruptions
    digest = None
    if spot.finished.exists():
        digest = json.loads(spot.finished.read_text())["digest"]
    return {
        "schema_version": 1,
        "slurm_version": scontrol.version(),
        "injected": len(asked),
        "effective": sum(bool(event.data.get("observed")) for event in seen),
        "recovered": sum(_went_on(event, events) for event in asked),
        "digest_equal": digest == baseline_digest,
        "orphan_processes": orphans,
        "nodes_left_down": down,
        "steps_lost": [one.steps_lost for one in suffered],
        "rto_s": [None if one.rto_s is None else round(one.rto_s, 3) for one in suffered],
        "profiles": dict(Counter(event.data["fault"]["profile"] for event in asked)),
        "interruptions": len(suffered),
    }


def failings(summary: dict[str, Any], count: int) -> list[str]:
    """What keeps a summary from showing what a soak is there to show."""
    expected = {
        "injected": count,
        "effective": count,
        "recovered": count,
        "digest_equal": True,
        "orphan_processes": 0,
        "nodes_left_down": 0,
    }
    return [
        f"{name} is {summary[name]}, not {value}"
        for name, value in expected.items()
        if summary[name] != value
    ]


def _went_on(injection: Event, events: Sequence[Event]) -> bool:
    """Whether the run has made a new step since an injection, or has finished."""
    return any(
        event.event == "finished" or (event.event == "first_step" and event.t_ns > injection.t_ns)
        for event in events
    )


def orphans(sandbox: Sandbox, *, deadline_s: float = 20.0) -> int:
    """Processes of jobs that are left on the nodes though no job is, after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while left := _of_jobs(sandbox):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return len(left)


def _of_jobs(sandbox: Sandbox) -> list[int]:
    table = processes.table()
    owner = processes.owners(table, sandbox.layout)
    nodes = set(sandbox.spec.node_names)
    return [
        process.pid
        for process in table
        if owner.get(process.pid) in nodes and not process.program.startswith("slurmd")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak on a cluster of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100, help="interruptions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["SLURMSPOT_HOLD"] = "1"

    def say(line: str) -> None:
        sys.stderr.write(f"soak: {line}\n")

    began = time.monotonic()
    try:
        with Sandbox.up(
            f"soak-{os.getpid()}", gpus_per_node=2, grace_s=5, kill_wait_s=2
        ) as sandbox:
            os.environ.update(sandbox.env)
            summary, problems = soak(
                options.out, sandbox, count=options.count, seed=options.seed, say=say
            )
    except SlurmspotError as error:
        sys.stderr.write(f"slurmspot: {error}\n")
        return error.exit_code
    say(f"{summary['recovered']} of {options.count} in {time.monotonic() - began:.0f} s")
    for problem in problems:
        sys.stderr.write(f"slurmspot: {problem}\n")
    sys.stdout.write(f"{options.out / 'summary.json'}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
