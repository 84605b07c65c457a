"""TCP ports that are taken now for whoever listens on them later."""

from __future__ import annotations

import socket


def hold(port: int) -> socket.socket:
    """Take ``port`` on all addresses, for as long as what is returned stays open.

    Bound exclusively, and only then opened to ``SO_REUSEADDR``: a server that sets it, as nearly
    all do, can listen on the port at once, and whoever else looks for a free one finds it taken.

    Raises:
        OSError: it is taken already.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held
