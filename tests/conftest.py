"""Shared by all tests."""

from hypothesis import settings

# These machines are shared and slow at times; a deadline would measure that, not us.
settings.register_profile("slurmspot", deadline=None)
settings.load_profile("slurmspot")
