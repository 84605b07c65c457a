import errno
import random
import threading
from collections import deque

import numpy as np
import pytest
import torch
from run_script import answer_of
from torch import nn

from slurmspot.checkpoint import steps
from slurmspot.checkpoint.checkpointer import Checkpointer, RandomState
from slurmspot.checkpoint.disk import REAL
from slurmspot.checkpoint.verify import verify
from slurmspot.errors import (
    CheckpointWriteError,
    CorruptCheckpointError,
    MismatchedCheckpointError,
    UsageError,
)


class Holder:
    """A registered object around a plain dictionary."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = state


class Training:
    """A small training run in which every kind of state matters."""

    def __init__(self, *, width=8, optimizer=torch.optim.AdamW, dtype=torch.float32):
        self.model = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2)
        ).to(dtype)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.sampler = Holder(order=list(range(5)), at=0, seed=(1, 2))

    @property
    def objects(self):
        return {
            "random": RandomState(),
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
        }

    def step(self):
        dtype = next(self.model.parameters()).dtype
        noise = random.random() + np.random.rand()  # noqa: NPY002 - the global state is what is tested
        self.optimizer.zero_grad()
        (self.model(torch.randn(5, 4, dtype=dtype)).pow(2).sum() * noise).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.sampler.state["at"] += 1


class Log:
    def __init__(self):
        self.lines = []

    def __call__(self, event, **data):
        self.lines.append((event, data))

    def names(self):
        return [event for event, _ in self.lines]


def save(checkpointer, step, **meta):
    checkpointer.save(step, trigger="period", meta=meta)
    checkpointer.wait()


def committed(folder):
    return list(steps.committed(folder))


def test_a_resumed_run_ends_bitwise_equal(tmp_path):
    training = Training()
    first = Checkpointer(tmp_path, training.objects)
    assert first.restore() is None
    for _ in range(3):
        training.step()
    save(first, 3, cursor=[1, 2], attempt="17-0")
    at_save = first.digest()
    for _ in range(3):
        training.step()

    resumed = Training()
    second = Checkpointer(tmp_path, resumed.objects)
    restored = second.restore()
    assert (restored.step, restored.meta) == (3, {"cursor": [1, 2], "attempt": "17-0"})
    assert (restored.rejected, restored.fresh) == ([], ())
    assert second.digest() == at_save
    for _ in range(3):
        resumed.step()
    assert second.digest() == first.digest()
    assert resumed.sampler.state == training.sampler.state
    assert resumed.scheduler.state_dict() == training.scheduler.state_dict()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_of_other_kinds(tmp_path, optimizer):
    model = nn.Linear(3, 2)
    made = optimizer(model.parameters(), lr=0.1)

    def loss():
        made.zero_grad()
        value = model(torch.ones(4, 3)).pow(2).mean()
        value.backward()
        return value

    made.step(loss)
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": made})
    save(checkpointer, 1)
    other = nn.Linear(3, 2)
    fresh = Checkpointer(
        tmp_path, {"model": other, "optimizer": optimizer(other.parameters(), lr=0.1)}
    )
    fresh.restore()
    assert fresh.digest() == checkpointer.digest()


def schedulers(optimizer):
    schedule = torch.optim.lr_scheduler
    return {
        "lambda": schedule.LambdaLR(optimizer, lambda step: 0.9**step),
        "cosine": schedule.CosineAnnealingWarmRestarts(optimizer, T_0=3),
        "cycle": schedule.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
        "plateau": schedule.ReduceLROnPlateau(optimizer),
        "sequence": schedule.SequentialLR(
            optimizer,
            [schedule.ConstantLR(optimizer), schedule.ExponentialLR(optimizer, 0.9)],
            milestones=[2],
        ),
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024),
    }


@pytest.mark.parametrize("name", schedulers(torch.optim.SGD([torch.ones(1)])))
def test_schedulers_and_the_scaler_come_back_equal(tmp_path, name):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    thing = schedulers(optimizer)[name]
    for _ in range(4):
        if name == "scaler":
            thing.scale(weight.sum()).backward()
            thing.step(optimizer)
            thing.update()
        else:
            optimizer.step()
            thing.step(*([1.0] if name == "plateau" else []))
    save(Checkpointer(tmp_path, {"thing": thing}), 1)
    other = schedulers(torch.optim.SGD([torch.ones(1)], lr=0.1))[name]
    Checkpointer(tmp_path, {"thing": other}).restore()
    theirs, ours = other.state_dict(), thing.state_dict()
    assert str(theirs) == str(ours)


def test_tensors_anywhere_in_a_state(tmp_path):
    state = {
        "queue": deque([torch.ones(1), torch.zeros(2)], maxlen=4),
        "pair": (torch.ones(3), {5: torch.ones(4), "5": torch.ones(5)}),
        "a/b": {"%": torch.ones(6)},
    }
    save(Checkpointer(tmp_path, {"thing": Holder(**state)}), 1)
    other = Holder()
    Checkpointer(tmp_path, {"thing": other}).restore()
    assert str(other.state) == str(state)
    assert other.state["queue"].maxlen == 4


def test_float32_moments_of_bfloat16_parameters_keep_their_bits(tmp_path):
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.randn(2, 3),
        "exp_avg_sq": torch.rand(2, 3),
    }
    checkpointer = Checkpointer(tmp_path, {"model": model, "optimizer": optimizer})
    save(checkpointer, 1)
    other = nn.Linear(3, 2, dtype=torch.bfloat16)
    other_optimizer = torch.optim.AdamW(other.parameters())
    Checkpointer(tmp_path, {"model": other, "optimizer": other_optimizer}).restore()
    back = other_optimizer.state[other.weight]["exp_avg"]
    assert back.dtype == torch.float32
    assert torch.equal(back, optimizer.state[model.weight]["exp_avg"])


def test_a_save_holds_the_values_of_its_own_step(tmp_path):
    """The copy is taken before save() returns, whatever training does to the tensors next."""
    tensor = torch.zeros(1000)
    array = np.zeros(10)
    holder = Holder(tensor=tensor, view=tensor[10:20], array=array, list=[0])
    gate = threading.Event()

    def emit(event, **_):
        if event == "persist_end":
            assert gate.wait(30)

    checkpointer = Checkpointer(tmp_path, {"holder": holder}, emit=emit)
    meta = {"cursor": [0]}
    checkpointer.save(1, trigger="period", meta=meta)
    meta["cursor"][0] = 2
    tensor.fill_(2)
    array.fill(2)
    holder.state["list"][0] = 2
    gate.set()
    checkpointer.wait()
    other = Holder()
    assert Checkpointer(tmp_path, {"holder": other}).restore().meta == {"cursor": [0]}
    assert other.state["tensor"].sum() == 0
    assert other.state["view"].sum() == 0
    assert other.state["array"].sum() == 0
    assert other.state["list"] == [0]


def test_events_of_a_save(tmp_path):
    log = Log()
    checkpointer = Checkpointer(tmp_path, {"holder": Holder(a=torch.ones(3))}, emit=log)
    save(checkpointer, 7)
    assert log.names() == ["snapshot_begin", "snapshot_end", "persist_end", "commit"]
    assert all(data["step"] == 7 for _, data in log.lines)
    assert log.lines[0][1]["trigger"] == "period"
    assert log.lines[1][1]["stall_s"] >= 0
    assert log.lines[2][1]["size_bytes"] > 0
    assert (log.lines[3][1]["tier"], log.lines[3][1]["trigger"]) == ("remote", "period")


def test_a_state_that_is_not_data_fails_the_save_and_names_its_path(tmp_path):
    log = Log()
    holder = Holder(fine=1)
    checkpointer = Checkpointer(tmp_path, {"holder": holder}, emit=log)
    save(checkpointer, 1)
    holder.state["bad"] = {"f": len}
    checkpointer.save(2, trigger="period", meta={})
    with pytest.raises(CheckpointWriteError, match="holder/bad/f"):
        checkpointer.wait()
    assert log.names()[-1] == "save_failed"
    assert checkpointer.failed() is None
    checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    del holder.state["bad"]
    save(checkpointer, 3)
    assert committed(tmp_path) == [3, 1]


def test_a_failure_is_told_once_and_training_goes_on(tmp_path):
    holder = Holder(bad=len)
    checkpointer = Checkpointer(tmp_path, {"holder": holder})
    checkpointer.save(1, trigger="period", meta={})
    checkpointer.close()
    assert isinstance(checkpointer.failed(), CheckpointWriteError)
    assert checkpointer.failed() is None


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (
            lambda: Training(width=9),
            r"model/0.weight.*\n.*saved float32 \[8, 4\], expected float32 \[9, 4\]",
        ),
        (lambda: Training(dtype=torch.float64), r"saved float32 \[8, 4\], expected float64"),
        (lambda: Training(optimizer=torch.optim.SGD), "optimizer/param_groups/0"),
    ],
)
def test_a_checkpoint_of_another_model_is_named_and_nothing_is_loaded(tmp_path, other, problem):
    save(Checkpointer(tmp_path, Training().objects), 1)
    save(Checkpointer(tmp_path, Training().objects), 2)
    training = other()
    checkpointer = Checkpointer(tmp_path, training.objects)
    before = checkpointer.digest(["model", "optimizer", "random"])
    with pytest.raises(MismatchedCheckpointError, match=problem):
        checkpointer.restore()
    assert checkpointer.digest(["model", "optimizer", "random"]) == before
    assert training.scheduler.last_epoch == 0


def test_other_registered_objects_are_a_mismatch(tmp_path):
    objects = Training().objects
    save(Checkpointer(tmp_path, objects), 1)
    with pytest.raises(MismatchedCheckpointError, match="scheduler is in it but not registered"):
        Checkpointer(tmp_path, {k: v for k, v in objects.items() if k != "scheduler"}).restore()
    with pytest.raises(MismatchedCheckpointError, match="scaler is not in it"):
        Checkpointer(tmp_path, {**objects, "scaler": Holder()}).restore()


def test_an_object_of_another_kind_under_the_same_name(tmp_path):
    save(Checkpointer(tmp_path, {"thing": Holder(a=1)}), 1)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(MismatchedCheckpointError, match="thing was an object of another kind"):
        Checkpointer(tmp_path, {"thing": optimizer}).restore()


def test_an_object_that_does_not_come_back_equal_is_found_by_its_fingerprint(tmp_path):
    class Forgetful(Holder):
        def load_state_dict(self, state):
            self.state = {**state, "t": state["t"] + 1, "rate": 1}

    first = Holder(t=torch.ones(2), rate=0.5)
    save(Checkpointer(tmp_path, {"thing": first}), 1)
    with pytest.raises(MismatchedCheckpointError, match=r"thing/t differs; value .*rate is 1, was"):
        Checkpointer(tmp_path, {"thing": Forgetful()}).restore()


def damage(folder, step):
    path = folder / steps.step_name(step) / "rank-00000.h5"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_damaged_checkpoints_are_passed_over_and_later_replaced(tmp_path):
    holder = Holder(t=torch.zeros(1000))
    checkpointer = Checkpointer(tmp_path, {"holder": holder})
    for step in (1, 2, 3):
        holder.state["t"] = torch.full((1000,), float(step))
        save(checkpointer, step)
    damage(tmp_path, 3)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    other = Holder()
    second = Checkpointer(tmp_path, {"holder": other}, keep=2)
    restored = second.restore()
    assert restored.step == 1
    assert other.state["t"][0] == 1
    assert [step for step, _ in restored.rejected] == [3, 2]
    assert "rank-00000.h5" in restored.rejected[0][1]
    save(second, 2)
    assert committed(tmp_path) == [3, 2, 1]
    save(second, 3)
    assert committed(tmp_path) == [3, 2]
    assert all(report.intact for report in verify(tmp_path))


@pytest.mark.parametrize("moment", ["stale", "wrong"])
def test_what_cannot_be_read_for_a_moment_is_not_given_up(tmp_path, monkeypatch, caplog, moment):
    holder = Holder(t=torch.zeros(1000))
    checkpointer = Checkpointer(tmp_path, {"holder": holder})
    for step in (1, 2):
        holder.state["t"] = torch.full((1000,), float(step))
        save(checkpointer, step)
    real = REAL.read
    failed = []

    def read(fd, memory, offset):
        if not failed:
            failed.append(offset)
            if moment == "stale":
                raise OSError(errno.ESTALE, "Stale file handle")
            count = real(fd, memory, offset)
            memory[0][: memory[0].size] ^= 1
            return count
        return real(fd, memory, offset)

    monkeypatch.setattr(REAL, "read", read)
    other = Holder()
    restored = Checkpointer(tmp_path, {"holder": other}).restore()
    assert failed
    assert (restored.step, restored.rejected) == (2, [])
    assert other.state["t"].eq(2).all()
    assert "reading it once more" in caplog.text


def test_a_folder_with_nothing_intact_is_not_taken_for_an_empty_one(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"holder": Holder(t=torch.zeros(1000))})
    save(checkpointer, 1)
    damage(tmp_path, 1)
    with pytest.raises(CorruptCheckpointError, match="none of 1"):
        checkpointer.restore()


def test_retention(tmp_path):
    checkpointer = Checkpointer(tmp_path, {"holder": Holder(a=1)}, keep=2)
    for step in (1, 2, 3, 4):
        save(checkpointer, step)
        assert committed(tmp_path)[0] == step
    assert committed(tmp_path) == [4, 3]
    assert not steps.partials(tmp_path)


def test_retention_keeps_what_was_just_saved_below_newer_ones(tmp_path):
    first = Checkpointer(tmp_path, {"holder": Holder(a=1)})
    for step in (10, 11, 12):
        save(first, step)
    save(Checkpointer(tmp_path, {"holder": Holder(a=1)}, keep=1), 5)
    assert committed(tmp_path) == [12, 5]


def test_partials_of_dead_attempts_go_but_not_those_begun_later(tmp_path):
    stale = steps.begin(tmp_path / "step-00000005")
    checkpointer = Checkpointer(tmp_path, {"holder": Holder(a=1)})
    living = steps.begin(tmp_path / "step-00000006")
    save(checkpointer, 1)
    assert not stale.exists()
    assert living.exists()


def test_a_step_that_another_writer_committed_first_stays_as_it_is(tmp_path):
    first = Checkpointer(tmp_path, {"holder": Holder(a=torch.zeros(2))})
    zombie = Checkpointer(tmp_path, {"holder": Holder(a=torch.ones(2))})
    save(first, 1)
    with pytest.raises(CheckpointWriteError, match="another state of holder/a"):
        save(zombie, 1)
    zombie.save(1, trigger="final", meta={}, repeated=True, blocking=True)
    holder = Holder()
    Checkpointer(tmp_path, {"holder": holder}).restore()
    assert holder.state["a"].tolist() == [0, 0]
    assert committed(tmp_path) == [1]


def test_saving_a_step_again_is_refused_only_if_models_or_optimizers_have_moved(tmp_path):
    training = Training()
    checkpointer = Checkpointer(tmp_path, training.objects)
    training.step()
    save(checkpointer, 1)
    torch.rand(1)
    training.sampler.state["at"] += 1
    save(checkpointer, 1)
    training.step()
    with pytest.raises(CheckpointWriteError, match="another state of model"):
        save(checkpointer, 1)
    save(checkpointer, 2)
    assert committed(tmp_path) == [2, 1]


def gradients(model):
    return [p.grad for p in model.parameters()]


def test_hold_and_put_back_undo_a_step(tmp_path):
    training = Training()
    training.model.register_buffer("scratch", torch.zeros(2), persistent=False)
    checkpointer = Checkpointer(tmp_path, training.objects)
    every = list(training.objects)
    held = checkpointer.hold()
    before = checkpointer.digest(every)
    assert training.optimizer.state_dict()["state"] == {}
    for _ in range(2):
        training.step()
        training.model.scratch += 1
        checkpointer.put_back(held)
        assert checkpointer.digest(every) == before
        assert training.optimizer.state_dict()["state"] == {}
        assert gradients(training.model) == [None] * 6
        assert training.model.scratch.sum() == 0
        assert training.scheduler.last_epoch == 0


def test_hold_keeps_gradients_that_exist(tmp_path):
    training = Training()
    training.step()
    checkpointer = Checkpointer(tmp_path, training.objects)
    kept = [grad.clone() for grad in gradients(training.model)]
    held = checkpointer.hold()
    training.step()
    training.optimizer.zero_grad(set_to_none=True)
    checkpointer.put_back(held)
    assert all(map(torch.equal, gradients(training.model), kept))


def test_a_compiled_or_wrapped_model_has_the_state_of_the_plain_one(tmp_path):
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    save(Checkpointer(tmp_path, {"model": compiled, "optimizer": optimizer}), 1)
    plain = nn.Linear(2, 2)
    Checkpointer(
        tmp_path,
        {
            "model": plain,
            "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
        },
    ).restore()
    assert torch.equal(plain.weight, model.weight)


def test_digest_tells_names_types_shapes_and_bits_apart(tmp_path):
    def digest(**state):
        return Checkpointer(tmp_path, {"model": Holder(**state)}).digest()

    base = digest(a=torch.zeros(4))
    assert base == digest(a=torch.zeros(4), note="values that are not tensors do not count")
    others = [
        digest(b=torch.zeros(4)),
        digest(a=torch.zeros(2, 2)),
        digest(a=torch.zeros(4, dtype=torch.int32)),
        digest(a=-torch.zeros(4)),
        digest(a=torch.zeros(4), b=torch.zeros(0)),
    ]
    assert len({base, *others}) == 6


@pytest.mark.parametrize("objects", [{"x": object()}, {"a/b": Holder()}, {"": Holder()}])
def test_what_cannot_be_registered(tmp_path, objects):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path, objects)


def test_digests_are_of_models_and_optimizers_by_any_name(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def digest(**objects):
        return Checkpointer(tmp_path, objects).digest()

    before = digest(net=model, opt=optimizer)
    with torch.no_grad():
        model.weight += 1
    assert digest(net=model, opt=optimizer) != before
    assert digest() == ""


def test_the_folder_stays_where_it_was_whatever_training_makes_of_its_own(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    holder = Holder(t=torch.zeros(3))
    checkpointer = Checkpointer("ckpt", {"holder": holder}, keep=1)
    save(checkpointer, 1)
    monkeypatch.chdir(tmp_path / "there")
    save(checkpointer, 2)
    assert committed(tmp_path / "here" / "ckpt") == [2]
    assert list((tmp_path / "there").iterdir()) == []


def test_a_state_may_be_one_tensor_alone(tmp_path):
    class Bare(Holder):
        def state_dict(self):
            return self.state["t"]

        def load_state_dict(self, state):
            self.state = {"t": state}

    objects = {"bare": Bare(t=torch.arange(4)), "mine": Bare(t=torch.arange(3))}
    save(Checkpointer(tmp_path, objects, per_rank=frozenset({"mine"})), 1)
    assert all(report.intact for report in verify(tmp_path))
    others = {"bare": Bare(t=torch.zeros(0)), "mine": Bare(t=torch.zeros(0))}
    Checkpointer(tmp_path, others, per_rank=frozenset({"mine"})).restore()
    assert [one.state["t"].tolist() for one in others.values()] == [[0, 1, 2, 3], [0, 1, 2]]


def test_the_default_device_does_not_matter(tmp_path):
    model = nn.Linear(2, 2)
    save(Checkpointer(tmp_path, {"model": model, "holder": Holder(t=torch.ones(3))}), 1)
    other, holder = nn.Linear(2, 2), Holder()
    with torch.device("meta"):
        Checkpointer(tmp_path, {"model": other, "holder": holder}).restore()
    assert torch.equal(model.weight, other.weight)
    assert holder.state["t"].tolist() == [1, 1, 1]


def test_keeping_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path, {}, keep=0)


def test_a_step_too_large_for_a_name(tmp_path):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path, {}).save(10**8, trigger="period", meta={})


def test_leaving_python_waits_for_the_save_in_flight(tmp_path):
    answer_of("left_open.py", tmp_path)
    assert [report.intact for report in verify(tmp_path)] == [True]
