"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(path_type=Path)


def accounts(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--sacct``, ``--tz`` and ``--prices``, as ``sacct_file``, ``tz`` and ``prices``."""
    sacct_file = click.option(
        "--sacct", "sacct_file", type=_FILE, metavar="FILE",
        help="Read what sacct saved (text, JSON, gz) instead of asking the cluster.",
    )  # fmt: skip
    tz = click.option(
        "--tz", metavar="ZONE", help="Time zone of that text; default: this machine's."
    )
    prices = click.option(
        "--prices", type=_FILE, metavar="FILE", help="TOML file of prices; default: an example."
    )
    return sacct_file(tz(prices(command)))
