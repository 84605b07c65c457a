"""A whole study on the cluster, and the gate before and after something is wrong with it."""

import json
import signal
import subprocess
import sys

import pytest
from drilling import DEADLINE_S, ROOT
from waiting import await_

from slurmspot.events import last_step
from slurmspot.runfolder import RunFolder

pytestmark = pytest.mark.cluster

CAMPAIGN = """
[[fault]]
profile = "slurm"
at_step = 25
hold_s = 1
[[fault]]
profile = "kill"
at_step = 60
"""
SMALL = "--steps 120 --step-s 0.1 --channels 16 --layers 1 --context 16 --global-batch 4"
TRAINING = (sys.executable, ROOT / "training" / "gpt.py", *SMALL.split())


def study(*argv, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "slurmspot", "study", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def answer(process):
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out, err
    return process.returncode, json.loads(out), err


def wrong(document):
    return {(one["run"], one["check"]) for one in document["findings"] if not one["holds"]}


def test_a_study_is_interrupted_goes_on_and_opens_the_gate_until_something_is_wrong(tmp_path):
    out = tmp_path / "study"
    (tmp_path / "campaign.toml").write_text(CAMPAIGN)
    argv = ("run", "--out", out, "--period-s", 1, "--period-s", 3, "--gpus-per-node", 4,
            "--campaign", tmp_path / "campaign.toml", "--json", "--", *TRAINING)  # fmt: skip
    begun = study(*argv)
    spot = RunFolder(out / "period-1s")
    await_(lambda: last_step(spot.events) is not None)
    begun.send_signal(signal.SIGINT)
    begun.communicate(timeout=DEADLINE_S)
    assert begun.returncode == 130

    code, document, said = answer(study(*argv))
    assert "period-3s: job" in said
    assert "goes on" in said
    assert (wrong(document), document["problems"]) == (set(), []), said
    assert (code, document["open"]) == (0, True)
    baseline, *others = document["runs"]
    assert [one["run"] for one in others] == ["period-1s", "period-3s"]
    for one in others:
        assert (one["interruptions"], one["recovered"]) == (2, 2)
        assert one["digest"] == baseline["digest"]
    assert json.loads((out / "summary.json").read_text())["open"] is True
    assert "period-3s" in (out / "report.html").read_text()

    damaged = next((out / "period-3s" / "checkpoints").glob("step-*/rank-00000.h5"))
    intact = damaged.read_bytes()
    damaged.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    code, document, _ = answer(study("gate", out, "--json"))
    assert (code, document["open"]) == (1, False)
    assert wrong(document) == {("period-3s", "integrity")}
    damaged.write_bytes(intact)
    assert answer(study("gate", out, "--json"))[0] == 0

    spot.finished.unlink()
    code, document, _ = answer(study("gate", out, "--json"))
    assert code == 1
    assert ("period-1s", "finished") in wrong(document)
