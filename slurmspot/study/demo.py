"""The demo: one training run twice, undisturbed and interrupted, on a real cluster of its own.

Shows in minutes, on two cores, what slurmspot is for: the spot run is preempted, loses a node and
has every rank killed, comes back by itself each time, and ends bit for bit like the baseline.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmspot.cluster import scontrol
from slurmspot.cluster.spec import Spec
from slurmspot.cost.bill import gpu_hours, savings
from slurmspot.cost.prices import Prices, load_prices
from slurmspot.faults.injector import Injection, Injector
from slurmspot.report import history
from slurmspot.report.compose import build_document
from slurmspot.report.history import History
from slurmspot.report.html import write_html
from slurmspot.report.table import duration, render
from slurmspot.runfolder import RunFolder
from slurmspot.sandbox import Sandbox
from slurmspot.study.runs import Follower, Say, launch
from slurmspot.timeline.recovery import interruptions

_GPT = Path(__file__).parents[2] / "training" / "gpt.py"
_HEARTBEAT_S = 5.0
_FOLLOW_S = 0.5
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How large the demo is.

    Attributes:
        step_s: least seconds a step takes, so that there is time to be interrupted in.
        period_steps: steps between periodic checkpoints: the most a kill may cost.
        hits: injections, as (kind, at which step).
    """

    steps: int = 240
    step_s: float = 0.1
    period_steps: int = 20
    nodes: int = 2
    gpus_per_node: int = 2
    hits: tuple[tuple[str, int], ...] = (("preempt", 50), ("node-down", 110), ("kill", 170))

    def spec(self, name: str, partition: str) -> Spec:
        """The training run, to be launched into ``partition``."""
        options = {"--steps": self.steps, "--step-s": self.step_s}
        words = [str(word) for option in options.items() for word in option]
        return Spec(
            command=(sys.executable, str(_GPT), *words),
            name=name,
            partition=partition,
            nodes=str(self.nodes),
            gpus_per_node=self.gpus_per_node,
            period_steps=self.period_steps,
            time_min=30,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that has come to its end."""

    history: History
    final: dict[str, Any]
    injections: tuple[Injection, ...]

    @property
    def wall_s(self) -> float:
        """Seconds from the first submission to the last process gone."""
        attempts = [a for job in self.history.timeline.jobs for a in job.attempts]
        ends = [a.process_exit for a in attempts if a.process_exit is not None]
        return (max(ends) - min(a.submit for a in attempts)).total_seconds()

    @property
    def gpu_hours(self) -> float:
        """GPU hours of all attempts, until their processes were gone."""
        return gpu_hours(a for job in self.history.timeline.jobs for a in job.attempts) or 0.0


def demo(
    out: Path, *, plan: Plan | None = None, prices: Path | None = None, say: Say
) -> tuple[dict[str, Any], list[str]]:
    """Run the demo and write ``summary.json`` and ``report.html`` into ``out``.

    Returns:
        The summary; and what went wrong, one sentence each, empty when the demo proves what it
        should.

    Raises:
        SlurmspotError: it could not be carried through.
    """
    plan = plan or Plan()
    price_list = load_prices(prices)
    out.mkdir(parents=True, exist_ok=True)
    folders = {name: RunFolder((out / name).absolute()) for name in ("baseline", "spot")}
    for folder in folders.values():
        shutil.rmtree(folder.path, ignore_errors=True)
    say("starting a private Slurm cluster")
    with Sandbox.up(f"demo-{os.getpid()}", progress=say) as sandbox, _environment(sandbox.env):
        version = scontrol.version()
        say(f"Slurm {version} is up: 4 nodes with 4 GPUs each")
        baseline = _carry_out(folders["baseline"], plan.spec("baseline", "ondemand"), (), say)
        spot = _carry_out(folders["spot"], plan.spec("spot", "spot"), plan.hits, say, sandbox)
    summary = summarise(baseline, spot, slurm_version=version, prices=price_list)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    reports = [
        run.history.report(name, baseline=name == "baseline")
        for name, run in (("baseline", baseline), ("spot", spot))
    ]
    document = build_document(
        "The same training twice: undisturbed, and interrupted three times",
        reports,
        generated=datetime.now().astimezone(),
        prices=price_list,
    )
    write_html(document, out / "report.html")
    return summary, problems(summary, plan)


def _carry_out(
    folder: RunFolder,
    spec: Spec,
    hits: tuple[tuple[str, int], ...],
    say: Say,
    sandbox: Sandbox | None = None,
) -> Finished:
    job_id = launch(spec, folder)
    say(f"{spec.name}: job {job_id} on {spec.nodes} nodes of partition {spec.partition}")
    follower = Follower(
        folder,
        job_id,
        lambda text: say(f"{spec.name}: {text}"),
        interval_s=_FOLLOW_S,
        heartbeat_s=_HEARTBEAT_S,
    )
    follower.start()
    injector = Injector(folder, machines=sandbox)
    actions: dict[str, Callable[[], Injection]] = {
        "preempt": injector.preempt,
        "node-down": injector.node_down,
        "kill": injector.kill,
    }
    done = []
    for kind, step in hits:
        injector.wait_for_step(step, deadline_s=_DEADLINE_S)
        say(f"{spec.name}: taking capacity away: {kind} at step {step}")
        done.append(actions[kind]())
    follower.join_or_fail(_DEADLINE_S)
    return Finished(
        history=history.of_run(folder),
        final=json.loads(folder.finished.read_text()),
        injections=tuple(done),
    )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """The sandbox's variables, for this process and what it starts."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def summarise(
    baseline: Finished, spot: Finished, *, slurm_version: str, prices: Prices
) -> dict[str, Any]:
    """What ``summary.json`` holds."""
    found = interruptions(spot.history.timeline.jobs, spot.history.events)
    return {
        "schema_version": 1,
        "slurm_version": slurm_version,
        "interruptions": [one.as_json() for one in found],
        "final_state_equal": baseline.final["digest"] == spot.final["digest"],
        "baseline_digest": baseline.final["digest"],
        "spot_digest": spot.final["digest"],
        "final_loss": {"baseline": baseline.final["loss"], "spot": spot.final["loss"]},
        "gpu_hours": {"baseline": baseline.gpu_hours, "spot": spot.gpu_hours},
        "wall_s": {"baseline": baseline.wall_s, "spot": spot.wall_s},
        "savings": savings(baseline.gpu_hours, spot.gpu_hours, prices),
    }


