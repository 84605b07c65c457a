"""What the report says, and that it says it safely."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser

import pytest
import simulated

from slurmspot.errors import UsageError
from slurmspot.report import table
from slurmspot.report.compose import build_document
from slurmspot.report.document import GROUPS, RunReport
from slurmspot.report.drawing import (
    ZOOMS,
    fall_picture,
    loss_picture,
    spread_pictures,
    timeline_picture,
)
from slurmspot.report.html import render_html, write_html
from slurmspot.timeline.phases import ORDER

NOW = simulated.T0 + timedelta(seconds=400)
HITS = [("preempt", 50), ("node-down", 110), ("kill", 170)]


def document(*runs, **options):
    return build_document("Title", list(runs), generated=NOW, **options)


def figures(doc):
    return {figure.name: (figure.value, figure.note) for figure in doc.figures}


@pytest.fixture(scope="module")
def demo():
    return document(simulated.run("baseline", baseline=True), simulated.run("spot", HITS))


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what is asked about."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.urls, self.text = [], [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in {"src", "href", "srcset"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_headline_figures(demo):
    found = figures(demo)
    assert found["Interruptions"] == ("3", "recovered from 3")
    assert found["Steps lost"][0] == "20"
    assert found["Final state"] == ("equal", "to the baseline's, bit for bit")
    assert found["Effective saving"][1] == "nominal discount 70%, example prices"
    assert 0 < float(found["Effective saving"][0].rstrip("%")) < 70
    assert demo.lead[1:] == (
        "The work was interrupted 3 times on purpose.",
        "It came back every time.",
        "Its final state is the baseline's, bit for bit.",
    )


def test_tables(demo):
    kinds = [row[2:4] for row in demo.interruptions.rows]
    assert kinds == [("preemption", "preempt"), ("node fail", "node-down"), ("killed", "kill")]
    assert [row[3] for row in demo.attempts.rows] == [
        *("completed", "preempted, saved", "node fail", "killed", "completed"),
    ]
    assert [row[0] for row in demo.shares.rows] == ["baseline", "spot"]
    for row in demo.shares.rows:
        assert sum(float(cell.rstrip("%")) for cell in row[1:-1]) == pytest.approx(100, abs=0.5)


def test_page_is_whole_and_alone(demo):
    page = render_html(demo)
    parsed = Page(page)
    assert parsed.urls == []
    assert "script" not in parsed.tags
    assert not re.search(r"url\(|@import|https?:", page)
    text = " ".join(parsed.text)
    for words in (
        "Where the time went",
        "Loss",
        "Cost",
        "Interruptions",
        "Attempts",
        "as of 2026-01-01",
    ):
        assert words in text
    assert page.count("<polyline") == 2
    assert page.count('class="break"') == 4  # three interruptions and the legend
    assert 'role="img"' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_everything_a_user_wrote_is_escaped():
    evil = "<script>alert(1)</script>\"'&"
    run = simulated.run(evil, HITS[:1], name=evil)
    page = render_html(replace(document(run, notes=[evil]), title=evil))
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5
    Page(page)


def test_no_interruption():
    doc = document(simulated.run("spot"))
    assert figures(doc)["Interruptions"] == ("0", "")
    assert figures(doc)["Final state"] == ("-", "not compared")
    assert "Nothing interrupted the work." in doc.lead
    assert "<p>None.</p>" in render_html(doc)
    assert "There is no baseline" in render_html(doc)


def test_a_run_that_failed_for_good_is_not_said_to_go_on():
    going = simulated.run("spot", HITS[:2], stop_at=150)
    (job,) = going.jobs
    last = job.attempts[-1]._replace(kind="failed", end=NOW)
    failed = replace(going, jobs=(job._replace(attempts=(*job.attempts[:-1], last)),))
    doc = document(failed)
    assert "It is not finished, and nothing goes on with it." in doc.lead
    assert not any("not finished yet" in text for text in doc.lead)


def test_still_going():
    doc = document(simulated.run("spot", HITS[:2], stop_at=150))
    assert "It is not finished yet." in doc.lead
    assert figures(doc)["Effective saving"][0] == "-"
    assert doc.lanes[0].spans[-1].text.endswith("still going")
    assert doc.lanes[0].spans[-1].end_s == 400
    assert doc.attempts.rows[-1][6] == "so far"
    Page(render_html(doc))


def test_hundreds_of_interruptions_stay_a_page():
    kinds = ["preempt", "node-down", "kill"]
    hits = [(kinds[step % 3], step) for step in range(30, 9000, 30)]
    doc = document(simulated.run("spot", hits, steps=9100, every=100))
    assert figures(doc)["Interruptions"][0] == "299"
    page = render_html(doc)
    assert len(page) < 1_000_000
    assert "Show all 299" in page
    picture = loss_picture(doc)
    assert picture.break_bottom < picture.bottom


def test_nothing_at_all():
    Page(render_html(document()))
    Page(render_html(document(RunReport(label="x", jobs=()))))


def test_a_different_end_is_said():
    spot = simulated.run("spot")
    other = tuple(replace(event, data={**event.data, "digest": "other"}) for event in spot.events)
    doc = document(simulated.run("b", baseline=True), replace(spot, events=other))
    assert figures(doc)["Final state"] == ("differs", "from the baseline's")
    told = document(spot, summary={"final_state_equal": True})
    assert figures(told)["Final state"][0] == "equal"


def test_losses_that_are_no_numbers_are_left_out():
    spot = simulated.run("spot")
    bad = [float("nan"), float("inf"), "x", None]
    events = tuple(
        replace(event, data={**event.data, "loss": bad[index % 4]}) if index % 2 else event
        for index, event in enumerate(spot.events)
    )
    page = render_html(document(replace(spot, events=events)))
    assert "nan" not in page
    assert "<polyline" in page
    silent = tuple(replace(event, data={}) for event in spot.events)
    assert loss_picture(document(replace(spot, events=silent))) is None


def test_unknown_gpus_are_unknown():
    run = simulated.run("spot")
    jobs = tuple(
        job._replace(attempts=tuple(a._replace(gpus=None) for a in job.attempts))
        for job in run.jobs
    )
    assert figures(document(replace(run, jobs=jobs)))["GPU hours"][0] == "unknown"


def test_every_phase_has_a_colour(demo):
    drawn = {phase for phases in GROUPS.values() for phase in phases}
    assert {*ORDER, "backoff", "queue", "run", "teardown", "release"} == drawn
    picture = timeline_picture(demo)
    bars = [bar for row in picture.rows for bar in row.bars]
    assert all(0 <= bar.x <= 100 and 0 < bar.width <= 100 for bar in bars)
    kinds = [sign.kind for row in picture.rows for sign in row.signs]
    assert (kinds.count("injection"), kinds.count("notice")) == (3, 1)
    assert {tick.zoom for tick in picture.ticks} == set(ZOOMS)
    assert len({tick.x for tick in picture.ticks}) == len(picture.ticks)


def test_the_way_from_the_nominal_to_the_effective_saving(demo):
    first, *losses, last = demo.falls
    assert first.after == pytest.approx(0.7)
    assert f"{last.after:.1%}" == figures(demo)["Effective saving"][0]
    assert all(before.after == pytest.approx(after.before)
               for before, after in zip(demo.falls, losses, strict=False))  # fmt: skip
    assert last.after == pytest.approx(losses[-1].after)
    assert 0 < last.after < first.after
    picture = fall_picture(demo)
    assert [bar.kind for bar in picture.bars] == ["end", *["loss"] * 6, "end"]
    assert "These prices are made up as an example" in " ".join(demo.assumptions)
    assert [row[0] for row in demo.costs.rows] == ["baseline", "spot"]


def test_spreads(demo):
    rpo, rto = spread_pictures(demo)
    assert (rpo.name, rto.name) == ("RPO", "RTO")
    assert rpo.summary.startswith("median 5.0 s")
    assert all(0 <= column.x <= rto.width and column.height > 0 for column in rto.columns)


def test_writing(demo, tmp_path):
    path = tmp_path / "report.html"
    write_html(demo, path)
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(UsageError, match="cannot be written"):
        write_html(demo, tmp_path / "no" / "report.html")


def test_text_tables_align_and_stay_on_one_line():
    shown = table.render(["NAME", "N"], [["a\nb\x1b[31m", "5"], ["日本", "1000"]], right="N")
    assert shown.split("\n") == [
        "NAME             N",
        "a\\nb\\x1b[31m     5",
        "日本          1000",
    ]
    assert table.render(["A"], [], bold=True) == "\x1b[1mA\x1b[0m"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0.0 s"),
        (9.96, "10.0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (200_000, "2 d 07 h"),
    ],
)
def test_durations(seconds, text):
    assert table.duration(seconds) == text
