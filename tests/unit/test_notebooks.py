"""The notebooks run on the data that comes with them, and their .ipynb show the same cells."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ANALYSIS = Path(__file__).parents[2] / "analysis"


def load():
    spec = importlib.util.spec_from_file_location("render", ANALYSIS / "render.py")
    module = sys.modules["render"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


render = load()


@pytest.mark.parametrize("name", render.SCRIPTS)
def test_notebook(name):
    script = (ANALYSIS / f"{name}.py").read_text()
    shown = render.run(script, name)
    page = json.loads((ANALYSIS / f"{name}.ipynb").read_text())
    assert [cell.source for cell, _ in shown] == [cell["source"] for cell in page["cells"]], (
        "render it again: python analysis/render.py"
    )
    fresh = render.notebook(shown, name)
    assert fresh.keys() == page.keys()
    for cell, (_, outputs) in zip(page["cells"], shown, strict=True):
        kinds = [output["output_type"] for output in cell.get("outputs", [])]
        assert kinds == [output["output_type"] for output in outputs]
    assert any("image/png" in o.get("data", {}) for _, outputs in shown for o in outputs)


def test_every_script_is_listed():
    names = {path.stem for path in ANALYSIS.glob("*.py")} - {"render"}
    assert names == set(render.SCRIPTS)
    assert {path.stem for path in ANALYSIS.glob("*.ipynb")} == names


def test_the_data_names_no_one():
    for path in ANALYSIS.rglob("data/**/*"):
        if path.is_file() and path.suffix in {".jsonl", ".txt"}:
            text = path.read_text()
            assert "root" not in text, path
            assert "/home/" not in text, path
            assert "/tmp/" not in text, path


def test_cells():
    text = "# %% [markdown]\n# # Title\n#\n# words\n\n# %%\nx = 1\n\nx\n"
    first, second = render.cells(text)
    assert (first.markdown, first.source) == (True, "# Title\n\nwords")
    assert (second.markdown, second.source) == (False, "x = 1\n\nx")
