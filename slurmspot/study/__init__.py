"""Spot runs against an uninterrupted baseline, and what may be concluded."""
