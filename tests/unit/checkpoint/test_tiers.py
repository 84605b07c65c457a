"""Two tiers and one owner: what is safe against what, whoever dies, comes back, or lies."""

import dataclasses
import errno
import re
import shutil
import threading
from pathlib import Path

import pytest
import tier_scenarios as scenario
import torch
from click.testing import CliRunner
from rank_pool import RankPool
from run_script import answer_of
from weights import Weights

from slurmspot.checkpoint import manifest, steps
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.disk import Disk
from slurmspot.checkpoint.local import Copy, File, Survey, gathered, survey
from slurmspot.checkpoint.ownership import Claim
from slurmspot.checkpoint.pipeline import READING
from slurmspot.checkpoint.tiers import Pace
from slurmspot.checkpoint.verify import problems_of, verify
from slurmspot.cli.verify import command
from slurmspot.errors import CheckpointWriteError, FencedError, UsageError


class Attempt:
    """One attempt of a run on one node; ``log`` has the events."""

    def __init__(
        self, root, restart, *, node="n0", disk=None, keep=3, tiered=True, spoil=lambda _: None
    ):
        (root / node).mkdir(exist_ok=True)
        spoil(root / node)
        self.log = []
        self.weights = Weights(20_000)  # every number is the step
        self.checkpointer = Checkpointer(
            root / "remote",
            {"weights": self.weights},
            keep=keep,
            claim=Claim(job_id="7", restart=restart),
            local=root / node if tiered else None,
            node=node,
            disk=disk or Disk(),
            emit=lambda event, **data: self.log.append((event, data)),
        )

    def save(self, step, trigger="period", **options):
        self.weights.tensor.fill_(step)
        self.checkpointer.save(step, trigger=trigger, meta={}, **options)
        self.checkpointer.wait()

    def restore(self):
        restored = self.checkpointer.restore()
        if restored is not None:
            assert set(self.weights.tensor.tolist()) == {float(restored.step)}
        return restored

    def drained(self, step):
        self.save(step)
        self.checkpointer.drain()

    def told(self, name):
        return [data for event, data in self.log if event == name]

    def commits(self):
        return [(data["step"], data["tier"]) for data in self.told("commit")]


class Broken(Disk):
    """A remote tier that cannot be written to."""

    def write(self, fd, memory, offset):
        raise OSError(errno.EIO, "Input/output error")


