"""The run loop in one process: notices, kills, resumption, and what it says when it cannot."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from slurmspot.checkpoint.ownership import Claim
from slurmspot.errors import (
    CorruptCheckpointError,
    FencedError,
    MismatchedCheckpointError,
    UsageError,
)
from slurmspot.events import read_events
from slurmspot.job.run import Preempted, Run
from slurmspot.job.sampler import GlobalBatchSampler

TOTAL = 30


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURMSPOT_PERIOD_STEPS", "4")
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):  # Training sets them; forgotten afterwards
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    former = signal.getsignal(signal.SIGUSR1)
    yield
    assert signal.getsignal(signal.SIGUSR1) is former


class KilledError(Exception):
    """Stands for a kill: the loop is left without a word."""


class Training:
    """A little training whose every step draws random numbers and depends on the data's order."""

    def __init__(self, folder, *, hidden=5, own_cursor=True, attempt=0, rehearse=False):
        torch.manual_seed(0)
        random.seed(0)
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(3, hidden), nn.Dropout(0.5), nn.Linear(hidden, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        data = TensorDataset(torch.arange(39, dtype=torch.float32).view(13, 3))
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if own_cursor:
            objects["sampler"] = GlobalBatchSampler(13, 2, seed=1)
            self.loader = DataLoader(data, batch_sampler=objects["sampler"])
        else:
            self.loader = DataLoader(data, batch_size=2, sampler=RandomSampler(data))
        os.environ["SLURM_JOB_ID"], os.environ["SLURM_RESTART_COUNT"] = "1", str(attempt)
        self.run = Run.from_env(folder=folder, rehearse=rehearse, **objects)
        self.seen = []

    def go(self, *, until=None, how=None):
        """Train; at step ``until`` be hit by signal ``how``, or killed without a word."""
        with contextlib.suppress(KilledError), self.run as run:
            for step, (batch,) in run.steps(self.loader, total=TOTAL):
                loss = (self.model(batch) - random.random()).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                run.log(loss=loss)
                if not run.rehearsing:
                    self.seen.append((step, batch[:, 0].tolist(), loss.item()))
                    if step == until:
                        self._hit(how)
        return self

    def _hit(self, how):
        if how is None:
            raise KilledError
        os.kill(os.getpid(), how)
        while self.run._listener.notice is None:
            pass


def finished(folder):
    return json.loads((folder / "finished.json").read_text())


def names(folder, attempt):
    return [e.event for e in read_events(folder / "events") if e.attempt == attempt]


@pytest.fixture(params=[True, False], ids=["own cursor", "replayed loader"])
def own_cursor(request):
    return request.param


@pytest.fixture
def baseline(tmp_path, own_cursor):
    return Training(tmp_path / "baseline", own_cursor=own_cursor).go()


def test_any_chain_of_interruptions_ends_like_none(tmp_path, own_cursor, baseline):
    """Kills and notices, twice in one epoch, at an epoch's end (6 steps), right after a save."""
    folder = tmp_path / "spot"
    hits = [(1, None), (5, signal.SIGUSR1), (7, None), (12, signal.SIGTERM), (12, None), (21, None)]
    seen = {}
    for attempt, (until, how) in enumerate([*hits, (None, None)]):
        training = Training(folder, own_cursor=own_cursor, attempt=attempt)
        try:
            training.go(until=until, how=how)
        except Preempted as left:
            assert left.code == 75
            assert left.step == until
        for step, *what in training.seen:
            assert seen.setdefault(step, what) == what  # a repeated step is the same step
    assert finished(folder) == finished(tmp_path / "baseline")
    assert [[step, *what] for step, what in sorted(seen.items())] == [
        list(one) for one in baseline.seen
    ]


def test_a_rehearsal_leaves_no_trace(tmp_path, baseline, own_cursor):
    folder = tmp_path / "rehearsed"
    with pytest.raises(Preempted):
        Training(folder, rehearse=True, own_cursor=own_cursor).go(until=9, how=signal.SIGUSR1)
    resumed = Training(folder, rehearse=True, own_cursor=own_cursor, attempt=1).go()
    assert finished(folder) == finished(tmp_path / "baseline")
    assert [list(one) for one in baseline.seen][9:] == [list(one) for one in resumed.seen]


def test_a_notice_costs_no_step_and_is_told_in_order(tmp_path):
    with pytest.raises(Preempted):
        Training(tmp_path).go(until=6, how=signal.SIGUSR1)
    events = read_events(tmp_path / "events")
    told = [e.event for e in events if e.step == 6 and e.event != "step"]
    assert told == [
        *["agreed", "snapshot_begin", "snapshot_end"],
        *["persist_end", "commit", "exit"],
    ]
    noticed, agreed = (next(e for e in events if e.event == n) for n in ("notice", "agreed"))
    assert noticed.t_ns < agreed.t_ns
    assert noticed.data == {"source": "SIGUSR1", "window_s": 60}
    resumed = Training(tmp_path, attempt=1).go()
    assert resumed.seen[0][0] == 7
    first = next(e for e in read_events(tmp_path / "events") if e.event == "restore_end" and e.step)
    assert first.step == 6


def test_the_first_new_step_after_repeated_ones_is_told(tmp_path):
    Training(tmp_path).go(until=8, how=None)  # step 7 was the last, step 4 is durable
    Training(tmp_path, attempt=1).go()
    events = [e for e in read_events(tmp_path / "events") if e.attempt == "1-1"]
    assert [e.step for e in events if e.event == "first_step"] == [8]


def test_a_finished_run_does_nothing_more(tmp_path, capsys):
    Training(tmp_path).go()
    again = Training(tmp_path, attempt=1)
    assert again.run.complete
    assert again.go().seen == []
    assert "already complete" in capsys.readouterr().err


def test_a_broken_checkpoint_is_passed_over_and_said_so(tmp_path, capsys):
    Training(tmp_path).go(until=9, how=None)
    newest = max((tmp_path / "checkpoints").glob("step-*8"))
    data = newest / "rank-00000.h5"
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    resumed = Training(tmp_path, attempt=1).go()
    assert resumed.seen[0][0] == 5
    assert "checkpoint of step 8 was rejected: rank-00000.h5" in capsys.readouterr().err


def test_where_nothing_verifies_the_run_stops_and_its_log_says_so(tmp_path):
    Training(tmp_path).go(until=5, how=None)
    for data in (tmp_path / "checkpoints").glob("step-*/rank-00000.h5"):
        data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="none of"):
        Training(tmp_path, attempt=1).go()
    assert names(tmp_path, "1-1")[-2:] == ["restore_failed", "exit"]


