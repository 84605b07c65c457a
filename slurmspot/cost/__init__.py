"""Prices and what a run cost. Pure."""
