"""The scripts of this folder: what kills processes or mounts disks does so in one of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def answer_of(name, *argv, under=(), timeout_s=300, **env):
    """Run the script ``name``, by way of the command ``under``; what it printed, as JSON."""
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [*under, sys.executable, "-W", "error", script, *map(str, argv)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")