def test_what_was_just_restored_is_not_saved_again(tmp_path):
    Training(tmp_path).go(until=1, how=None)
    assert names(tmp_path, "1-0").count("commit") == 1
    Training(tmp_path, attempt=1).go(until=1, how=None)
    assert "commit" not in names(tmp_path, "1-1")


def test_a_checkpoint_of_another_model_stops_the_run_and_is_left_alone(tmp_path):
    Training(tmp_path).go(until=5, how=None)
    before = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    former = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(MismatchedCheckpointError, match=r"model/0\.weight"):
        Training(tmp_path, hidden=6, attempt=1).go()
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == before
    assert signal.getsignal(signal.SIGUSR1) is former
    assert names(tmp_path, "1-1")[-1] == "exit"


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path, monkeypatch, capsys):
    """The disk is full while steps 4 and 8 are saved; the checkpoint of the start stays good."""
    from slurmspot.checkpoint import hdf5

    training = Training(tmp_path)
    write, full = hdf5.write, True

    def write_or_fail(*args, **kwargs):
        if full and training.run.step in {4, 5, 8, 9}:
            raise OSError(28, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(hdf5, "write", write_or_fail)
    training.go()
    assert "No space left on device" in capsys.readouterr().err
    assert names(tmp_path, "1-0").count("save_failed") >= 1
    assert finished(tmp_path)["step"] == TOTAL


def test_a_disk_slower_than_a_period_in_seconds_costs_checkpoints_and_no_time(
    tmp_path, monkeypatch, own_cursor, baseline
):
    """Every step is due; the first save after the start takes until another one is skipped."""
    from slurmspot.checkpoint import saving

    monkeypatch.setenv("SLURMSPOT_PERIOD_STEPS", "0")
    monkeypatch.setenv("SLURMSPOT_PERIOD_S", "0.000001")
    folder = tmp_path / "slow"
    training = Training(folder, own_cursor=own_cursor)
    skipped = threading.Event()
    emit, save = training.run._checkpointer._emit, saving.save

    def watch(event, **data):
        emit(event, **data)
        if event == "save_skipped":
            skipped.set()

    def slow(*args, **options):
        assert training.run.step == 0 or skipped.wait(30)
        save(*args, **options)

    monkeypatch.setattr(training.run._checkpointer, "_emit", watch)
    monkeypatch.setattr(saving, "save", slow)
    training.go()
    told = names(folder, "1-0")
    assert told.count("save_skipped") >= 1
    assert told.count("commit") == told.count("snapshot_begin")
    assert finished(folder) == finished(tmp_path / "baseline")


def test_an_attempt_that_has_lost_the_run_ends_and_leaves_nothing(tmp_path):
    zombie = Training(tmp_path)
    Claim(job_id="1", restart=5).take(tmp_path / "checkpoints")
    with pytest.raises(FencedError, match="no longer owns the run"):
        zombie.go()
    assert not list((tmp_path / "checkpoints").rglob("step-*"))
    assert not (tmp_path / "finished.json").exists()
    (left,) = (e for e in read_events(tmp_path / "events") if e.event == "exit")
    assert left.data["code"] == 1
    with pytest.raises(FencedError):
        Training(tmp_path, attempt=1)  # nor may one that comes between
    Training(tmp_path, attempt=6).go()
    assert finished(tmp_path)["step"] == TOTAL


def test_a_run_on_two_tiers_ends_like_one_on_one(tmp_path, monkeypatch):
    Training(tmp_path / "baseline").go()
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("SLURMSPOT_LOCAL", str(tmp_path / "node"))
    folder = tmp_path / "run"
    Training(folder).go(until=7)
    with pytest.raises(Preempted):
        Training(folder, attempt=1).go(until=18, how=signal.SIGUSR1)
    Training(folder, attempt=2).go()
    assert finished(folder) == finished(tmp_path / "baseline")
    commits = [e for e in read_events(folder / "events") if e.event == "commit"]
    assert {e.data["tier"] for e in commits} == {"local", "remote"}
    assert commits[-1].data == {"tier": "remote", "trigger": "final"}
    assert list((tmp_path / "node").iterdir()) == []


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="loader"):
        Run.from_env(folder=tmp_path, loader=[1, 2])
    with pytest.raises(UsageError, match="`random`"):
        Run.from_env(folder=tmp_path, random=nn.Linear(1, 1))


