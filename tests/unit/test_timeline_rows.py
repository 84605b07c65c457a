"""sacct text → rows: field orders, delimiters, nasty names, broken lines."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmspot import hostlist
from slurmspot.errors import NotFoundError, UsageError
from slurmspot.timeline.exports import read_rows
from slurmspot.timeline.lines import Lines
from slurmspot.timeline.records import Header
from slurmspot.timeline.rows import Rows
from slurmspot.timeline.text import _read_odd, read_text
from slurmspot.timeline.times import Times

HEADER = "JobID|JobName|State|Submit|Start|End|NodeList|AllocTRES"
END = HEADER.split("|").index("End")
GOOD = "5|train|COMPLETED|2026-01-02T03:00:00|2026-01-02T03:00:01|2026-01-02T04:00:00|n1|cpu=1"


def read(text: str, tz=UTC):
    return read_text(BytesIO(text.encode()), tz=tz)


def rows(*lines: str, header: str = HEADER):
    return read("\n".join([header, *lines]) + "\n")


def jobs(found: Rows):
    """Every row of a job, in order of lines."""
    return sorted((row for rows in found.heads.values() for row in rows), key=lambda r: r.line)


def steps(found: Rows):
    """For each job and moment, the last end of its steps that began then, and their lines."""
    told = {}
    for owner, pieces in found.steps.items():
        for began, end, first, last in pieces:
            ends, lines = told.setdefault((owner, began), (set(), []))
            ends.add(end)
            lines.extend(range(first, last + 1))
    return {
        which: (max(filter(None, ends), default=None), sorted(lines))
        for which, (ends, lines) in told.items()
    }


def test_one_row():
    (row,) = jobs(rows(GOOD))
    assert (row.job_id, row.name, row.state) == ("5", "train", "COMPLETED")
    assert row.start == datetime(2026, 1, 2, 3, 0, 1, tzinfo=UTC)
    assert (row.eligible, row.nodes, row.gpus, row.line) == (None, ("n1",), (0, ""), 2)


@pytest.mark.parametrize("delimiter", ["|", ",", ";", "^", "\t", ":", "&&", "\x1f", " "])
def test_any_delimiter(delimiter):
    name = f"a{delimiter}b=1"
    line = GOOD.replace("n1", "n[1,3]").replace("cpu=1", "cpu=1,gres/gpu=2")
    header = HEADER.replace("|", delimiter)
    record = line.replace("|", delimiter).replace("train", name)
    (row,) = jobs(read(f"{header}\n{record}\n"))
    assert (row.name, row.nodes, row.gpus) == (name, ("n1", "n3"), (2, ""))


def test_trailing_delimiter_of_parsable_and_windows_line_ends():
    text = f"{HEADER}|\r\n{GOOD}|\r\n"
    (row,) = jobs(read(text))
    assert row.gpus == (0, "")


@pytest.mark.parametrize(
    "name",
    [
        "exp|lr=1e-3|é",
        "two\nlines",
        "a\n\nb|c\nd",
        "|",
        "",
        "x|FAILED|2026-01-02T03:00:00",
        "5|train",
        "\x0b\u2028 tab\t",
        "<script>alert(1)</script>",
    ],
)
@pytest.mark.parametrize("place", [0, 1, 4, 7])
def test_a_name_may_hold_anything_and_stand_anywhere(name, place):
    def moved(cells):
        cells = list(cells)
        text = cells.pop(1)
        return [*cells[:place], text, *cells[place:]]

    header = "|".join(moved(HEADER.split("|")))
    first = "|".join(moved(["4", *GOOD.split("|")[1:]]))
    nasty = "|".join(moved(["5", name, *GOOD.split("|")[2:]]))
    last = "|".join(moved(["6", *GOOD.split("|")[1:]]))
    found = rows(first, nasty, last, header=header)
    assert not found.rejected
    assert [(row.job_id, row.name) for row in jobs(found)] == [
        ("4", "train"),
        ("5", name),
        ("6", "train"),
    ]


def test_a_name_that_looks_like_a_record_loses_to_the_job_that_has_steps():
    step = GOOD.replace("5|train", "5.batch|batch")
    found = rows(GOOD.replace("train", "evil\n9|root"), step)
    assert [(row.job_id, row.name) for row in jobs(found)] == [("5", "evil\n9|root")]
    assert [owner for owner, _ in steps(found)] == ["5"]


def test_a_record_cut_short_spoils_only_itself():
    found = rows(GOOD, "6|tra", GOOD.replace("5|", "7|"), "8|train|COMPLETED|2026-01-02T03:0")
    assert [row.job_id for row in jobs(found)] == ["5", "7"]
    assert [(row.line, row.text[:2]) for row in found.rejected] == [(3, "6|"), (5, "8|")]
    assert "2 fields, where the header names 8" in found.rejected[0].reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("5|", "five|", "'five' cannot be the jobid"),
        ("COMPLETED", "done", "'done' cannot be the state"),
        ("2026-01-02T04:00:00", "yesterday", "'yesterday' cannot be the end"),
        ("2026-01-02T04:00:00", "2026-13-02T04:00:00", "month must be in 1..12"),
        ("2026-01-02T03:00:00", "Unknown", "'Unknown' cannot be the submit"),
        ("|n1|", "|n[0-99999999]|", "more than 65536 nodes"),
    ],
)
def test_a_row_that_makes_no_sense_comes_back_with_the_reason(old, new, reason):
    found = rows(GOOD.replace(old, new, 1))
    assert not jobs(found)
    assert reason in found.rejected[0].reason


def test_repeated_headers_and_blank_lines_are_no_rows():
    found = rows(GOOD, "", HEADER, GOOD.replace("5|", "6|"), "")
    assert [row.job_id for row in jobs(found)] == ["5", "6"]
    assert not found.rejected


@pytest.mark.parametrize(
    ("job_id", "job", "step"),
    [
        ("7_0", "7_0", None),
        ("7_[2-5%2]", "7_[2-5%2]", None),
        ("7_[1,3,...]", "7_[1,3,...]", None),
        ("33+0", "33+0", None),
        ("33+0.batch", "33+0", "batch"),
        ("7_0.extern", "7_0", "extern"),
        ("17.interactive", "17", "interactive"),
        ("17.0", "17", "0"),
        ("17.0+1", "17", "0+1"),
    ],
)
def test_job_ids(job_id, job, step):
    found = rows(GOOD.replace("5", job_id, 1))
    assert not found.rejected
    if step is None:
        assert [row.job_id for row in jobs(found)] == [job]
    else:
        assert [owner for owner, _ in steps(found)] == [job]


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-01-02T03:00:00", datetime(2026, 1, 2, 3, tzinfo=UTC)),
        ("2026-01-02T03:00:00+02:00", datetime(2026, 1, 2, 1, tzinfo=UTC)),
        ("2026-01-02T03:00:00Z", datetime(2026, 1, 2, 3, tzinfo=UTC)),
        ("1767322800", datetime(2026, 1, 2, 3, tzinfo=UTC)),
        ("Unknown", None),
        ("None", None),
        ("", None),
    ],
)
def test_times(text, time):
    (row,) = jobs(rows(GOOD.replace("2026-01-02T04:00:00", text)))
    assert row.end == time


def test_times_without_a_zone_are_in_the_given_one():
    zone = timezone(timedelta(hours=-5))
    (row,) = jobs(read(f"{HEADER}\n{GOOD}", tz=zone))
    assert row.submit == datetime(2026, 1, 2, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("billing=2,cpu=2,gres/gpu=8,node=2", (8, "")),
        ("cpu=2,gres/gpu:h100=2,gres/gpu=2", (2, "h100")),
        ("gres/gpu:a100=2,gres/gpu:h100=1", (3, "a100+h100")),
        ("gres/gpu:1g.10gb=4", (4, "1g.10gb")),
        ("cpu=2,gres/gpumem=80G,gres/gpuutil=3", (0, "")),
        ("", (0, "")),
    ],
)
def test_gpus_are_counted_once(tres, gpus):
    (row,) = jobs(rows(GOOD.replace("cpu=1", tres)))
    assert row.gpus == gpus


def test_unknown_gpus_are_not_zero():
    header, line = HEADER.rpartition("|")[0], GOOD.rpartition("|")[0]
    assert jobs(rows(line, header=header))[0].gpus == (None, "")


def test_missing_fields_are_named_with_the_command_that_gives_them():
    with pytest.raises(UsageError) as caught:
        rows("5|train", header="JobID|JobName|Start|End")
    assert "lacks State, Submit" in caught.value.what
    assert "sacct --duplicates --parsable2 --format=" in (caught.value.fix or "")


@pytest.mark.parametrize("text", ["", "\n", "  \n\n", "\ufeff"])
def test_empty_text(text):
    with pytest.raises(NotFoundError):
        read_rows(BytesIO(text.encode()))


def test_many_rows_are_read_in_reasonable_time():
    lines = [GOOD.replace("5", str(number), 1) for number in range(1, 20_001)]
    assert len(jobs(rows(*lines))) == 20_000


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node0", ["node0"]),
        ("node[0-1,3]", ["node0", "node1", "node3"]),
        ("gpu[08-10],cpu1", ["gpu08", "gpu09", "gpu10", "cpu1"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("None assigned", []),
        ("", []),
    ],
)
def test_node_lists(text, names):
    assert list(hostlist.expand(text)) == names


@pytest.mark.parametrize("text", ["n[0-", "n[a]", "n0,,n1", "n]0", "n[0-70000]", "n[0-999][0-999]"])
def test_node_lists_that_make_no_sense(text):
    with pytest.raises(ValueError):
        hostlist.expand(text)


nasty = st.lists(
    st.sampled_from(
        [GOOD, GOOD.replace("5|", "5.batch|"), GOOD.replace("train", "a|b"), "6|two", "", HEADER,
         GOOD.replace("train", "x\ny"), "7|cut|COMPL", GOOD.replace("03:00:00", "soon", 1)]
    ),
    max_size=12,
)  # fmt: skip


def with_care(text: str) -> Rows:
    """Read every line as if it were odd: slow, and never by the column."""
    lines, rows = Lines(BytesIO(text.encode())), Rows()
    assert list(lines.blocks())
    odd = range(1, len(lines))
    _read_odd(Header(lines[0]), lines, odd, Times(UTC), rows)
    return rows


@given(nasty, st.integers(1, 400), st.booleans(), st.booleans())
def test_blocks_of_any_size_hold_the_same(lines, block_bytes, name_last, windows):
    """Where a block ends must not matter, nor that most lines are read by the column."""
    records = [HEADER, *lines]
    if name_last:  # a text that a stray line may continue
        moved = (line.split("|", 2) for line in records)
        records = [
            "|".join([cells[0], *cells[2:], cells[1]]) if len(cells) == 3 else "|".join(cells)
            for cells in moved
        ]
    text = ("\r\n" if windows else "\n").join(records) + "\n"
    whole = read_text(BytesIO(text.encode()), tz=UTC)
    apart = read_text(BytesIO(text.encode()), tz=UTC, block_bytes=block_bytes)
    assert jobs(apart) == jobs(whole)
    assert steps(apart) == steps(whole)
    assert apart.rejected == whole.rejected
    careful = with_care(text)
    assert jobs(careful) == jobs(whole)
    assert steps(careful) == steps(whole)
    assert careful.rejected == whole.rejected


def test_of_steps_kept_together_some_may_go_on():
    ended, running = GOOD.replace("5|", "5.0|"), GOOD.replace("5|", "5.batch|")
    running = "|".join(
        "Unknown" if at == END else cell for at, cell in enumerate(running.split("|"))
    )
    for lines in ((running, ended), (ended, running)):
        ((_, (end, _)),) = steps(rows(GOOD, *lines)).items()
        assert end == jobs(rows(GOOD))[0].end
    ((_, (end, _)),) = steps(rows(GOOD, running, running)).items()
    assert end is None


def test_of_steps_kept_together_one_may_be_the_end_of_a_name():
    start, early, late = (f"2026-01-02T03:00:{second:02d}" for second in (1, 4, 9))
    found = rows(
        f"train|5|COMPLETED|{start}|{start}|{late}",
        "a name of two",
        f"lines|5.batch|COMPLETED|{start}|{start}|{late}",
        f"python3|5.0|COMPLETED|{start}|{start}|{early}",
        f"python3|5.1|COMPLETED|{start}|{start}|{early}",
        header="JobName|JobID|State|Submit|Start|End",
    )
    assert not found.rejected
    ((_, (end, lines)),) = steps(found).items()
    assert (end.second, lines) == (9, [3, 5, 6])


@pytest.mark.parametrize("release", ["22.05", "26.05"])
def test_captures_in_small_blocks(release):
    data = (Path(__file__).parent.parent / "data/sacct" / release / "sacct.txt").read_bytes()
    whole = read_text(BytesIO(data), tz=UTC)
    for size in (1, 100, 1000):
        apart = read_text(BytesIO(data), tz=UTC, block_bytes=size)
        assert (jobs(apart), steps(apart)) == (jobs(whole), steps(whole))
