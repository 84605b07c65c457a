"""Run ``module:function`` as a program: ``python -m slurmspot.job.call module:function [ARG…]``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from slurmspot.errors import NotFoundError, SlurmspotError, UsageError


def resolve(target: str) -> Callable[..., Any]:
    """The function named by ``module:function``.

    Raises:
        UsageError: not of that form, or not callable.
        NotFoundError: no such module or function.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"{target!r} is not of the form module:function")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise NotFoundError(
                f"there is no module {module_name}",
                why="the working folder and PYTHONPATH do not hold it",
                fix="launch from the folder that holds the module, or set PYTHONPATH",
            ) from None
        raise
    except AttributeError:
        raise NotFoundError(f"module {module_name} has no {name}") from None
    if not callable(found):
        raise UsageError(f"{target} is not callable")
    return found  # type: ignore[no-any-return]  # callable() does not narrow Any


def main() -> None:
    """Call the function with the remaining arguments as strings."""
    sys.path.insert(0, "")
    try:
        function = resolve(sys.argv[1])
    except SlurmspotError as error:
        sys.stderr.write(f"slurmspot: {error}\n")
        sys.exit(error.exit_code)
    function(*sys.argv[2:])


if __name__ == "__main__":
    main()
