"""The report in a real browser: how fast it opens, what it shows, and that it zooms."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import timedelta
from html import unescape

import pytest
import simulated

from slurmspot.report.compose import build_document
from slurmspot.report.html import write_html

PROBE = """
<script>
addEventListener("load", () => {
  document.body.getBoundingClientRect();  // laid out by now
  const found = {ms: performance.now()};
  const wide = document.querySelector(".wide"), scroll = wide.parentElement;
  const ticks = () => [...document.querySelectorAll("div.axis span")]
    .filter(tick => tick.offsetParent).length;
  found.widths = [], found.ticks = [];
  for (const zoom of [1, 4, 16, 64]) {
    document.querySelector(`label[for=zoom-${zoom}]`).click();
    found.widths.push(wide.offsetWidth / scroll.clientWidth);
    found.ticks.push(ticks());
  }
  found.overflow = document.documentElement.scrollWidth
    - document.documentElement.clientWidth;
  found.empty = [...document.querySelectorAll("svg[role=img]")]
    .filter(svg => svg.getBoundingClientRect().height < 20).length;
  found.unnamed = [...document.querySelectorAll("[role=img]")]
    .filter(image => !image.getAttribute("aria-label")).length;
  found.headings = [...document.querySelectorAll("h2")].map(h => h.textContent);
  document.documentElement.dataset.found = JSON.stringify(found);
});
</script>
"""


@pytest.fixture(scope="module")
def chromium():
    path = shutil.which("chromium")
    assert path, "no Chromium: as root, apt-get install --no-install-recommends chromium"
    return path


def opened(chromium, page, tmp_path, *, size):
    """What the probe saw of a page, in a window of ``size``."""
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    done = subprocess.run(
        [
            chromium,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={size}",
            *("--dump-dom", probed.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    (found,) = re.findall(r'data-found="([^"]*)"', done.stdout)
    return json.loads(unescape(found))


def test_two_thousand_interruptions_open_quickly(chromium, tmp_path):
    kinds = ["preempt", "node-down", "kill"]
    hits = [(kinds[number % 3], 30 * number) for number in range(1, 2001)]
    run = simulated.run("spot", hits, steps=60_100, every=100)
    page = tmp_path / "report.html"
    document = build_document("Many", [run], generated=simulated.T0 + timedelta(days=1))
    write_html(document, page)
    assert page.stat().st_size < 5_000_000
    for _ in range(3):  # this measures the page, not what else the machine has to do
        found = opened(chromium, page, tmp_path, size="1100,900")
        if found["ms"] < 2000:
            break
    assert found["ms"] < 2000
    assert found["widths"] == pytest.approx([1, 4, 16, 64], rel=0.02)
    assert found["ticks"] == sorted(found["ticks"])
    assert found["ticks"][0] > 4
    assert (found["overflow"], found["empty"], found["unnamed"]) == (0, 0, 0)
    assert found["headings"] == [
        *("Where the time went", "Loss", "How much was lost, and for how long", "Cost"),
        *("Interruptions", "Moments of the interruptions", "Attempts", "What these figures assume"),
    ]


def test_nothing_sticks_out_on_a_phone(chromium, tmp_path):
    page = tmp_path / "report.html"
    runs = [simulated.run("baseline", baseline=True), simulated.run("spot", [("kill", 50)])]
    write_html(build_document("Phone", runs, generated=simulated.T0 + timedelta(hours=1)), page)
    found = opened(chromium, page, tmp_path, size="500,900")
    assert (found["overflow"], found["empty"], found["unnamed"]) == (0, 0, 0)