def table(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    header = ("interruption", "at step", "notice", "recovered", "steps lost", "RPO", "RTO")
    rows = [
        (
            str(one["injected"] or one["kind"]),
            str(one["at_step"]),
            "yes" if one["notice"] else "no",
            "yes" if one["recovered"] else "NO",
            str(one["steps_lost"]),
            duration(one["rpo_s"]),
            duration(one["rto_s"]),
        )
        for one in summary["interruptions"]
    ]
    runs = [
        (
            name,
            f"{summary['final_loss'][name]:.4f}",
            f"{summary['gpu_hours'][name]:.3f}",
            duration(summary["wall_s"][name]),
            summary[f"{name}_digest"],
        )
        for name in ("baseline", "spot")
    ]
    equal = "bit for bit equal" if summary["final_state_equal"] else "DIFFERENT"
    return "\n\n".join(
        [
            render(header, rows, right="at step steps lost RPO RTO"),
            render(("run", "final loss", "GPU hours", "wall", "final state"), runs),
            f"final states: {equal}; savings {summary['savings']:.0%} at example prices",
        ]
    )


def problems(summary: dict[str, Any], plan: Plan) -> list[str]:
    """What keeps ``summary`` from proving what the demo is there to prove."""
    found = []
    if not summary["final_state_equal"]:
        found.append("the spot run did not end like the baseline")
    suffered = [one["injected"] for one in summary["interruptions"]]
    if suffered != [kind for kind, _ in plan.hits]:
        found.append(f"interruptions were {suffered}, not those that were injected")
    for one in summary["interruptions"]:
        most = 0 if one["notice"] else plan.period_steps
        if not one["recovered"]:
            found.append(f"the run did not recover from {one['kind']} at step {one['at_step']}")
        if one["steps_lost"] is None or one["steps_lost"] > most:
            found.append(
                f"{one['kind']} at step {one['at_step']} cost {one['steps_lost']} steps, "
                f"more than {most}"
            )
    return found
