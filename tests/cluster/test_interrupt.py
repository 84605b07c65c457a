"""Ctrl-C, at any moment of the demo, leaves nothing running and nothing lying about."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import await_

from slurmspot.sandbox.folders import private_base

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


def processes_of(base):
    """Ids of processes whose command line or environment names ``base``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts = [(folder / name).read_bytes() for name in ("cmdline", "environ")]
        except OSError:
            continue
        if any(str(base).encode() in text for text in texts):
            found.append(folder.name)
    return found


@pytest.mark.parametrize("moment", ["starting Slurm", "baseline: running"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_demo_takes_its_cluster_down(tmp_path, moment, number):
    with subprocess.Popen(
        [sys.executable, "-m", "slurmspot", "study", "demo", "--out", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as demo:
        base = private_base() / f"demo-{demo.pid}"
        for line in demo.stderr:
            if moment in line:
                break
        else:
            pytest.fail("the demo ended early")
        assert processes_of(base)
        os.killpg(demo.pid, number)
        demo.stderr.read()
        assert demo.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    await_(lambda: not processes_of(base), told=lambda: processes_of(base))
    assert not base.exists()
