"""Shared by all tests."""

import signal

from hypothesis import settings

# These machines are shared and slow at times; a deadline would measure that, not us.
settings.register_profile("slurmspot", deadline=None)
settings.load_profile("slurmspot")

# Shells have what they start in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
