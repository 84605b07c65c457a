"""Takes capacity away from a run, on purpose."""
