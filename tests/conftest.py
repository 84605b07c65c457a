"""Shared by all tests."""

import signal

from hypothesis import settings

# These machines are shared and slow at times; a deadline would measure that, not us.
settings.register_profile("slurmspot", deadline=None)
settings.load_profile("slurmspot")

# What runs in the background ignores these, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