class Lying(Disk):
    """A remote tier that keeps something else than it was given."""

    def write(self, fd, memory, offset):
        memory[0][len(memory[0]) // 2] ^= 1
        return super().write(fd, memory, offset)


class Gate(Disk):
    """A remote tier that takes nothing until it is opened."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()

    def write(self, fd, memory, offset):
        self.reached.set()
        assert self.opened.wait(30)
        return super().write(fd, memory, offset)


def on_node(root, node="n0"):
    found = (root / node).glob("slurmspot-*/owner-*/step-????????")
    return sorted((steps.step_of(path) for path in found), reverse=True)


def on_remote(root):
    return list(steps.committed(root / "remote"))


def node_file(root, step, name="rank-00000.h5", node="n0"):
    (path,) = (root / node).glob(f"slurmspot-*/owner-*/{steps.step_name(step)}/{name}")
    return path


def unfinished(root, node="n0"):
    """Names of all partial checkpoints of either tier."""
    found = [*(root / "remote").rglob("*.partial-*"), *(root / node).rglob("*.partial-*")]
    return sorted(path.name.partition(".")[0] for path in found)


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def left_local(tmp_path, *, local=2, remote=1):
    """A run whose newest step is on the node alone, since its process died while it was drained."""
    first = Attempt(tmp_path, 0)
    first.drained(remote)
    second = Attempt(tmp_path, 1, disk=Broken())
    assert second.restore().step == remote
    second.save(local)
    second.checkpointer.drain()
    assert "nodes' own disks alone" in str(second.checkpointer.failed())
    assert (on_node(tmp_path)[0], on_remote(tmp_path)) == (local, [remote])
    return second


def test_a_step_is_local_first_and_then_remote(tmp_path):
    attempt = Attempt(tmp_path, 0)
    attempt.drained(1)
    assert attempt.commits() == [(1, "local"), (1, "remote")]
    assert problems_of(tmp_path / "remote" / "step-00000001") == []
    for name in ("manifest.json", "rank-00000.h5"):
        remote = tmp_path / "remote" / "step-00000001" / name
        assert remote.read_bytes() == node_file(tmp_path, 1, name).read_bytes()
    assert Attempt(tmp_path, 1).restore().tier == "remote"


def test_without_a_local_tier_all_goes_to_the_remote_one(tmp_path):
    attempt = Attempt(tmp_path, 0, tiered=False)
    attempt.drained(1)
    assert attempt.commits() == [(1, "remote")]


def test_one_step_is_drained_at_a_time_and_the_newest_waits(tmp_path):
    gate = Gate()
    attempt = Attempt(tmp_path, 0, disk=gate)
    attempt.save(1)
    assert gate.reached.wait(30)
    for step in (2, 3, 4):
        attempt.save(step)
    assert on_node(tmp_path) == [4, 3, 2, 1]  # nothing goes that the remote tier does not have
    gate.opened.set()
    attempt.checkpointer.drain()
    assert [data["step"] for data in attempt.told("drain_skipped")] == [2, 3]
    assert on_remote(tmp_path) == [4, 1]
    assert on_node(tmp_path) == [4, 3]


def test_retention_on_both_tiers(tmp_path):
    attempt = Attempt(tmp_path, 0, keep=3)
    for step in range(1, 6):
        attempt.drained(step)
    assert (on_node(tmp_path), on_remote(tmp_path)) == ([5, 4], [5, 4, 3])
    attempt.save(6, trigger="final")
    assert on_remote(tmp_path) == [6, 5, 4]
    assert list((tmp_path / "n0").iterdir()) == []
    attempt.checkpointer.close()


def test_a_newer_local_step_is_promoted(tmp_path):
    left_local(tmp_path)
    third = Attempt(tmp_path, 2)
    restored = third.restore()
    assert (restored.step, restored.tier, restored.passed_over) == (2, "local", [])
    assert third.commits() == [(2, "remote")]
    assert all(report.intact for report in verify(tmp_path / "remote"))
    shutil.rmtree(tmp_path / "n0")
    assert Attempt(tmp_path, 3).restore().step == 2


@pytest.mark.parametrize(("local", "found"), [("n0", 3), ("elsewhere", 1)])
def test_going_back_to_an_earlier_step_takes_another_local_folder(tmp_path, local, found):
    first = Attempt(tmp_path, 0)
    for step in (1, 2, 3):
        first.drained(step)
    for step in (2, 3):
        shutil.move(tmp_path / "remote" / steps.step_name(step), tmp_path / f"aside-{step}")
    assert Attempt(tmp_path, 1, node=local).restore().step == found


def test_an_emptied_disk_costs_the_steps_since_the_remote_one(tmp_path):
    left_local(tmp_path)
    shutil.rmtree(tmp_path / "n0")
    restored = Attempt(tmp_path, 2).restore()
    assert (restored.step, restored.tier) == (1, "remote")


@pytest.mark.parametrize(
    ("spoil", "problem", "damaged"),
    [
        (flip, "content differs|bytes outside", {2}),
        (lambda path: path.unlink(), "rank-00000.h5 is neither on these nodes nor", set()),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is neither on these", {2}),
        (lambda path: flip(path.with_name("manifest.json")), "manifest.json: its own hash", {2}),
        (lambda path: path.with_name("manifest.json").unlink(), "No such file", {2}),
    ],
)
def test_a_local_copy_that_is_not_whole_is_passed_over_and_said_so(
    tmp_path, spoil, problem, damaged
):
    left_local(tmp_path)
    spoil(node_file(tmp_path, 2))
    third = Attempt(tmp_path, 2)
    restored = third.restore()
    assert restored.step == 1
    ((step, words),) = restored.passed_over
    assert step == 2
    assert re.search(problem, words), words
    assert restored.damaged == damaged
    assert on_remote(tmp_path) == [1]
    assert unfinished(tmp_path) == []
    third.drained(2)  # the same step anew takes its place on both tiers
    assert Attempt(tmp_path, 3).restore().step == 2
    assert problems_of(node_file(tmp_path, 2).parent) == []


def test_a_local_copy_stands_in_for_a_damaged_remote_one(tmp_path):
    attempt = Attempt(tmp_path, 0)
    attempt.drained(1)
    attempt.drained(2)
    flip(tmp_path / "remote" / "step-00000002" / "rank-00000.h5")
    restored = Attempt(tmp_path, 1).restore()
    assert (restored.step, restored.tier) == (2, "local")
    assert [step for step, _ in restored.rejected] == [2]
    assert problems_of(tmp_path / "remote" / "step-00000002") == []


def half_drained(tmp_path, step=2):
    """What a drain that was killed before its commit has left of the file; its path."""
    (desk,) = (tmp_path / "remote").glob("owner-*")
    partial = steps.begin(tmp_path / "remote" / steps.step_name(step), desk)
    return Path(shutil.copy(node_file(tmp_path, step), partial / "rank-00000.h5"))


@pytest.mark.parametrize("spoil", [flip, lambda path: path.unlink()])
def test_a_half_drained_copy_stands_in_for_a_file_that_a_node_has_lost(tmp_path, spoil):
    left_local(tmp_path)
    half_drained(tmp_path)
    spoil(node_file(tmp_path, 2))
    third = Attempt(tmp_path, 2)
    restored = third.restore()
    assert (restored.step, restored.tier, restored.passed_over) == (2, "local", [])
    assert problems_of(tmp_path / "remote" / "step-00000002") == []
    third.drained(3)
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("spoil", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_half_drained_copy_that_does_not_verify_is_none(tmp_path, spoil):
    left_local(tmp_path)
    spoil(half_drained(tmp_path))
    node_file(tmp_path, 2).unlink()
    restored = Attempt(tmp_path, 2).restore()
    assert restored.step == 1
    ((step, problem),) = restored.passed_over
    assert step == 2
    assert re.match(r"rank-00000.h5(: | is neither)", problem), problem
    assert on_remote(tmp_path) == [1]


def test_what_is_intact_of_a_damaged_remote_copy_and_of_a_node_makes_a_whole(tmp_path, pool):
    pool.run(4, scenario.drained, tmp_path, 2)
    pool.run(4, scenario.drained_again, tmp_path, 2)
    flip(tmp_path / "remote" / "step-00000002" / "rank-00003.h5")
    shutil.rmtree(tmp_path / "n0")
    (tmp_path / "n0").mkdir()
    answers = pool.run(4, scenario.resume, tmp_path, 2, ["n0", "n1"])
    assert answers == [(2, "local", [])] * 4


def test_a_node_that_comes_back_with_an_abandoned_step_is_passed_over(tmp_path):
    left_local(tmp_path, local=9)
    elsewhere = Attempt(tmp_path, 2, node="n1")
    assert elsewhere.restore().step == 1
    elsewhere.drained(3)
    restored = Attempt(tmp_path, 3, node="n0").restore()
    assert restored.step == 3
    assert restored.passed_over == [
        (9, "an earlier attempt has left it, and the run has gone on without it")
    ]


def test_an_abandoned_step_is_of_use_once_nothing_later_is_intact(tmp_path):
    Attempt(tmp_path, 0, keep=1).drained(5)
    elsewhere = Attempt(tmp_path, 1, node="n1", keep=1)
    assert elsewhere.restore().step == 5
    elsewhere.drained(9)
    flip(tmp_path / "remote" / "step-00000009" / "rank-00000.h5")
    restored = Attempt(tmp_path, 2).restore()
    assert (restored.step, restored.tier) == (5, "local")
    assert [step for step, _ in restored.rejected] == [9]


def test_a_damaged_checkpoint_is_no_reason_to_abandon_a_step(tmp_path):
    left_local(tmp_path, local=7)
    elsewhere = Attempt(tmp_path, 2, node="n1")
    assert elsewhere.restore().step == 1
    elsewhere.drained(9)
    flip(tmp_path / "remote" / "step-00000009" / "rank-00000.h5")
    restored = Attempt(tmp_path, 3).restore()
    assert (restored.step, restored.tier, restored.passed_over) == (7, "local", [])


@pytest.mark.parametrize(("disk", "why"), [(Broken(), "Input/output"), (Lying(), "rank-00000.h5")])
def test_a_remote_tier_that_takes_nothing_costs_no_step(tmp_path, disk, why):
    left_local(tmp_path, local=9)
    third = Attempt(tmp_path, 2, disk=disk)
    with pytest.raises(CheckpointWriteError, match="step 9 is on the nodes' own disks") as caught:
        third.restore()
    assert why in caught.value.why
    assert "free space" in caught.value.fix
    third.checkpointer._local._disk = Disk()
    third.drained(2)  # whoever goes on all the same
    assert on_node(tmp_path) == [9, 2]


def test_what_a_rename_lacks_is_whole_if_it_has_its_manifest(tmp_path):
    """As one that is killed while it puts the same step in the place of another."""
    left_local(tmp_path)
    path = node_file(tmp_path, 2).parent
    path.rename(steps.partial_of(path))
    restored = Attempt(tmp_path, 2).restore()
    assert (restored.step, restored.tier) == (2, "local")


def test_what_a_save_has_not_finished_is_nothing(tmp_path):
    left_local(tmp_path)
    path = node_file(tmp_path, 2).parent
    (path / manifest.NAME).unlink()
    path.rename(steps.partial_of(path))
    restored = Attempt(tmp_path, 2).restore()
    assert (restored.step, restored.passed_over) == (1, [])


def test_what_was_passed_over_goes_once_the_run_has_gone_on(tmp_path):
    left_local(tmp_path, local=9)
    flip(node_file(tmp_path, 9))
    third = Attempt(tmp_path, 2)
    assert third.restore().step == 1
    third.drained(2)
    assert on_node(tmp_path) == [2]


def test_a_node_with_the_files_of_another_run_is_none_of_this_one(tmp_path):
    left_local(tmp_path)
    shutil.rmtree(tmp_path / "remote")
    assert Attempt(tmp_path, 0).restore() is None


def test_a_copy_that_reads_back_differently_is_not_committed(tmp_path):
    attempt = Attempt(tmp_path, 0, disk=Lying())
    attempt.save(1)
    attempt.checkpointer.drain()
    failure = attempt.checkpointer.failed()
    assert "rank-00000.h5" in failure.why
    assert attempt.commits() == [(1, "local")]
    assert attempt.told("drain_failed")[0]["step"] == 1
    assert (on_remote(tmp_path), unfinished(tmp_path)) == ([], [])
    assert on_node(tmp_path) == [1]


def test_a_missing_local_disk_is_named_and_the_remote_tier_stands_in(tmp_path):
    attempt = Attempt(tmp_path, 0)
    (tmp_path / "n0").rmdir()
    attempt.save(1)
    assert attempt.commits() == [(1, "remote")]
    (said,) = attempt.told("save_failed")
    assert (said["tier"], str(tmp_path / "n0") in said["error"]) == ("local", True)
    assert attempt.checkpointer.failed() is None


def test_a_notice_chooses_the_tier_that_fits_the_time_left(tmp_path):
    gate = Gate()
    attempt = Attempt(tmp_path, 0, disk=gate)
    attempt.save(1, trigger="notice", within_s=0)
    assert gate.reached.wait(30)
    assert attempt.commits() == [(1, "local")]
    gate.opened.set()
    attempt.checkpointer.drain()
    attempt.save(2, trigger="notice", within_s=1e6)
    attempt.save(3, trigger="notice", within_s=0, node_stays=False)
    assert attempt.commits()[1:] == [(1, "remote"), (2, "remote"), (3, "remote")]


def test_a_drain_goes_on_beside_a_later_save_that_found_no_local_disk(tmp_path):
    class First(Gate):
        def write(self, fd, memory, offset):
            slow = "step-00000001" in str(Path(f"/proc/self/fd/{fd}").readlink())
            return (super() if slow else Disk()).write(fd, memory, offset)

    gate = First()
    attempt = Attempt(tmp_path, 0, disk=gate)
    attempt.save(1)
    assert gate.reached.wait(30)
    (tmp_path / "n0").rename(tmp_path / "away")
    attempt.save(2)
    assert attempt.commits() == [(1, "local"), (2, "remote")]
    (tmp_path / "away").rename(tmp_path / "n0")
    gate.opened.set()
    attempt.checkpointer.drain()
    assert attempt.commits()[2:] == [(1, "remote")]
    assert attempt.checkpointer.failed() is None


def test_a_pace_is_that_of_the_slowest_of_the_last_three():
    pace = Pace()
    assert pace.fits(10 << 20, 1)
    assert not pace.fits(1 << 30, 10)
    for seconds in (100, 1, 2, 1):
        pace.note(1 << 30, seconds)
    assert pace.fits(1 << 30, 4.1)
    assert not pace.fits(1 << 30, 3.9)


def test_a_drain_without_time_left_is_given_up(tmp_path):
    disk = Gate()
    attempt = Attempt(tmp_path, 0, disk=disk)
    attempt.weights.tensor = torch.zeros(5 << 20)  # more than one piece
    attempt.save(1, trigger="notice", within_s=0)
    assert disk.reached.wait(30)
    threading.Timer(0.2, disk.opened.set).start()
    attempt.checkpointer.drain(within_s=0.01)
    assert [data["step"] for data in attempt.told("drain_skipped")] == [1]
    assert (on_remote(tmp_path), unfinished(tmp_path)) == ([], ["step-00000001"])
    attempt.checkpointer.close()
    second = Attempt(tmp_path, 1)
    assert second.restore().step == 1
    second.drained(2)
    assert unfinished(tmp_path) == []


def test_a_read_back_is_given_up_too_and_later_steps_are_drained(tmp_path):
    class SlowToRead(Gate):
        reads = 0

        def write(self, fd, memory, offset):
            return Disk.write(self, fd, memory, offset)

        def read(self, fd, memory, offset):
            if "remote" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                self.reads += 1
                self.reached.set()
                assert self.opened.wait(30)
            return super().read(fd, memory, offset)

    disk = SlowToRead()
    attempt = Attempt(tmp_path, 0, disk=disk)
    attempt.weights.tensor = torch.zeros(16 << 20)  # more pieces than threads
    attempt.save(1)
    assert disk.reached.wait(30)
    threading.Timer(0.2, disk.opened.set).start()
    attempt.checkpointer.drain(within_s=0.01)
    assert [data["step"] for data in attempt.told("drain_skipped")] == [1]
    assert disk.reads <= READING.threads
    attempt.drained(2)
    assert attempt.commits() == [(1, "local"), (2, "local"), (2, "remote")]


def test_room_is_made_by_what_newer_local_steps_have_made_needless(tmp_path):
    disk = Gate()
    attempt = Attempt(tmp_path, 0, disk=disk)
    attempt.save(1)
    assert disk.reached.wait(30)
    for step in (2, 3, 4, 5):
        attempt.save(step)
    local, ranks = attempt.checkpointer._local, attempt.checkpointer._ranks
    assert local.make_room(ranks)
    assert on_node(tmp_path) == [5, 4, 1]  # one is being drained
    assert not local.make_room(ranks)
    disk.opened.set()
    attempt.checkpointer.drain()
    assert on_remote(tmp_path) == [5, 1]


def test_a_local_tier_needs_a_claim(tmp_path):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path, {}, local=tmp_path)


# ---------------------------------------------------------------- what people do to folders


def test_a_copy_of_a_run_shares_nothing_with_it_on_a_node(tmp_path):
    (tmp_path / "one").mkdir()
    node = tmp_path / "one" / "n0"
    left_local(tmp_path / "one", local=9)
    (tmp_path / "two").mkdir()
    shutil.copytree(tmp_path / "one" / "remote", tmp_path / "two" / "remote")
    (tmp_path / "two" / "n0").symlink_to(node)  # the same disk
    copied = Attempt(tmp_path / "two", 2)
    assert copied.restore().step == 1
    copied.drained(5)
    assert on_node(tmp_path / "one") == [9, 5, 1]
    restored = Attempt(tmp_path / "one", 2).restore()
    assert (restored.step, restored.tier) == (9, "local")


def test_a_run_that_begins_with_copied_steps_alone_goes_on_from_its_nodes(tmp_path):
    for restart in range(3):
        attempt = Attempt(tmp_path, restart)
        attempt.restore()
        attempt.drained(restart + 1)
    shutil.rmtree(attempt.checkpointer._desk)
    fork = Attempt(tmp_path, 0, disk=Broken())
    assert fork.restore().step == 3
    fork.drained(50)
    restored = Attempt(tmp_path, 1).restore()
    assert (restored.step, restored.tier, restored.passed_over) == (50, "local", [])


def add_note(run):
    (run / "owner-notes.txt").touch()


def add_loop(run):
    (run / "owner-loop").symlink_to("owner-loop")


def be_file(run):
    shutil.rmtree(run)
    run.touch()


def be_nowhere(run):
    shutil.rmtree(run)
    run.symlink_to("/nowhere")


def be_file_below(run):
    (next(run.glob("owner-*")) / "step-00000009").touch()


@pytest.mark.parametrize("spoil", [add_note, add_loop, be_file, be_nowhere, be_file_below])
def test_odd_things_on_a_node_do_not_stand_in_the_way_of_the_remote_tier(tmp_path, spoil):
    Attempt(tmp_path, 0).drained(1)
    (run,) = (tmp_path / "n0").iterdir()
    spoil(run)
    second = Attempt(tmp_path, 1)
    assert second.restore().step == 1
    second.drained(2)
    assert second.checkpointer.failed() is None
    assert second.commits()[-1] == (2, "remote")


def test_a_file_in_place_of_the_local_folder_leaves_the_remote_tier(tmp_path):
    Attempt(tmp_path, 0).drained(1)
    shutil.rmtree(tmp_path / "n0")
    second = Attempt(tmp_path, 1, node="n1", spoil=be_file)
    assert second.restore().step == 1
    second.drained(2)
    assert second.commits() == [(2, "remote")]


def test_why_a_disk_could_not_be_read_is_said_of_what_is_missing(tmp_path):
    (tmp_path / "n1").touch()
    broken = survey(tmp_path / "n1", "n1")
    copy = Copy(attempt="a", step=5, files=(File("a", 5, "f", 10),))
    (found,) = gathered([surveyed("n0", [copy]), broken])
    assert found.problem == (
        "f is neither on these nodes nor on the remote tier (n1: n1: Not a directory)"
    )


# ---------------------------------------------------------------- one owner


@pytest.mark.parametrize("tiered", [True, False])
def test_a_zombie_cannot_commit_and_leaves_nothing(tmp_path, tiered):
    zombie = Attempt(tmp_path, 0, tiered=tiered, keep=1)
    zombie.drained(1)
    living = Attempt(tmp_path, 1, node="n1", tiered=tiered)
    living.restore()
    for trigger in ("period", "final"):
        with pytest.raises(FencedError, match="no longer owns the run") as caught:
            zombie.save(5, trigger=trigger)
        assert "attempt 7-1 has taken it over" in str(caught.value)
    assert zombie.told("save_failed")[-1]["error"] == "attempt 7-1 has taken it over"
    living.drained(2)
    assert on_remote(tmp_path) == [2, 1]
    assert unfinished(tmp_path) == []
    if tiered:
        assert on_node(tmp_path) == [1]


def test_a_zombie_that_loses_the_run_while_it_writes_cannot_commit(tmp_path):
    gate = Gate()
    zombie = Attempt(tmp_path, 0, disk=gate)
    zombie.save(1)
    assert gate.reached.wait(30)
    living = Attempt(tmp_path, 1, node="n1")
    gate.opened.set()
    zombie.checkpointer.drain()
    assert isinstance(zombie.checkpointer.failed(), FencedError)
    assert on_remote(tmp_path) == []
    living.drained(1)
    assert (on_remote(tmp_path), unfinished(tmp_path)) == ([1], [])


def test_an_earlier_start_that_opens_the_run_late_is_refused(tmp_path):
    Attempt(tmp_path, 3)
    with pytest.raises(FencedError, match="no longer owns"):
        Attempt(tmp_path, 2)
    Attempt(tmp_path, 3)  # the same start may, and takes over
    Attempt(tmp_path, 4)


# ---------------------------------------------------------------- several nodes


def surveyed(node, copies, *files):
    return Survey(node=node, copies=tuple(copies), files=frozenset(files))


def test_what_nodes_hold_is_put_together():
    f, g = File("a", 5, "f", 10), File("a", 5, "g", 20)
    whole = Copy(attempt="a", step=5, seal="1", turn=1, files=(f, g))
    torn = Copy(attempt="b", step=6, problem="torn")
    other = dataclasses.replace(whole, attempt="c", seal="2", files=(File("c", 5, "f", 10),))
    surveys = [
        surveyed("n0", [whole, torn], f),
        surveyed("n0", [whole, torn], f),
        surveyed("n1", [whole, other], g, File("a", 5, "f", 9)),
    ]
    remote = frozenset({File("", 5, "g", 20), File("", 5, "f", 8)})
    found = gathered(surveys, remote)
    assert [(one.step, one.attempt, one.problem) for one in found] == [
        (6, "b", "torn"),
        (5, "a", ""),
        (5, "c", "f is neither on these nodes nor on the remote tier"),
    ]
    assert found[1].carriers == {"f": (0,), "g": (2, 1)}


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


def killed_while_draining(pool, root):
    """Two nodes of two ranks: step 1 is on both tiers, step 2 on the nodes' disks alone."""
    pool.run(4, scenario.drained, root, 2)
    pool.run(4, scenario.not_drained, root, 2)


def test_nodes_that_stay_resume_from_their_own_disks(tmp_path, pool):
    killed_while_draining(pool, tmp_path)
    assert not scenario.remote(tmp_path, 2)
    answers = pool.run(4, scenario.resume, tmp_path, 2, ["n0", "n1"])
    assert answers == [(2, "local", [])] * 4
    assert scenario.remote(tmp_path, 2)


def test_nodes_may_change_places_and_ranks_their_number(tmp_path, pool):
    killed_while_draining(pool, tmp_path)
    answers = pool.run(2, scenario.resume, tmp_path, 1, ["n1", "n0"])
    assert answers == [(2, "local", [])] * 2


@pytest.mark.parametrize("lost", ["n0", "n1"])
def test_a_lost_node_costs_the_steps_since_the_remote_one(tmp_path, pool, lost):
    killed_while_draining(pool, tmp_path)
    shutil.rmtree(tmp_path / lost)
    (tmp_path / lost).mkdir()
    answers = pool.run(4, scenario.resume, tmp_path, 2, ["n0", "n1"])
    assert len(answers) == 4
    for step, tier, passed_over in answers:
        assert (step, tier) == (1, "remote")
        ((other, problem),) = passed_over
        assert (other, problem.endswith("is neither on these nodes nor on the remote tier")) == (
            2,
            True,
        )


def test_parts_of_two_attempts_are_never_put_together(tmp_path, pool):
    """The files of both have the same names and sizes, and together they would be complete."""
    killed_while_draining(pool, tmp_path)
    for node in ("n0", "n1"):
        (tmp_path / node).rename(tmp_path / f"{node}-away")
    pool.run(4, scenario.not_drained_elsewhere, tmp_path, 2, ["n2", "n3"])
    (tmp_path / "n0-away").rename(tmp_path / "n0")  # a node that comes back
    shutil.rmtree(tmp_path / "n2")  # and one that is lost
    answers = pool.run(4, scenario.resume, tmp_path, 2, ["n0", "n3"], 3)
    for step, tier, passed_over in answers:
        assert (step, tier) == (1, "remote")
        assert [other for other, _ in passed_over] == [2, 2]
        assert all("is neither on these nodes" in problem for _, problem in passed_over)


def test_a_drain_that_broke_down_is_told_at_every_later_step(tmp_path, pool):
    for told in pool.run(4, scenario.cut_off, tmp_path, 2):
        for step, words in enumerate(told, 1):
            assert words.startswith(f"step {step} is on the nodes' own disks alone")
        assert all("start the job again" in words for words in told[1:])


def test_how_long_ranks_wait_for_each_other_can_be_chosen(pool):
    assert pool.run(2, scenario.late, 1)[0]
    assert not any(pool.run(2, scenario.late, 60))


def test_ranks_and_disks_that_are_lost_at_any_moment(memory):
    answer = answer_of("killed_gang.py", memory, 17, GLOO_SOCKET_IFNAME="lo")
    kills, mixed = answer["saving"]
    assert kills > 5
    assert mixed > 0  # what a drain had done was what saved a step
    assert answer["mixing"] >= 4


def test_a_disk_that_is_missing_on_one_node_is_missing_for_all(tmp_path, pool):
    answers = pool.run(4, scenario.save_without_disk, tmp_path, 2)
    assert answers == [[(3, "remote")], [], [], []]


@pytest.fixture(scope="module")
def two_nodes(pool, tmp_path_factory):
    """Two nodes with a part each of two steps; the second of another attempt."""
    root = tmp_path_factory.mktemp("nodes")
    killed_while_draining(pool, root)
    return root


def shown(path):
    done = CliRunner().invoke(command, [str(path)], standalone_mode=False)
    return done.return_value, [" ".join(line.split()) for line in done.stdout.splitlines()[1:]]


def test_a_nodes_folder_is_verified_as_the_part_that_it_is(two_nodes):
    (root,) = (two_nodes / "n1").glob("slurmspot-*")
    for path in (two_nodes / "n1", root):
        code, lines = shown(path)
        assert code == 0
        assert [line.split(" ", 3)[0] for line in lines] == ["2", "1"]
        assert all(
            line.endswith("intact: the part of n1; the rest is on n0") and " local " in line
            for line in lines
        )
    for report in verify(node_file(two_nodes, 2, "rank-00002.h5", "n1").parent):
        known = manifest.read(report.path)
        sizes = {file.name: file.size_bytes for file in known.files}
        assert report.size_bytes == sizes["rank-00002.h5"] + sizes["rank-00003.h5"]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (flip, "rank-00002.h5"),
        (lambda path: path.unlink(), "rank-00002.h5: is missing"),
        (
            lambda path: path.rename(path.with_name("rank-00001.h5")),
            "rank-00001.h5: belongs to node n0; rank-00002.h5: is missing",
        ),
        (lambda path: path.with_name("rank-00007.h5").touch(), "rank-00007.h5: is not in the"),
        (lambda path: path.with_name("manifest.json").unlink(), "manifest.json: No such file"),
        (
            lambda path: shutil.copy(
                next(path.parents[4].glob("n0/*/owner-*/step-00000001/manifest.json")), path.parent
            ),
            "manifest.json: belongs to step 1",
        ),
    ],
)
def test_damage_of_a_nodes_part_is_found(two_nodes, tmp_path, spoil, problem):
    shutil.copytree(two_nodes, tmp_path, dirs_exist_ok=True)
    spoil(node_file(tmp_path, 2, "rank-00002.h5", "n1"))
    newest, older = verify(tmp_path / "n1")
    assert "; ".join(map(str, newest.problems)).startswith(problem)
    assert older.intact
    assert shown(tmp_path / "n1")[0] == 1
    assert shown(tmp_path / "n0")[0] == 0


def test_a_part_under_the_name_of_another_node_is_not_intact(two_nodes, tmp_path):
    (root,) = (two_nodes / "n1").glob("slurmspot-*")
    for name in (root.name.replace("-n1", "-n0"), root.name.replace("-n1", "-n7"), "somewhere"):
        moved = shutil.copytree(root, tmp_path / name)
        assert not any(report.intact for report in verify(moved))


# ---------------------------------------------------------------- killed at any moment


def test_killed_at_every_change_of_save_drain_prune_and_promotion(memory):
    saving, promoting, from_local, (_, last_step) = answer_of("killed_drainer.py", memory)
    assert saving > 60
    assert promoting > 5
    assert from_local > 10  # the local tier was what saved a step, often enough
    assert last_step > 3
