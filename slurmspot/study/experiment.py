"""The experiment: one training undisturbed on demand, and on spot at several checkpoint periods.

::

    OUT/study.json               the frozen specs of all its runs
    OUT/baseline/                the run folder of the baseline
    OUT/period-300s/ …           one run folder for each period
    OUT/campaign.jsonl           journal of the interruptions that were made on purpose

Begun again it goes on: what is finished stays, what still runs is followed, the rest is submitted
once more and resumes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmspot.checkpoint.steps import write_durably
from slurmspot.cluster import scontrol
from slurmspot.cluster.spec import Spec
from slurmspot.cluster.submit import job_ids
from slurmspot.errors import NotFoundError, SlurmspotError, UsageError
from slurmspot.events import last_step
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.conduct import Hand, Wait, conduct
from slurmspot.faults.fault import Fault
from slurmspot.faults.injector import Injection
from slurmspot.faults.record import Outcome, Record, recorded
from slurmspot.runfolder import RunFolder
from slurmspot.settings import PERIODS_S
from slurmspot.study.runs import Follower, Say, launch

BASELINE = "baseline"
_INTERVAL_S = 5.0
_HEARTBEAT_S = 300.0
_ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is compared with what.

    Attributes:
        spec: the training, as it is launched on spot; its period is replaced.
        periods_s: seconds between checkpoints, one spot run each.
        baseline_partition: where the baseline runs, undisturbed.
    """

    out: Path
    spec: Spec
    periods_s: Sequence[float] = PERIODS_S
    baseline_partition: str = "ondemand"

    def __post_init__(self) -> None:
        if not self.periods_s or not all(period > 0 for period in self.periods_s):
            raise UsageError("an experiment needs periods above 0 s", fix="--period-s 900")
        if self.baseline_partition == self.spec.partition:
            raise UsageError(
                f"baseline and spot runs would both run in partition {self.spec.partition}",
                fix="choose another with --baseline-partition",
            )

    @property
    def specs(self) -> dict[str, Spec]:
        """All runs by name, the baseline first: it saves as seldom as the spot run that does."""
        periods = sorted(set(self.periods_s))
        runs = {
            BASELINE: replace(
                self.spec, partition=self.baseline_partition, period_s=periods[-1], name=BASELINE
            )
        }
        for period_s in periods:
            name = f"period-{period_s:g}s"
            runs[name] = replace(self.spec, period_s=period_s, name=name)
        return runs

    def folder(self, name: str) -> RunFolder:
        """The run folder of the run of that name."""
        return RunFolder((self.out / name).absolute())


def runs_of(study: Path) -> tuple[RunFolder, list[RunFolder]]:
    """The baseline and the spot runs of the study in that folder.

    Raises:
        NotFoundError: there is no study.
        UsageError: what is there cannot be read.
    """
    file = study / "study.json"
    try:
        baseline, *spot = map(str, _study(file)["runs"])
    except FileNotFoundError:
        raise NotFoundError(
            f"{study} holds no study",
            fix="give the folder of `slurmspot study run`, or runs and their --baseline",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} cannot be read", why=str(error)) from None
    folder = study.absolute()
    return RunFolder(folder / baseline), [RunFolder(folder / name) for name in spot]


def drills_of(study: Path) -> dict[str, str]:
    """Why the campaign was not carried out in each spot run; empty if it was.

    Returns:
        By name of the run; nothing at all if no campaign was planned.

    Raises:
        UsageError: the study or its journal cannot be read.
    """
    file = study / "study.json"
    try:
        document = _study(file)
        campaign, runs = document["campaign"], document["runs"][1:]
        if campaign is None:
            return {}
        outcomes = recorded(study / "campaign.jsonl", campaign["digest"])
        planned = campaign["planned"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} cannot be read", why=str(error)) from None
    return {name: _undone([one for one in outcomes if one.run == name], planned) for name in runs}


