"""Pick TCP ports that nothing else on this machine uses or will be given."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slurmspot.errors import SlurmspotError
from slurmspot.ports import hold

_LEAST = 10_000
_LISTENERS = Path("/proc/net/tcp")
_LISTEN = "0A"  # TCP_LISTEN, see proc(5)
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextmanager
def reserved(count: int) -> Iterator[int]:
    """The first of ``count`` consecutive ports, held until the block ends.

    Outside the range from which the kernel serves outgoing connections, so that a port stays free
    while its daemon is down. The daemons of this sandbox can listen on them at once, and a second
    sandbox that looks for ports meanwhile finds them taken.

    Raises:
        SlurmspotError: no such run of ports is free.
    """
    low, high = (int(word) for word in _EPHEMERAL.read_text().split())
    below, above = range(_LEAST, low - count), range(high + 1, 65_536 - count)
    candidates = [*below[::count], *above[::count]]
    random.SystemRandom().shuffle(candidates)
    for first in candidates:
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(hold(port))
            except OSError:
                continue
            yield first
            return
    raise SlurmspotError(
        f"no {count} consecutive TCP ports are free",
        fix="take down sandboxes that are no longer needed",
    )


def listening(port: int) -> bool:
    """Whether a daemon listens on ``port``; it does not notice that it was asked.

    Slurm's commands try for ten seconds before they say that nobody is there.
    """
    rows = (line.split() for line in _LISTENERS.read_text().splitlines()[1:])
    return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN for row in rows)
