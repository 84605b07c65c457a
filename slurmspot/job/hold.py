"""Hold a rank still inside a phase, so that a drill hits exactly there.

Only where ``SLURMSPOT_HOLD=1`` was set at launch. An injector asks by writing ``RUN/hold.json``:
``{"phase": "optimizer", "step": 12}`` holds every rank that enters that phase at that step or
later. The rank writes the event ``held``, waits until the file is gone, writes ``released`` and
goes on. What hits it in between hits it inside the phase, and the event log shows so. The injector
touches the file all the time; one that it has left behind is soon ignored.

===============  =================================================================================
``restore``      checkpoints are being looked for and read
``warmup``       the first forward of the attempt
``forward``      a later forward, in training
``optimizer``    the gradients are there, the optimizer has not moved yet
``evaluation``   a forward of a model in evaluation mode
``snapshot``     the copy is being taken
``persist``      the copy is taken, its bytes are not durable
``commit``       its bytes are durable, the checkpoint is not yet one
``drain``        all ranks have agreed to leave and have not left
``after-finish`` the final checkpoint is committed, the process has not ended
===============  =================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmspot.events import Clock, EventWriter

PHASES = (
    "restore",
    "warmup",
    "forward",
    "optimizer",
    "snapshot",
    "persist",
    "commit",
    "drain",
    "evaluation",
    "after-finish",
)
STALE_S = 30.0  # how long a request outlives the last touch of who asked
_POLL_S = 0.02
_BEGINS = {
    "restore_begin": "restore",
    "snapshot_begin": "snapshot",
    "snapshot_end": "persist",
    "persist_end": "commit",
    "agreed": "drain",
    "finished": "after-finish",
}


class HoldingWriter(EventWriter):
    """An event writer that holds its process where an injector asked for it.

    Args:
        request: the file through which it is asked.
    """

    def __init__(
        self,
        events: Path,
        attempt: str,
        rank: str | int,
        clock: Clock | None = None,
        *,
        request: Path,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(events, attempt, rank, clock)
        self._request = request
        self._wait = wait
        self._step = 0
        self._stepped = False

    def write(
        self,
        event: str,
        *,
        step: int | None = None,
        at: tuple[int, int] | None = None,
        **data: Any,
    ) -> None:
        """Append the event; where it opens a phase, hold."""
        if event == "attempt_start":
            data["holds"] = True  # an injector need not wait in vain for those that do not
        super().write(event, step=step, at=at, **data)
        if event == "restore_end":
            self._step = step or 0
        if event in _BEGINS:
            self.reach(_BEGINS[event])

    def beat(self, step: int) -> None:
        """Note the step."""
        super().beat(step)
        self._step, self._stepped = step, True

    def reach(self, phase: str) -> None:
        """Wait here for as long as an injector asks for this phase."""
        if not self._wanted(phase):
            return
        super().write("held", step=self._step, phase=phase)
        while self._wanted(phase):
            self._wait(_POLL_S)
        super().write("released", step=self._step, phase=phase)

    def _wanted(self, phase: str) -> bool:
        try:
            wanted = json.loads(self._request.read_text())
            if time.time() - self._request.stat().st_mtime > STALE_S:
                return False
        except (OSError, ValueError):
            return False
        return bool(wanted["phase"] == phase and self._step >= (wanted.get("step") or 0))

    def hook(self, objects: Mapping[str, Any]) -> None:
        """Hold in the forward of models and before the step of optimizers, too."""
        for thing in objects.values():
            if hasattr(thing, "register_forward_pre_hook"):
                thing.register_forward_pre_hook(lambda model, _: self._forward(model))
            elif hasattr(thing, "register_step_pre_hook"):
                thing.register_step_pre_hook(lambda *_: self.reach("optimizer"))

    def _forward(self, model: Any) -> None:
        if not model.training:
            self.reach("evaluation")
        else:
            self.reach("forward" if self._stepped else "warmup")


def writer(
    events: Path,
    attempt: str,
    rank: int,
    clock: Clock,
    *,
    request: Path | None,
    objects: Mapping[str, Any],
) -> EventWriter:
    """The event writer of a rank: an ordinary one, unless holds may be asked for."""
    if request is None:
        return EventWriter(events, attempt, rank, clock)
    holding = HoldingWriter(events, attempt, rank, clock, request=request)
    holding.hook(objects)
    return holding


def ask(path: Path, phase: str, step: int | None) -> None:
    """Ask the ranks of a run to stand still in ``phase``, at ``step`` or later."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({"phase": phase, "step": step}))
    partial.replace(path)
