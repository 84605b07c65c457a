"""From sacct rows and events to attempts and phases. Pure."""
