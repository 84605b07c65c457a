"""How much memory this process may still take."""

from __future__ import annotations

import re
from pathlib import Path

_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)


def available_bytes(root: Path = Path("/")) -> int:
    """What the machine has to spare, or the control group if that is less.

    Reads /proc/meminfo, and memory.max and memory.current of control group v2 (as Slurm sets
    them) on every level; of version 1, memory.limit_in_bytes and memory.usage_in_bytes.

    Args:
        root: where /proc and /sys stand.
    """
    found = _AVAILABLE.search((root / "proc/meminfo").read_text())
    spare = [int(found[1]) * 1024] if found else []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            tree, limit, used = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            tree, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used = "memory.usage_in_bytes"
        else:
            continue
        group = Path(name.strip("/"))
        for level in (group, *group.parents):
            folder = root / tree / level
            try:
                most = int((folder / limit).read_text())
                spare.append(max(0, most - int((folder / used).read_text())))
            except (OSError, ValueError):  # no limit here
                continue
    return min(spare, default=1 << 62)
