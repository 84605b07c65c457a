"""The copy that is taken while training goes on: always of its own step, or refused."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from slurmspot.checkpoint import copying, host, steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.copying import Copying
from slurmspot.checkpoint.disk import Disk
from slurmspot.errors import CheckpointWriteError, UsageError


class Training:
    """A model whose buffers move in the forward pass, its average, and tied weights."""

    def __init__(self, folder, *, make=torch.optim.AdamW, emit=lambda *_, **__: None, **options):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 6))
        self.model.tied = self.model[0]
        self.average = deepcopy(self.model)
        self.optimizer = make(self.model.parameters(), lr=0.1)
        objects = {"model": self.model, "average": self.average, "optimizer": self.optimizer}
        self.checkpointer = Checkpointer(folder, objects, emit=emit, **options)
        self.step_done = 0

    def forward(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 6)).square().sum().backward()
        with torch.no_grad():
            for mine, theirs in zip(
                self.average.parameters(), self.model.parameters(), strict=True
            ):
                mine.lerp_(theirs, 0.5)

    def step(self):
        self.forward()
        self.optimizer.step()
        self.step_done += 1

    def save(self, **options):
        return self.checkpointer.save(self.step_done, trigger="period", meta={}, **options)

    def digest(self):
        return self.checkpointer.digest(["model", "average", "optimizer"])

    def familiar(self):
        """Train until all that only the optimizer moves has been looked at."""
        for _ in range(3):
            self.save()
            self.step()
        self.checkpointer.wait()
        return self


def saved_digest(folder):
    other = Training(folder)
    other.checkpointer.restore()
    return other.digest()


@pytest.fixture
def slow_copies(monkeypatch):
    """Late copies begin when this event is set, or a while after they were asked for."""
    go_on = threading.Event()
    real = copying._Item.copy_aside

    def late(item):
        go_on.wait(1.0)
        go_on.set()
        real(item)

    monkeypatch.setattr(copying._Item, "copy_aside", late)
    return go_on


def save_and_train_on(training, slow_copies):
    """The digest at the save; afterwards the optimizer moves at once, before the copy if it can."""
    at_save = training.digest()
    slow_copies.clear()
    training.save()
    training.step()
    slow_copies.set()
    training.checkpointer.wait()
    assert training.digest() != at_save
    return at_save


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_the_optimizer_waits_for_the_copy(tmp_path, slow_copies, make):
    training = Training(tmp_path, make=make).familiar()
    at_save = save_and_train_on(training, slow_copies)
    other = Training(tmp_path, make=make)
    other.checkpointer.restore()
    assert other.digest() == at_save


def test_without_the_wait_the_next_steps_values_would_be_saved(tmp_path, slow_copies, monkeypatch):
    """What the test above would see if nothing waited, and nothing looked at what was copied."""
    training = Training(tmp_path).familiar()
    monkeypatch.setattr(Copying, "_wait", lambda _: None)
    monkeypatch.setattr(host, "has", lambda *_: True)
    assert save_and_train_on(training, slow_copies) != saved_digest(tmp_path)


def test_without_the_wait_the_next_steps_values_would_be_noticed(
    tmp_path, slow_copies, monkeypatch
):
    training = Training(tmp_path).familiar()
    monkeypatch.setattr(Copying, "_wait", lambda _: None)
    with pytest.raises(CheckpointWriteError, match="was changed while"):
        save_and_train_on(training, slow_copies)


def interrupt_soon():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_a_step_that_was_interrupted_waits_when_it_is_tried_again(tmp_path, slow_copies):
    training = Training(tmp_path).familiar()
    training.forward()
    at_save = training.digest()
    slow_copies.clear()
    training.save()  # the copy begins by itself after 1 s
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step()
    training.optimizer.step()
    training.checkpointer.wait()
    assert training.digest() != at_save
    assert saved_digest(tmp_path) == at_save


def test_training_goes_on_while_the_copy_is_taken(tmp_path, slow_copies):
    told = []
    training = Training(tmp_path, emit=lambda event, **data: told.append((event, data))).familiar()
    at_save = training.digest()
    told.clear()
    slow_copies.clear()
    training.save()
    training.forward()
    assert [event for event, _ in told] == ["snapshot_begin"]
    slow_copies.set()
    training.checkpointer.wait()
    assert [event for event, _ in told][1:] == ["snapshot_end", "persist_end", "commit"]
    assert saved_digest(tmp_path) == at_save


def test_what_training_waits_for_the_copy_is_counted(tmp_path, slow_copies):
    told = []
    training = Training(tmp_path, emit=lambda event, **data: told.append((event, data))).familiar()
    slow_copies.clear()
    training.save()
    training.step()  # waits for the copy, which begins by itself after 1 s
    training.checkpointer.wait()
    stall_s = [data["stall_s"] for event, data in told if event == "snapshot_end"][-1]
    assert 0.1 < stall_s < 10


def test_a_process_that_may_start_no_further_thread_saves_and_loads(tmp_path, monkeypatch):
    training = Training(tmp_path).familiar()
    start = threading.Thread.start

    def refuse(thread):
        if thread.name in {"slurmspot-copy", "slurmspot-disk"}:
            raise RuntimeError("can't start new thread")
        start(thread)

    at_save = training.digest()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        training.save()
        training.step()
        training.checkpointer.wait()
        assert saved_digest(tmp_path) == at_save


def late_paths(training):
    """What would be copied late now."""
    training.save()
    late = {item.path for item in training.checkpointer._copying._late}
    training.checkpointer.wait()
    return late


def test_a_copy_that_fails_fails_the_save_and_not_the_training(tmp_path, monkeypatch):
    training = Training(tmp_path).familiar()

    def fail(_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(copying._Item, "copy_aside", fail)
        training.save()
        training.step()
        with pytest.raises(CheckpointWriteError, match="no memory"):
            training.checkpointer.wait()
    assert training.save()
    training.checkpointer.wait()


def test_only_what_the_optimizer_moves_is_copied_late(tmp_path):
    training = Training(tmp_path).familiar()
    late = late_paths(training)
    parameters = {f"model/{name}" for name, _ in training.model.named_parameters()}
    assert parameters < late
    assert all(path.startswith(("model/", "optimizer/state/")) for path in late)
    assert not any("running" in path or "num_batches" in path for path in late)
    assert {"model/tied.weight", "optimizer/state/model.0.weight/exp_avg"} < late


def test_a_blocking_save_is_durable_on_return_and_takes_no_copy(tmp_path):
    training = Training(tmp_path)
    training.step()
    at_save = training.digest()
    assert training.save(blocking=True)
    assert list(steps.committed(tmp_path)) == [1]
    assert training.checkpointer.staging_bytes < 4096 * 2
    training.step()
    assert saved_digest(tmp_path) == at_save


def test_a_blocking_save_that_fails_says_so_itself(tmp_path, monkeypatch):
    training = Training(tmp_path)
    training.step()

    def fail(*_):
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("slurmspot.checkpoint.disk.OutFile.finish", fail)
        with pytest.raises(CheckpointWriteError, match="no space left"):
            training.save(blocking=True)
    assert not steps.partials(tmp_path)
    assert training.save(blocking=True)


def test_writing_begins_before_all_is_copied(tmp_path, monkeypatch):
    training = Training(tmp_path).familiar()
    read, real = [], copying._Item.copy_aside
    first_read = threading.Event()

    def ready(copies, path):
        Copying.real_ready(copies, path)
        read.append(path)
        first_read.set()

    def copy(item):
        if item.path == last:
            assert first_read.wait(30)
        real(item)

    training.save()
    last = training.checkpointer._copying._late[-1].path
    training.step()
    training.checkpointer.wait()
    monkeypatch.setattr(Copying, "real_ready", Copying.ready, raising=False)
    monkeypatch.setattr(Copying, "ready", ready)
    monkeypatch.setattr(copying._Item, "copy_aside", copy)
    at_save = training.digest()
    training.save()
    training.step()
    training.checkpointer.wait()
    assert read.index(last) > 0
    assert saved_digest(tmp_path) == at_save


def test_a_change_behind_the_optimizers_back_refuses_the_copy(tmp_path, slow_copies):
    training = Training(tmp_path).familiar()
    slow_copies.clear()
    training.save()
    with torch.no_grad():
        training.model[2].weight.clamp_(-0.01, 0.01)
    slow_copies.set()
    with pytest.raises(CheckpointWriteError, match=r"model/2\.weight was changed while"):
        training.checkpointer.wait()
    assert not steps.partials(tmp_path)
    training.step()
    # From now on that one is copied at the boundary: the same can be done without harm.
    at_save = training.digest()
    slow_copies.clear()
    training.save()
    with torch.no_grad():
        training.model[2].weight.clamp_(-0.001, 0.001)
    training.checkpointer.wait()
    assert saved_digest(tmp_path) == at_save


def test_averaged_weights_that_are_swapped_in_for_an_evaluation_refuse_the_copy(
    tmp_path, slow_copies
):
    """Through ``.data``, which torch does not count, and back before the next step."""

    def evaluate():
        own = [parameter.detach().clone() for parameter in training.model.parameters()]
        for mine, average in zip(
            training.model.parameters(), training.average.parameters(), strict=True
        ):
            mine.data.copy_(average)
        slow_copies.set()
        with contextlib.suppress(CheckpointWriteError):
            training.checkpointer.wait()
        for mine, before in zip(training.model.parameters(), own, strict=True):
            mine.data.copy_(before)

    training = Training(tmp_path).familiar()
    before = list(steps.committed(tmp_path))
    slow_copies.clear()
    training.save()
    evaluate()
    assert list(steps.committed(tmp_path)) == before
    assert not late_paths(training)
    training.step()
    at_save = training.digest()
    slow_copies.clear()
    training.save()
    evaluate()
    assert saved_digest(tmp_path) == at_save


def test_a_blocking_save_that_is_interrupted_commits_nothing(tmp_path):
    """It is written from where it lies, and training may go on."""
    moved = threading.Event()

    class Interrupting(Disk):
        def write(self, fd, memory, offset):
            if training.step_done == 2:
                os.kill(os.getpid(), signal.SIGINT)
                moved.wait(30)
            return super().write(fd, memory, offset)

    training = Training(tmp_path, disk=Interrupting())
    training.step()
    training.save(blocking=True)
    training.step()
    with pytest.raises(KeyboardInterrupt):
        training.save(blocking=True)
    training.step()
    moved.set()
    with pytest.raises(CheckpointWriteError, match="interrupted"):
        training.checkpointer.wait()
    assert list(steps.committed(tmp_path)) == [1]
    assert not steps.partials(tmp_path)
    assert training.save(blocking=True)


def test_a_first_save_and_a_restore_in_inference_mode_leave_training_as_it_is(tmp_path):
    training = Training(tmp_path)
    training.step()
    with torch.inference_mode():
        training.save()
        training.checkpointer.wait()
    training.familiar()
    other = Training(tmp_path)
    with torch.inference_mode():
        other.step_done = other.checkpointer.restore().step
        held = other.checkpointer.hold()
        other.checkpointer.put_back(held)
    other.step()
    other.save()
    other.checkpointer.wait()


def test_a_closed_checkpointer_saves_nothing(tmp_path):
    training = Training(tmp_path)
    training.checkpointer.close()
    with pytest.raises(UsageError, match="closed"):
        training.save()


def test_weights_that_are_always_clipped_before_the_forward_pass_are_found_out(tmp_path):
    training = Training(tmp_path)

    def clip():
        training.model[0].weight.data.clamp_(-0.01, 0.01)  # uncounted, so that only a look tells

    for _ in range(3):
        at_save = training.digest()
        training.save()
        clip()
        training.step()
        training.checkpointer.wait()
        assert saved_digest(tmp_path) == at_save
    assert "model/0.weight" not in late_paths(training)
    assert "model/2.weight" in late_paths(training)


def test_steps_that_pass_by_the_hook_are_not_relied_on(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        """Has a step of its own, and none of what torch's constructor makes."""

        def __init__(self, parameters, lr):
            self.inner = torch.optim.SGD(parameters, lr, momentum=0.9)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def step(self):
            self.inner.step()

    wrapped = Training(tmp_path / "wrapped", make=Wrapper).familiar()
    assert late_paths(wrapped) == set()

    def capturable(parameters, lr):
        return torch.optim.AdamW(parameters, lr=torch.tensor(lr), capturable=True, foreach=False)

    training = Training(tmp_path / "graph", make=torch.optim.AdamW)
    training.optimizer.param_groups[0]["capturable"] = True
    assert training.checkpointer._parts["optimizer"].moved_by_step() == set()


