import json
import subprocess
import sys
from pathlib import Path

from slurmspot.checkpoint.verify import verify


def test_savers_that_die_or_race_never_leave_a_wrong_checkpoint(tmp_path):
    script = Path(__file__).with_name("killed_saver.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    at_every_change, at_random, last_step, left, content = json.loads(done.stdout)
    assert at_every_change > 20
    assert at_random == 25
    assert last_step > 3
    # The save after the last kill has cleaned up what the dead ones left.
    assert left == [f"step-{last_step:08d}", f"step-{last_step + 1:08d}"]
    assert content
    for folder in ("anywhere", "race"):
        assert all(report.intact for report in verify(tmp_path / folder))