def test_a_lazy_model_is_refused_until_it_has_its_shapes(tmp_path):
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(
        UsageError, match=r"(?s)model/0\.weight has no shape yet.*do:  run one batch"
    ):
        Run.from_env(folder=tmp_path, model=model)
    model(torch.ones(2, 3))
    with Run.from_env(folder=tmp_path, model=model) as run:
        assert len(list(run.steps(range(3)))) == 3


def test_a_rank_without_a_process_group_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        Run.from_env(folder=tmp_path)


def test_an_empty_loader_does_not_turn_for_ever(tmp_path):
    with (
        pytest.raises(UsageError, match="no batch"),
        Run.from_env(folder=tmp_path) as run,
    ):
        list(run.steps([], total=3))


def test_evaluation_can_be_left_too(tmp_path):
    with pytest.raises(Preempted), Run.from_env(folder=tmp_path) as run:
        for _ in run.steps(range(3)):
            os.kill(os.getpid(), signal.SIGUSR1)
            while True:  # an evaluation without end
                run.check()


def test_checking_again_and_again_saves_a_step_once(tmp_path):
    with Run.from_env(folder=tmp_path) as run:
        for step, _ in run.steps(range(9)):
            for _ in range(5 if step in {4, 5} else 0):
                run.check()
    commits = [e.step for e in read_events(tmp_path / "events") if e.event == "commit"]
    assert commits == [0, 4, 8, 9]


@pytest.mark.parametrize("how", ["notice", "kill"])
def test_a_step_that_was_evaluated_in_its_body_counts_as_done(tmp_path, how):
    """The weights have moved: to save them as those of the step before would move them twice."""
    moves = nn.Linear(1, 1)

    def go():
        with Run.from_env(folder=tmp_path, moves=moves) as run:
            before = moves.weight.item() if run.step else 0.0
            assert before == run.step
            for step, _ in run.steps(range(6), total=6):
                with torch.no_grad():
                    moves.weight.fill_(before + 1)
                before = moves.weight.item()
                if (step, before) == (4, 4.0) and not (tmp_path / "hit").exists():
                    (tmp_path / "hit").touch()
                    if how == "notice":
                        os.kill(os.getpid(), signal.SIGUSR1)
                        while True:
                            run.check()
                    run.check()  # step 4 is due
                    run._checkpointer.wait()
                    raise KilledError

    with pytest.raises((Preempted, KilledError)):
        go()
    nn.init.zeros_(moves.weight)
    go()
    assert moves.weight.item() == finished(tmp_path)["step"] == 6


