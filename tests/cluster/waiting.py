"""How a test waits for what a real cluster does: for the event itself, until a deadline."""

import time


def await_(true, deadline_s=180, *, told=lambda: None):
    """Wait until it is true; what it said. ``told`` explains a failure."""
    end = time.monotonic() + deadline_s
    while not (answer := true()):
        assert time.monotonic() < end, told() or f"waited {deadline_s:g} s in vain"
        time.sleep(0.1)
    return answer
