"""Carry a campaign out: into every run what is planned for it, one injection after the other."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Protocol

from slurmspot.errors import FinishedError, SlurmspotError
from slurmspot.faults.campaign import Campaign
from slurmspot.faults.fault import Fault
from slurmspot.faults.injector import Injection
from slurmspot.faults.record import Outcome, Record

_ON_THE_WAY = frozenset({"startup", "restore", "warmup"})  # over when the run trains again

Wait = Callable[[float], object]


class Hand(Protocol):
    """What does the injecting into one run: :class:`slurmspot.faults.injector.Injector`."""

    def inject(self, fault: Fault) -> Injection:
        """Carry one fault out and see its effect."""

    def await_training(self, deadline_s: float) -> bool:
        """Wait until the run trains: True; or has finished: False."""

    def undo(self) -> list[str]:
        """Put right what an injector that died had left."""


def conduct(
    campaign: Campaign,
    hands: Mapping[str, Callable[[Wait], Hand] | None],
    record: Record,
    *,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Inject into all runs at the same time, each by its own hand.

    Args:
        hands: by run, what makes its hand, given how to wait; None leaves it alone, but keeps its
            place: what is planned for a run depends on that.

    Returns:
        what went wrong, a sentence each: an injection without effect, a run that did not come
        back, one that finished before all of its list was done.
    """
    stop = threading.Event()
    end = clock() + campaign.stop_after_s

    def wait(seconds: float) -> None:
        if stop.wait(seconds):  # Ctrl-C: leave, giving back what was taken
            raise SlurmspotError("the campaign was interrupted", fix="begin it again to go on")

    def one(number: int, run: str, hand: Hand) -> list[str]:
        found = []
        done = [outcome for outcome in record.outcomes(run) if not outcome.problem]
        if record.resumed:
            hand.undo()
        plan = itertools.islice(enumerate(campaign.plan(number)), len(done), None)
        for outcome in _outcomes(campaign, plan, run, hand, in_time=lambda: clock() < end):
            record.add(outcome)
            say(describe(outcome))
            if outcome.problem:
                found.append(f"{run}: injection {outcome.index + 1}: {outcome.problem}")
        return found

    with ThreadPoolExecutor(max_workers=max(1, len(hands))) as pool:
        try:
            jobs = [
                pool.submit(one, number, run, make(wait))
                for number, (run, make) in enumerate(hands.items())
                if make is not None
            ]
            return [problem for job in jobs for problem in job.result()]
        finally:
            stop.set()


def _outcomes(
    campaign: Campaign,
    plan: Iterable[tuple[int, Fault]],
    run: str,
    hand: Hand,
    *,
    in_time: Callable[[], bool],
) -> Iterator[Outcome]:
    """What comes of each injection that is still to be made; ends after the first that failed."""
    for index, fault in plan:
        if not in_time():
            return
        seen, problem = None, ""
        t_ns = time.time_ns()
        try:
            if fault.aim.in_phase in _ON_THE_WAY or hand.await_training(campaign.recover_s):
                seen = asdict(hand.inject(fault))
            elif campaign.schedule == "list":
                problem = "the run had finished before"
            else:
                return
        except SlurmspotError as error:
            if isinstance(error, FinishedError) and campaign.schedule != "list":
                return
            problem = "; ".join(filter(None, (error.what, error.why)))
        yield Outcome(
            run=run, index=index, t_ns=t_ns, asked=asdict(fault), seen=seen, problem=problem
        )
        if problem:
            return


def describe(outcome: Outcome) -> str:
    """One line about an outcome."""
    what = f"{outcome.run}: injection {outcome.index + 1}, {outcome.asked['profile']}"
    if outcome.seen is None:
        return f"{what}: NOT DONE: {outcome.problem}"
    phase = f" in {outcome.seen['phase']}" if outcome.seen["phase"] else ""
    return (
        f"{what}{phase}: {', '.join(outcome.seen['nodes'])} at step {outcome.seen['at_step']}, "
        f"seen after {outcome.seen['seconds']:.1f} s"
    )