SCRIPT = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
import slurmspot

if __name__ == "__main__":
    loader = DataLoader(torch.arange(1000), num_workers=2)
    with slurmspot.Run.from_env(folder=sys.argv[1]) as run:
        for step, batch in run.steps(loader):
            if step == 5:
                os.killpg(0, signal.SIGUSR1)
                os.killpg(0, signal.SIGTERM)
"""


def test_a_signal_to_the_whole_group_spares_the_data_loader_workers(tmp_path):
    """As Slurm does it: every process of the step gets the signal."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (75, "")


FORKED = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
import slurmspot
from slurmspot.job.sampler import GlobalBatchSampler

if __name__ == "__main__":
    data, forked = torch.arange(20), {"num_workers": 1, "persistent_workers": True}
    sampler = GlobalBatchSampler(20, 4, seed=0)
    loader = DataLoader(data, batch_sampler=sampler, **forked)
    with slurmspot.Run.from_env(folder=sys.argv[1], sampler=sampler) as run:
        evaluation = iter(DataLoader(data, **forked))
        for step, batch in run.steps(loader, total=9):
            if step == 6 and sys.argv[2] == "notice":
                os.kill(os.getpid(), signal.SIGUSR1)
                while run._listener.notice is None:
                    pass
"""


@pytest.mark.parametrize(("how", "code"), [("undisturbed", 0), ("notice", 75)])
def test_living_workers_do_not_keep_the_process_from_leaving(tmp_path, how, code):
    """Forked children hold the notice pipe open and heed no signal; an evaluation's do so too."""
    script = tmp_path / "train.py"
    script.write_text(FORKED)
    argv = [sys.executable, str(script), str(tmp_path / "run"), how]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers"),
        ({"generator": torch.Generator()}, "generator of its own"),
    ],
)
def test_a_loader_that_cannot_be_replayed_is_refused_at_the_first_step(tmp_path, options, words):
    loader = DataLoader(torch.arange(9), shuffle=True, **options)
    with pytest.raises(UsageError, match=words), Run.from_env(folder=tmp_path) as run:
        next(run.steps(loader))


class DrawingLoader:
    """Keeps its own place, as torchdata's StatefulDataLoader does.

    It makes its iterator, which draws random numbers, as soon as it is asked for its state.
    """

    def __init__(self):
        self.place = {"seed": 0, "at": 0}
        self.iterator = None

    def __iter__(self):
        iterator, self.iterator = self._begun(), None
        return iterator

    def _begun(self):
        if self.iterator is None:
            drawn = random.randrange(2**20) + int(torch.randint(2**20, ()))
            self.place = {"seed": self.place["seed"] or drawn, "at": self.place["at"]}
            self.iterator = self._batches()
        return self.iterator

    def _batches(self):
        for at in range(self.place["at"], 7):
            self.place = {**self.place, "at": at + 1}
            yield self.place["seed"] + at
        self.place = {"seed": 0, "at": 0}

    def state_dict(self):
        if self.place["at"] == 0:
            self._begun()
        random.random()
        return dict(self.place)

    def load_state_dict(self, state):
        self.place, self.iterator = dict(state), None
        self._begun()


def drawn_with(loader, folder, kills):
    """What each step drew and got from ``loader``, killed after each of the steps ``kills``."""
    seen = {}
    for attempt, until in enumerate([*kills, None]):
        torch.manual_seed(0)
        random.seed(0)
        os.environ["SLURM_JOB_ID"], os.environ["SLURM_RESTART_COUNT"] = "1", str(attempt)
        batches = loader()
        run = Run.from_env(folder=folder, loader=batches)
        with contextlib.suppress(KilledError), run:
            for step, batch in run.steps(batches, total=20):
                drawn = (int(batch), random.random(), torch.rand(()).item())
                assert seen.setdefault(step, drawn) == drawn
                if step == until:
                    raise KilledError
    return seen


