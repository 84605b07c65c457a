"""Runs the notebooks' percent scripts and writes each as .ipynb, with what it showed.

    python analysis/render.py              all of them
    python analysis/render.py first_look   one

A script is divided by lines ``# %%`` (code) and ``# %% [markdown]``, the form that jupytext, VS
Code and others open as a notebook. Nothing but pandas and matplotlib is needed to run them.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SCRIPTS = ("first_look", "month_of_a_partition", "periods", "cost")

_MARK = re.compile(r"^# %%(?P<markdown> \[markdown\])?.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell; ``markdown`` text is without its comment signs."""

    markdown: bool
    source: str


def cells(script: str) -> Iterator[Cell]:
    """The cells of a percent script."""
    marks = list(_MARK.finditer(script))
    ends = [*(mark.start() for mark in marks[1:]), len(script)]
    for mark, end in zip(marks, ends, strict=True):
        source = script[mark.end() : end].strip("\n")
        if mark["markdown"]:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        yield Cell(markdown=bool(mark["markdown"]), source=source)


def run(script: str, name: str) -> list[tuple[Cell, list[dict[str, Any]]]]:
    """Run the cells of a script in one namespace, in its folder; each with what it showed."""
    import matplotlib as mpl  # noqa: PLC0415  only to run, not to divide, a script

    mpl.use("agg")
    space: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(FOLDER):
        return [
            (cell, [] if cell.markdown else _outputs(cell.source, name, space))
            for cell in cells(script)
        ]


def _outputs(source: str, name: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    import matplotlib.pyplot as plt  # noqa: PLC0415

    body = ast.parse(source, name)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(body, name, "exec"), space)  # noqa: S102  our own scripts
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        figure = plt.figure(number)
        figure.savefig(
            picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": ""}
        )
        plt.close(figure)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": "figure"}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    if value is not None and not outputs:
        data = {"text/plain": repr(value)}
        if hasattr(value, "to_html"):
            data["text/html"] = value.to_html()
        result = {"output_type": "execute_result", "execution_count": None, "metadata": {}}
        outputs.append({**result, "data": data})
    return outputs


def notebook(shown: list[tuple[Cell, list[dict[str, Any]]]], name: str) -> dict[str, Any]:
    """The notebook (nbformat 4.5) of cells that were run."""
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        },
        "cells": [
            {
                "cell_type": "markdown" if cell.markdown else "code",
                "id": hashlib.sha256(f"{name}-{index}".encode()).hexdigest()[:8],
                "metadata": {},
                "source": cell.source,
                **({} if cell.markdown else {"execution_count": None, "outputs": outputs}),
            }
            for index, (cell, outputs) in enumerate(shown)
        ],
    }


def main(names: list[str]) -> None:
    """Render the named scripts, or all."""
    for name in names or SCRIPTS:
        script = (FOLDER / f"{name}.py").read_text()
        page = notebook(run(script, name), name)
        partial = FOLDER / f"{name}.ipynb.partial"
        partial.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n")
        os.replace(partial, FOLDER / f"{name}.ipynb")  # noqa: PTH105
        print(f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
