"""The live query, against a table of answers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from slurmspot.cluster import sacct
from slurmspot.cluster.command import Output
from slurmspot.errors import NotFoundError, SlurmError, SlurmUnreachableError
from slurmspot.report import history
from slurmspot.timeline.attempts import read_timeline

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
FIELDS = ["JobID", "State", "Restarts", "Submit"]
TEXT = "JobID|State|Submit\n5|COMPLETED|2026-01-01T00:00:00\n"

LOST = (
    "sacct: error: slurm_persist_conn_open: Something happened with the receiving of localhost:6819"
)


class Answers:
    """A runner that answers --helpformat, then the query, and remembers what it was asked."""

    def __init__(self, text=TEXT, *, stderr="", returncode=0):
        self.asked = []
        self.output = Output(stdout=text, stderr=stderr, returncode=returncode)

    def __call__(self, argv, *, stdin=None):
        self.asked.append(list(argv))
        if "--helpformat" in argv and self.output.returncode == 0:
            known = "Account   JobID\nState  Submit"
            return Output(stdout=known, stderr="", returncode=0)
        return self.output


def ask(runner, ids=("5",)):
    return sacct.query(runner, ids, fields=FIELDS, since=SINCE)


def test_asks_for_all_attempts_in_known_fields_bounded_in_time():
    runner = Answers()
    assert ask(runner, ["5", "7"]) == TEXT
    query = runner.asked[1]
    assert query[0] == "sacct"
    assert {"--duplicates", "--parsable2", "--jobs=5,7", "--format=JobID,State,Submit"} < set(query)
    (start,) = [word for word in query if word.startswith("--starttime=")]
    assert datetime.fromisoformat(start.partition("=")[2]).astimezone() == SINCE


def test_a_job_that_accounting_does_not_know():
    with pytest.raises(NotFoundError, match="knows no job 5"):
        ask(Answers("JobID|State|Submit\n"))


@pytest.mark.parametrize(
    ("stderr", "error", "what"),
    [
        ("Slurm accounting storage is disabled", SlurmError, "keeps no accounts"),
        (
            f"{LOST}\nsacct: error: Problem talking to the database: Connection refused",
            SlurmUnreachableError,
            "accounting database does not answer",
        ),
        (
            "sacct: fatal: Could not establish a configuration source",
            SlurmUnreachableError,
            "does not know its Slurm cluster",
        ),
        ("sacct: error: Bad job/step specified: x", SlurmError, "sacct refused"),
    ],
)
def test_refusals(stderr, error, what):
    with pytest.raises(error, match=what) as caught:
        ask(Answers("", stderr=stderr, returncode=1))
    assert type(caught.value) is error
    assert caught.value.why


def test_an_error_with_exit_code_zero_is_an_error():
    runner = Answers("", stderr="sacct: error: Problem talking to the database")
    with pytest.raises(SlurmUnreachableError):
        ask(runner)


def test_an_account_is_asked_for_page_by_page_with_pauses():
    runner, pauses = Answers(), []
    until = SINCE + timedelta(days=16)
    found = sacct.pages(
        runner, user="ann", partition="spot", fields=FIELDS, since=SINCE, until=until,
        wait=pauses.append,
    )  # fmt: skip
    assert list(found) == [TEXT] * 3
    assert len(pauses) == 2
    times = []
    for query in runner.asked[1:]:
        assert {"--user=ann", "--partition=spot", "--duplicates"} < set(query)
        times += [
            datetime.fromisoformat(word.partition("=")[2]).astimezone()
            for word in query
            if word.startswith(("--starttime", "--endtime"))
        ]
    assert (times[0], times[-1]) == (SINCE, until)
    assert times[1:-1:2] == times[2::2]


def test_a_job_on_two_pages_is_one_job():
    page = "JobID|State|Submit|Start|End\n5|COMPLETED|" + "|".join(["2026-01-01T00:00:00"] * 3)
    runner = Answers(f"{page}\n")
    asked = {"user": None, "partition": "a", "since": SINCE, "until": SINCE + timedelta(days=10)}
    found = read_timeline("".join(sacct.pages(runner, **asked, fields=FIELDS, wait=id)))
    assert [len(job.attempts) for job in found.jobs] == [1]
    empty = Answers("JobID|State|Submit|Start|End\n")
    with pytest.raises(NotFoundError, match="no job of anyone in a"):
        history.of_account(**{**asked, "until": SINCE + timedelta(days=1)}, runner=empty)
