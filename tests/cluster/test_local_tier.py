"""Checkpoints on the nodes' own disks, on a real cluster: nodes that stay, and one that is lost."""

import sys
import threading
from pathlib import Path

import pytest
from waiting import await_

from slurmspot.cluster import scontrol, submit
from slurmspot.cluster.spec import Spec
from slurmspot.cluster.watch import follow
from slurmspot.events import read_events
from slurmspot.faults.injector import Injector
from slurmspot.job.rank import RankCommand
from slurmspot.runfolder import RunFolder

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120


def training():
    """A command that trains a small model for longer than the test takes."""
    size = ("--channels", "16", "--layers", "1", "--context", "16", "--global-batch", "4")
    script = str(ROOT / "training" / "gpt.py")
    return (sys.executable, script, *size, "--steps", "100000", "--step-s", "0.05")


class TieredRun:
    """A run on two nodes whose remote tier can be taken away for a while."""

    def __init__(self, path, sandbox):
        first, *_ = sandbox.spec.node_names
        spec = Spec(
            command=training(),
            nodes="2",
            nodelist=",".join(sandbox.spec.node_names[:2]),
            period_steps=10,
            local=str(sandbox.local(first)).replace(first, "{node}"),
        )
        self.folder = RunFolder(path)
        self.job_id = submit.submit(spec, self.folder, submit.check(spec), RankCommand.of(spec))
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self):
        for _ in follow(self.job_id, interval_s=0.3):
            pass

    def events(self, name, **having):
        return [
            event
            for event in read_events(self.folder.events, steps=False)
            if event.event == name and having.items() <= event.data.items()
        ]

    def await_commit(self, tier, *, above):
        """The first step above ``above`` that is on ``tier``."""
        return await_(
            lambda: min(
                (e.step for e in self.events("commit", tier=tier) if e.step > above), default=None
            )
        )

    def hit_while_remote_is_away(self, hit):
        """(local, remote): the newest step of each tier when the attempt has ended."""
        self.await_commit("remote", above=0)
        away = self.folder.path / "away"
        self.folder.checkpoints.rename(away)
        self.folder.checkpoints.touch()  # now nothing can be made in it
        await_(lambda: self.events("drain_failed"))
        last = max(e.step for e in self.events("commit", tier="local"))
        self.await_commit("local", above=last)
        hitting = threading.Thread(target=hit, daemon=True)
        hitting.start()
        await_(lambda: scontrol.show_job(self.job_id).state != "RUNNING")
        self.folder.checkpoints.unlink()
        away.rename(self.folder.checkpoints)
        hitting.join(DEADLINE_S)
        first = [e for e in self.events("commit") if e.attempt.endswith("-0")]
        local = max(e.step for e in first if e.data["tier"] == "local")
        remote = max(e.step for e in first if e.data["tier"] == "remote")
        assert local > remote
        return local, remote

    def restored(self):
        """What the second attempt went on from."""
        await_(lambda: len({e.attempt for e in self.events("restore_end")}) == 2)
        return max(self.events("restore_end"), key=lambda event: event.t_ns)


@pytest.fixture
def run(tmp_path, sandbox):
    run = TieredRun(tmp_path / "run", sandbox)
    yield run
    scontrol.cancel(run.job_id)


def test_ranks_that_are_killed_go_on_from_their_nodes_disks(run):
    local, _ = run.hit_while_remote_is_away(Injector(run.folder).kill)
    restored = run.restored()
    assert (restored.step, restored.data["tier"]) == (local, "local")
    run.await_commit("remote", above=local)


def test_a_lost_node_takes_its_disk_along(run, sandbox):
    lost = sandbox.spec.node_names[1]

    def lose():
        sandbox.vanish(lost)
        sandbox.run(["scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost"])
        sandbox.revive(lost)

    local, remote = run.hit_while_remote_is_away(lose)
    restored = run.restored()
    assert (restored.step, restored.data["tier"]) == (remote, "remote")
    assert restored.data["passed_over"][0]["step"] == local
    run.await_commit("remote", above=remote)