def test_closing_lets_go_of_the_optimizer_and_the_memory(tmp_path):
    training = Training(tmp_path).familiar()
    assert training.optimizer._optimizer_step_pre_hooks
    assert training.checkpointer.staging_bytes > 0
    training.checkpointer.close()
    assert not training.optimizer._optimizer_step_pre_hooks
    assert training.checkpointer.staging_bytes == 0


class Gate:
    """Lets saves go past their snapshot only when it is open."""

    def __init__(self):
        self.open = threading.Event()
        self.told = []

    def __call__(self, event, **data):
        self.told.append((event, data.get("step")))
        if event == "snapshot_end":
            assert self.open.wait(30)

    def steps(self, name):
        return [step for event, step in self.told if event == name]


def test_a_save_that_may_be_skipped_is_while_one_is_unfinished(tmp_path):
    gate = Gate()
    training = Training(tmp_path, emit=gate)
    assert training.save()
    training.step()
    assert not training.save(may_skip=True)
    assert gate.steps("save_skipped") == [1]
    gate.open.set()
    training.checkpointer.wait()
    assert training.save(may_skip=True)
    training.step()
    training.save()  # this one waits
    training.checkpointer.close()
    assert list(steps.committed(tmp_path)) == [2, 1, 0]


def test_a_held_copy_uses_the_memory_of_the_saves(tmp_path):
    training = Training(tmp_path).familiar()
    memory = training.checkpointer.staging_bytes
    before = training.digest()
    held = training.checkpointer.hold()
    training.step()
    training.checkpointer.put_back(held)
    assert training.digest() == before
    assert training.checkpointer.staging_bytes == memory
    training.step()  # the live state is not in that memory
    training.checkpointer.put_back(held)
    assert training.digest() == before
    training.save()
    with pytest.raises(UsageError, match="gone"):
        training.checkpointer.put_back(held)


MEMORY = """
import json, resource, sys, threading
from pathlib import Path
import torch
from torch import nn
from slurmspot.checkpoint.checkpointer import Checkpointer

model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 1024)).sum().backward()
    optimizer.step()
checkpointer = Checkpointer(Path(sys.argv[1]), {"model": model, "optimizer": optimizer}, keep=1)
step()
state = 3 * sum(p.nbytes for p in model.parameters())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(4):
    checkpointer.save(i, trigger="period", meta={})
    step()
checkpointer.wait()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([state, checkpointer.staging_bytes, (after - before) * 1024]))
"""


def test_a_save_takes_one_copy_of_the_state(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, text=True
    )
    state, staging, peak = json.loads(done.stdout)
    assert state <= staging <= 1.01 * state
    # Beside that copy there are buffers of the disk engine, which do not grow with the state.
    assert peak <= 1.1 * state + (48 << 20)


def test_memory_is_reused_and_only_grows_by_what_is_new(tmp_path):
    training = Training(Path(tmp_path))
    sizes = []
    for _ in range(4):
        training.save()
        training.step()
        training.checkpointer.wait()
        sizes.append(training.checkpointer.staging_bytes)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3]