def _study(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


def _undone(outcomes: Sequence[Outcome], planned: int | None) -> str:
    """Why these, the latest of each injection, are not all that was planned; else empty."""
    latest = {one.index: one for one in outcomes}
    for index, one in sorted(latest.items()):
        if one.problem:
            return f"interruption {index + 1} of its campaign was not made: {one.problem}"
    if len(latest) < (planned or 1):
        return f"{len(latest)} of {planned or 'its'} planned interruptions were made"
    return ""


def carry_out(
    experiment: Experiment,
    *,
    campaign: Campaign | None = None,
    hand: Callable[[RunFolder, Wait], Hand] | None = None,
    say: Say,
) -> list[str]:
    """Run all of it to the end; Ctrl-C leaves the jobs running, and the next call goes on.

    Args:
        campaign: interruptions to make in every spot run; None leaves it to the cluster.
        hand: what makes them in the run of that folder, given how to wait.

    Returns:
        what went wrong, a sentence each: an interruption without effect, a run that did not
        finish.

    Raises:
        UsageError: ``out`` holds another study, or the cluster cannot run this one.
        SlurmspotError: Slurm cannot be asked, or refused a job.
    """
    specs = experiment.specs
    _freeze(experiment.out, specs, campaign)
    followers = {
        name: follower
        for name, spec in specs.items()
        if (follower := _begin(experiment.folder(name), spec, say)) is not None
    }
    for follower in followers.values():
        follower.start()
    problems = []
    spot = {name: one for name, one in followers.items() if name != BASELINE}
    if campaign is not None and hand is not None and spot:
        hands = {
            name: _patient(experiment.folder(name), spot[name], hand) if name in spot else None
            for name in specs
            if name != BASELINE
        }
        record = Record(experiment.out / "campaign.jsonl", campaign.digest)
        problems += conduct(campaign, hands, record, say=say)
        record.close()
    for name, follower in followers.items():
        try:
            follower.join_or_fail()
        except SlurmspotError as error:
            problems.append(f"{name}: {'; '.join(filter(None, (error.what, error.why)))}")
    return problems


def _freeze(out: Path, specs: Mapping[str, Spec], campaign: Campaign | None) -> None:
    """Write down what this study is, once and for all."""
    document = {
        "schema_version": 1,
        "runs": list(specs),
        "specs": {name: json.loads(spec.to_json()) for name, spec in specs.items()},
        "campaign": None
        if campaign is None
        else {"digest": campaign.digest, "planned": campaign.planned},
    }
    file = out / "study.json"
    try:
        known = json.loads(file.read_text())
    except FileNotFoundError:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(file, json.dumps(document, indent=2).encode() + b"\n")
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read", why=str(error)) from None
    if known != document:
        raise UsageError(
            f"{out} holds another study",
            why=f"{file} says otherwise about {', '.join(_other(known, document))}",
            fix="repeat the command it was begun with, or choose another --out",
        )


def _other(known: Any, document: Mapping[str, Any]) -> Iterator[str]:
    for name, value in document.items():
        if not isinstance(known, dict) or known.get(name) != value:
            yield name


def _begin(folder: RunFolder, spec: Spec, say: Say) -> Follower | None:
    """Submit a run, unless a job of it goes on; None if it is finished."""
    if folder.finished.exists():
        say(f"{spec.name}: finished before")
        return None
    job_id = next((one for one in job_ids(folder)[-1:] if _goes_on(one)), None)
    if job_id is None:
        job_id = launch(spec, folder)
        say(f"{spec.name}: job {job_id} on {spec.nodes} nodes of partition {spec.partition}")
    else:
        say(f"{spec.name}: job {job_id} goes on")
    return Follower(
        folder,
        job_id,
        lambda text: say(f"{spec.name}: {text}"),
        interval_s=_INTERVAL_S,
        heartbeat_s=_HEARTBEAT_S,
    )


def _goes_on(job_id: str) -> bool:
    try:
        return not scontrol.show_job(job_id).over
    except NotFoundError:
        return False


def _patient(
    folder: RunFolder, follower: Follower, hand: Callable[[RunFolder, Wait], Hand]
) -> Callable[[Wait], Hand]:
    return lambda wait: _Patient(hand(folder, wait), folder, follower, wait)


class _Patient:
    """A hand that waits for as long as its run is in the queue, however long that is."""

    def __init__(self, hand: Hand, folder: RunFolder, follower: Follower, wait: Wait) -> None:
        self._hand = hand
        self._folder = folder
        self._follower = follower
        self._wait = wait

    def inject(self, fault: Fault) -> Injection:
        """Carry one fault out and see its effect."""
        return self._hand.inject(fault)

    def await_training(self, deadline_s: float) -> bool:
        """Wait until the run trains; the deadline counts from its first step on."""
        while last_step(self._folder.events) is None and self._follower.is_alive():
            self._wait(_ASK_AGAIN_S)
        return self._hand.await_training(deadline_s)

    def undo(self) -> list[str]:
        """Put right what an injector that died had left."""
        return self._hand.undo()
