"""What the documentation says is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_command_reference_is_up_to_date():
    """If this fails, run scripts/make_command_reference.py."""
    script = ROOT / "scripts" / "make_command_reference.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0


def test_every_claim_of_the_readme_names_a_test_that_exists():
    readme = (ROOT / "README.md").read_text()
    claims = readme.partition("## What holds")[2].partition("## More")[0]
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in re.findall(r"`(tests/[^`]+)`", claims):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(test_\w+)`", claims):
        assert f"def {name}(" in tests, name


def test_the_readme_s_example_names_what_exists():
    import slurmspot

    readme = (ROOT / "README.md").read_text()
    for name in re.findall(r"slurmspot\.([A-Z]\w+)", readme):
        assert hasattr(slurmspot, name)


def test_version_and_changelog_agree():
    import slurmspot

    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert not released or released[0] == slurmspot.__version__
