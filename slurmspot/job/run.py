"""The run loop: any training loop, interrupted as often as it takes, as if it never was.

::

    with slurmspot.Run.from_env(model=model, optimizer=optimizer, sampler=sampler) as run:
        for step, batch in run.steps(loader, total=1000):
            loss = train_step(batch)
            run.log(loss=loss)

On a notice all ranks save at the same step and leave the block by :class:`Preempted`, which ends
the process with exit code 75. A kill without notice costs the steps since the last checkpoint. The
next attempt opens the same block and goes on.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from slurmspot.checkpoint.checkpointer import Checkpointer, RandomState
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.steps import write_durably
from slurmspot.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    FencedError,
    SlurmspotError,
    UsageError,
)
from slurmspot.events import Clock, Thinning, last_step
from slurmspot.job import hold, sources
from slurmspot.job.agreement import Agreement, Wish
from slurmspot.job.data import Cursor
from slurmspot.job.notice import Notice, NoticeListener
from slurmspot.job.requeue import PEER_LOST, WANTS_REQUEUE
from slurmspot.runfolder import RunFolder
from slurmspot.settings import JobEnvironment

_S = 1_000_000_000
_LEAVING_S = 2.0  # of a window, for the ranks to end
_TOLD_S = 60.0  # within which every rank learns of a failure that one has been told of
_TAKEN = {"t_ns", "mono_ns", "event", "step", "at", "digest"}  # names that an event has already


class Preempted(SystemExit):
    """Saved after a notice; ends the process with exit code 75 unless it is caught."""

    def __init__(self, step: int) -> None:
        super().__init__(WANTS_REQUEUE)
        self.step = step


class Run:
    """One attempt of a training run. Make it with :meth:`from_env`, use it as a context manager.

    Attributes:
        step: steps completed so far, over all attempts.
        complete: the run had already finished when this attempt started; ``steps`` yields nothing.
        rehearsing: inside the throw-away first step (see :meth:`from_env`).
    """

    def __init__(
        self,
        *,
        env: JobEnvironment,
        folder: RunFolder,
        objects: dict[str, Any],
        rehearse: bool,
        clock: Clock,
    ) -> None:
        self.step = 0
        self.complete = folder.finished.exists()
        self._begun = self._ended = False
        self.rehearsing = False
        self._env = env
        self._folder = folder
        self._clock = clock
        self._rehearse = rehearse
        self._events = hold.writer(
            *(folder.events, env.attempt, env.rank, clock),
            request=folder.hold if env.hold else None,
            objects=objects,
        )
        self._listener = NoticeListener(
            {signal.SIGUSR1: env.window_s, signal.SIGTERM: env.kill_wait_s},
            sources=sources.of(env),
            on_notice=self._note,
            clock=clock,
        )
        self._cursor = Cursor(RandomState())
        self._advancing = [thing for thing in objects.values() if hasattr(thing, "next_epoch")]
        self._stateful = objects
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._agreement = Agreement(dist.new_group(backend="gloo") if distributed else None)
        self._checkpointer = Checkpointer(
            folder.checkpoints,
            {**objects, "random": self._cursor},
            keep=env.keep,
            claim=Claim(job_id=env.job_id, restart=env.restart),
            local=env.local_folder,
            node=env.host,
            emit=self._events.write,
        )
        self._last_save_ns = clock.mono_ns()
        self._thinning = Thinning()
        self._saved_step: int | None = None
        self._failure: CheckpointWriteError | None = None  # not all ranks have agreed on it yet
        self._wished = False  # to save: not answered yet
        self._in_step = False  # the loop's body has the batch of a step that is not counted yet
        self._furthest = -1
        self._logged: dict[str, Any] = {}
        self._listener.start()  # last: what fails above leaves no handler behind

    @classmethod
    def from_env(
        cls,
        *,
        folder: str | Path | None = None,
        rehearse: bool | None = None,
        clock: Clock | None = None,
        **objects: Any,
    ) -> Self:
        """Open the run that this process belongs to.

        With several ranks, call it after ``torch.distributed.init_process_group``. From here on
        SIGUSR1 and SIGTERM no longer end the process.

        Args:
            folder: the run folder; default ``SLURMSPOT_RUN``, else ``slurmspot-run`` here.
            rehearse: make one throw-away step before the first real one of every attempt. DDP
                groups its gradients anew after the first backward of a process, which changes the
                order of summation; without a rehearsal a resumed run of three or more ranks is not
                bitwise equal to an uninterrupted one. Default: with DDP on several ranks. The loop
                body runs once more per attempt, :meth:`log` is ignored in it, and every registered
                object is put back afterwards.
            **objects: what to save, by name: anything with ``state_dict`` and ``load_state_dict``.
                Random states are kept without asking.

        Raises:
            UsageError: an object cannot be saved, or the process group is missing.
        """
        sys.excepthook = _told_plainly
        clock = clock or Clock()
        env = JobEnvironment.read()
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise UsageError(
                    f"{name} ({type(thing).__name__}) cannot be saved",
                    why="it has no state_dict and load_state_dict",
                )
        if "random" in objects:
            raise UsageError("`random` is the name under which random states are kept")
        if env.world_size > 1 and not dist.is_initialized():
            raise UsageError(
                f"this is one of {env.world_size} ranks, but there is no process group",
                fix="call torch.distributed.init_process_group before slurmspot.Run.from_env",
            )
        if rehearse is None:
            rehearse = env.world_size > 1 and any(
                isinstance(thing, DistributedDataParallel) for thing in objects.values()
            )
        place = Path(folder) if folder is not None else env.run or Path("slurmspot-run")
        run_folder = RunFolder(place.absolute()).create()
        run = cls(env=env, folder=run_folder, objects=objects, rehearse=rehearse, clock=clock)
        run._announce()
        return run

    def _announce(self) -> None:
        env = self._env
        self._events.write(
            "attempt_start",
            at=_process_start(self._clock),
            job_id=env.job_id,
            restart=env.restart,
            rank=env.rank,
            world_size=env.world_size,
            host=env.host,
            pid=os.getpid(),
        )
        self._events.write("imports_done")

    def __enter__(self) -> Self:
        """Restore the newest checkpoint that verifies, if there is one.

        Raises:
            MismatchedCheckpointError: it is of another model; nothing has been loaded.
            CorruptCheckpointError: there are checkpoints, and none of them verifies.
        """
        try:
            self._restore()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _restore(self) -> None:
        if self.complete:
            self._say("already complete")
            return
        self._events.write("restore_begin")
        try:
            restored = self._checkpointer.restore()
        except CorruptCheckpointError as error:
            self._events.write("restore_failed", error=error.why or error.what)
            raise
        if restored is None:
            self._events.write("restore_end", step=None)
            return
        self.step = self._saved_step = restored.step
        self._logged = restored.meta.get("logged", {})
        rejected = [{"step": step, "problem": problem} for step, problem in restored.rejected]
        passed_over = [
            {"step": step, "problem": problem, "damaged": step in restored.damaged}
            for step, problem in restored.passed_over
        ]
        self._events.write(
            "restore_end",
            step=restored.step,
            tier=restored.tier,
            seconds=restored.seconds,
            rejected=rejected,
            passed_over=passed_over,
        )
        for item in rejected:
            self._say(f"checkpoint of step {item['step']} was rejected: {item['problem']}")
        for item in passed_over:
            self._say(f"step {item['step']} on the local tier was passed over: {item['problem']}")
        self._say(f"resumed at step {self.step}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Log how the attempt ended and put the former signal handlers back."""
        code: int | str | None = 0
        text = None
        if isinstance(error, SystemExit):
            code = error.code
        elif error is not None:
            code, text = (PEER_LOST if _peer_lost(error) else 1), f"{error!r}"
        self._cursor.close()
        self._checkpointer.close()
        self._listener.close()
        self._events.write("exit", step=self.step, code=code, error=text)
        self._events.close()
        if code == PEER_LOST and error is not None:
            self._say(f"another rank is gone: {error}")
            raise SystemExit(PEER_LOST) from error

    def steps(
        self, loader: Iterable[Any], *, total: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield ``(step, batch)`` until the run is done; step counts from 1 over all attempts.

        Going over ``loader`` again is a new epoch. Leaving the loop early (``break``) is not the
        end of the run: only running out of steps is. A run that is opened again goes on from the
        newest checkpoint; this one has had its loop.

        Args:
            loader: any iterable of batches; the same on every attempt.
            total: steps of the whole run; None is one epoch.

        Raises:
            Preempted: a notice was agreed on; the state of ``step`` is saved.
            CheckpointWriteError: the first or the final checkpoint could not be made durable.
            UsageError: this run has had its loop already, or ``loader`` cannot be resumed.
        """
        if self.complete and not self._ended:
            return
        self._begin()
        self._events.write("goal", step=self.step, total=total)
        keeps_place = self._keeps_place(loader)
        self._furthest = last_step(self._folder.events, before_attempt=self._env.attempt) or 0
        if self.step == 0:
            self._save("start")
            self._checkpointer.wait()  # what cannot be saved shows now, not after hours
        while total is None or self.step < total:
            epoch_begins = self._cursor.batch == 0
            before = self.step
            for batch in self._cursor.batches(loader, keeps_place=keeps_place):
                if self._rehearse:
                    yield from self._rehearsal(batch)
                self._in_step = True
                try:
                    yield self.step + 1, batch
                    self._step_done()
                finally:
                    self._in_step = False
                if self.step == total:
                    break
                self._boundary()
            else:
                for thing in (self._cursor, *self._advancing):
                    thing.next_epoch()
            if total is None:
                break
            if epoch_begins and self.step == before:
                raise UsageError("the loader yields no batch", why="an epoch without a step")
        self._finish()

    def _begin(self) -> None:
        if self._ended:
            raise UsageError("this run is complete", why="a run has one loop, to one total")
        if self._begun:
            raise UsageError(
                "the loop of this run was left before its end, and cannot be entered again",
                why=f"step {self.step + 1} may have been made, by halves or not at all",
                fix="train in one loop over run.steps; or open the run again, "
                "which restores the newest checkpoint",
            )
        self._begun = True

    def _keeps_place(self, loader: Iterable[Any]) -> bool:
        """Whether ``loader`` goes on where a saved state says, and need not be replayed."""
        registered = any(loader is thing for thing in self._stateful.values())
        if registered and self._rehearse:
            raise UsageError(
                "a registered loader cannot be put back after the rehearsal",
                why="it takes a state up only when it is gone over anew",
                fix="register its sampler instead, or call Run.from_env(rehearse=False)",
            )
        return bool(self._advancing) or registered

    def _rehearsal(self, batch: Any) -> Iterator[tuple[int, Any]]:
        held = self._checkpointer.hold()
        self.rehearsing = True
        yield self.step + 1, batch
        self.rehearsing = self._rehearse = False
        self._checkpointer.put_back(held)

    def log(self, **values: Any) -> None:
        """Note values of this step (a loss); the event log keeps about one a second.

        Args:
            **values: numbers, or tensors of one number each; NaN and infinity are kept as null.

        Raises:
            UsageError: a value is no single number, or its name is one that every event has.
        """
        for name, value in values.items():
            if name in _TAKEN:
                raise UsageError(
                    f"run.log cannot note a value by the name of {name!r}",
                    why="every event has one already; `step` is this step",
                    fix="leave it out, or choose another name",
                )
            if not _is_number(value):
                raise UsageError(
                    f"run.log({name}=…) was given a {_described(value)}",
                    why="only single numbers are noted",
                    fix="reduce it to one number, such as its mean, or leave it out",
                )
        if not self.rehearsing:
            self._logged = values

    def check(self) -> None:
        """Leave now if all ranks agree to: for long stretches without a step, such as evaluation.

        Collective: call it equally often on every rank. In the body of the loop call it only when
        the optimizer has moved and :meth:`log` was called: from then on the current step counts as
        done, and what follows in the body is not repeated on resumption.

        Raises:
            Preempted: as in :meth:`steps`.
        """
        if not self.complete and not self.rehearsing:
            self._step_done()
            self._boundary()

    def _step_done(self) -> None:
        """Count the step whose batch the loop's body has, once."""
        if not self._in_step:
            return
        self._in_step = False
        self.step += 1
        for thing in (self._cursor, *self._advancing):
            thing.advance()
        now_ns = self._clock.mono_ns()
        if self.step == self._furthest + 1:
            self._events.write("first_step", step=self.step)
        if self._env.rank == 0 and self._thinning.keeps(self.step, now_ns):
            self._events.write("step", step=self.step, **self._values())
        self._events.beat(self.step)

    def _values(self) -> dict[str, Any]:
        """What was logged last, by this attempt or the one it resumed. JSON has no NaN."""
        numbers = {k: math.nan if v is None else _number(v) for k, v in self._logged.items()}
        return {k: number if math.isfinite(number) else None for k, number in numbers.items()}

    def _boundary(self) -> None:
        period_steps = self._env.period_steps
        remaining_s = self._listener.remaining_s()
        news = self._checkpointer.failed() if self._failure is None else None
        self._failure = self._failure or news
        self._wished = self._overdue() and not self._wished
        agreed = self._agreement.exchange(
            Wish(
                leave=remaining_s is not None,
                remaining_s=remaining_s,
                save=self._wished,
                failed=news is not None,
            )
        )
        if agreed.failed:
            self._save_failed()
        if agreed.leave:
            self._leave(agreed.remaining_s)
        elif agreed.save or (period_steps and self.step % period_steps == 0):
            self._save("period")  # once: check() may come by here many times in one step

    def _save_failed(self) -> None:
        """Take note of a failure, at the same boundary on all ranks, though they learn of it apart.

        What a rank knows alone must not decide whether it saves: ranks that save different steps
        together would mix them.
        """
        failure = self._failure or self._checkpointer.failed(within_s=_TOLD_S)
        self._failure = self._saved_step = None
        if isinstance(failure, FencedError):
            raise failure
        if failure is not None:
            self._say(f"{failure}\n  the checkpoint before it stays good; training goes on")

    def _overdue(self) -> bool:
        """Whether the period has passed. Rank 0 decides for all: clocks differ."""
        if self._env.period_steps or self._env.rank != 0:
            return False
        return self._clock.mono_ns() - self._last_save_ns >= self._env.period_s * _S

    def _save(self, trigger: str, *, within_s: float | None = None) -> None:
        repeated = self._saved_step == self.step
        only_local = self._env.local and trigger == "final"
        if repeated and not only_local:
            return
        self._last_save_ns = self._clock.mono_ns()
        self._wished = False
        meta = {
            "attempt": self._env.attempt,
            "epoch": self._cursor.epoch,
            "logged": self._values(),
        }
        # A period in steps says which steps to save; one in seconds can pass one by.
        may_skip = trigger == "period" and not self._env.period_steps
        notice = self._listener.notice
        if self._checkpointer.save(
            self.step,
            trigger=trigger,
            meta=meta,
            may_skip=may_skip,
            repeated=repeated,
            within_s=within_s,
            node_stays=notice is None or not notice.machine,
            blocking=trigger in {"notice", "final"},
        ):
            self._saved_step = self.step

    def _leave(self, remaining_s: float | None) -> None:
        until_ns = self._clock.mono_ns() + int(((remaining_s or 0) - _LEAVING_S) * _S)
        self._events.write("agreed", step=self.step)
        try:
            self._save("notice", within_s=remaining_s)
            self._checkpointer.wait()
            self._checkpointer.drain(max(0.0, (until_ns - self._clock.mono_ns()) / _S))
        except FencedError:
            raise
        except CheckpointWriteError as error:
            self._say(f"{error}\n  leaving with the checkpoint before it")
        self._agreement.close()
        raise Preempted(self.step)

    def _finish(self) -> None:
        self._agreement.close()
        self._save("final")
        self._checkpointer.wait()
        digest = self._checkpointer.digest()
        values = self._values()
        if self._env.rank == 0:
            done = {"step": self.step, "digest": digest, **values}
            write_durably(self._folder.finished, json.dumps(done).encode() + b"\n")
        self._events.write("finished", step=self.step, digest=digest, **values)
        self.complete = self._ended = True

    def _note(self, notice: Notice) -> None:
        self._events.write(
            "notice",
            at=(notice.t_ns, notice.mono_ns),
            step=self.step,
            source=notice.source,
            window_s=notice.window_s,
            **({"machine": True} if notice.machine else {}),
        )

    def _say(self, text: str) -> None:
        if self._env.rank == 0:
            sys.stderr.write(f"slurmspot: {text}\n")
            sys.stderr.flush()


def _told_plainly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """An error of ours ends the program with what happened and what to do; others as ever."""
    if isinstance(error, SlurmspotError):
        sys.stderr.write(f"slurmspot: {error}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # told by its shape: its value would have to be waited for
        return value.numel() == 1 and not value.is_complex()
    try:
        _number(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return not isinstance(value, str | bytes)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + (f" of shape {list(shape)}" if shape else "")


def _peer_lost(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone, and not through a fault here.

    NCCL and the store raise a DistError; gloo a bare RuntimeError that names its source file.
    """
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and "gloo" in str(error)
    )


def _process_start(clock: Clock) -> tuple[int, int]:
    """When this process was started, as (unix ns, monotonic ns); see proc(5), field 22."""
    stat = Path("/proc/self/stat").read_text()
    ticks = int(stat.rpartition(")")[2].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * _S // os.sysconf("SC_CLK_TCK")
    return clock.unix_ns() - age_ns, clock.mono_ns() - age_ns