@pytest.mark.parametrize("kills", [(1,), (3, 5, 6), (7, 8, 14, 15)])
def test_a_loader_may_draw_random_numbers_to_tell_its_state(tmp_path, kills):
    """Neither a save nor a restore may cost or add any of those that training draws."""
    undisturbed = drawn_with(DrawingLoader, tmp_path / "baseline", ())
    assert len(set(undisturbed.values())) == 20
    assert drawn_with(DrawingLoader, tmp_path / "spot", kills) == undisturbed


def test_a_second_loop_is_refused(tmp_path):
    with Run.from_env(folder=tmp_path) as run:
        assert len(list(run.steps(range(3)))) == 3
        with pytest.raises(UsageError, match="is complete"):
            next(run.steps(range(3)))


def test_a_loop_that_was_left_is_not_entered_again_but_the_run_may_be_opened_again(tmp_path):
    """The step at which it was left is neither made nor not made, and may not be made twice."""
    torch.manual_seed(0)
    drawn = {}
    with Run.from_env(folder=tmp_path) as run:
        for step, _ in run.steps(range(9)):
            drawn[step] = torch.rand(()).item()
            if step == 6:
                break
        with pytest.raises(UsageError, match=r"step 6 may have been made"):
            next(run.steps(range(9)))
    with Run.from_env(folder=tmp_path) as run:
        for step, _ in run.steps(range(9)):
            number = torch.rand(()).item()
            assert drawn.setdefault(step, number) == number
    assert len(set(drawn.values())) == 9
    assert finished(tmp_path)["step"] == 9


def test_what_was_logged_last_survives_a_kill_after_the_final_commit(tmp_path):
    Training(tmp_path / "baseline").go()
    folder = tmp_path / "spot"

    def killed(*_):
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slurmspot.job.run.write_durably", killed)
        Training(folder).go()
    assert not (folder / "finished.json").exists()
    resumed = Training(folder, attempt=1).go()
    assert resumed.seen == []
    assert finished(folder) == finished(tmp_path / "baseline")
    assert finished(folder)["loss"] > 0


@pytest.mark.parametrize("loss", [math.nan, math.inf, torch.tensor([math.nan])])
def test_a_loss_that_is_no_finite_number_is_null(tmp_path, loss):
    with Run.from_env(folder=tmp_path) as run:
        for _ in run.steps(range(2)):
            run.log(loss=loss, rate=0.5)
    text = (tmp_path / "finished.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert (json.loads(text)["loss"], json.loads(text)["rate"]) == (None, 0.5)
    (done,) = (e for e in read_events(tmp_path / "events") if e.event == "finished")
    assert done.data["loss"] is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("loss", "2.5", "given a str"),
        ("loss", None, "given a NoneType"),
        ("loss", torch.zeros(2, 3), r"given a Tensor of shape \[2, 3\]"),
        ("loss", np.zeros(2), r"given a ndarray of shape \[2\]"),
        ("step", 7, "by the name of 'step'"),
    ],
)
def test_what_cannot_be_logged_is_refused_where_it_is_logged(tmp_path, name, value, words):
    with pytest.raises(UsageError, match=words), Run.from_env(folder=tmp_path) as run:
        run.log(**{name: value})


def test_the_last_step_reaches_the_remote_tier_though_it_was_saved_locally(tmp_path, monkeypatch):
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("SLURMSPOT_LOCAL", str(tmp_path / "node"))
    with Run.from_env(folder=tmp_path / "run") as run:
        assert len(list(run.steps(range(4)))) == 4  # the period is 4 steps
    told = [(e.event, dict(e.data)) for e in read_events(tmp_path / "run" / "events")]
    final = told.index(("commit", {"tier": "remote", "trigger": "final"}))
    assert final < [event for event, _ in told].index("finished")


def test_a_state_that_can_never_be_saved_stops_the_run_at_the_start(tmp_path):
    from slurmspot.errors import CheckpointWriteError

    class Odd:
        def state_dict(self):
            return {"thing": object()}

        def load_state_dict(self, state):
            pass

    with (
        pytest.raises(CheckpointWriteError, match="step 0"),
        Run.from_env(folder=tmp_path, odd=Odd()) as run,
    ):
        next(run.steps(range(3)))
