"""Notices that are no signals: the real protocols on loopback, and a touched file."""

import http.client
import json
import signal
import threading
import time
from pathlib import Path

import pytest

from slurmspot.errors import UsageError
from slurmspot.faults.metadata import MetadataService
from slurmspot.job import sources
from slurmspot.job.notice import NoticeListener
from slurmspot.settings import JobEnvironment


@pytest.fixture
def service():
    with MetadataService("http://127.0.0.1:0") as service:
        yield service


def at(service, node="node0"):
    return service.url.replace("%n", node)


def ask(service, path, method="GET", **headers):
    return sources.fetch(
        at(service),
        path,
        method=method,
        headers={k.replace("_", "-"): v for k, v in headers.items()},
    )


def test_aws_says_404_until_the_notice_and_wants_a_token(service):
    path = "/latest/meta-data/spot/instance-action"
    assert ask(service, path).status == 401
    assert ask(service, "/latest/api/token", "PUT").status == 400
    token = ask(service, "/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    assert ask(service, path, X_aws_ec2_metadata_token=token.text).status == 404
    source = sources.Aws(at(service))
    assert source.ask() is None
    service.warn("node1", "cloud-aws", time.time() + 100)
    assert source.ask() is None  # that is another machine
    service.warn("node0", "cloud-aws", time.time() + 100)
    assert 95 < source.ask() <= 100


def test_aws_gets_a_new_token_when_the_old_one_has_expired(service):
    source = sources.Aws(at(service))
    service.warn("node0", "cloud-aws", time.time() + 100)
    source._token = "expired"
    assert source.ask() is None
    assert source.ask() is not None


def test_gcp_is_told_as_soon_as_the_value_changes(service):
    source = sources.Gcp(at(service), hold_s=20)
    assert source.ask() is None
    began = time.monotonic()
    threading.Timer(0.3, service.warn, ("node0", "cloud-gcp", 0.0)).start()
    assert source.ask() == 30
    assert 0.2 < time.monotonic() - began < 10
    assert ask(service, "/computeMetadata/v1/instance/preempted").status == 403


def test_gcp_asks_again_when_nothing_has_changed(service):
    source = sources.Gcp(at(service), hold_s=0)
    assert [source.ask(), source.ask()] == [None, None]


def test_azure_heeds_events_of_its_own_machine_alone(service):
    source = sources.Azure(at(service))
    assert source.ask() is None
    service.warn("node1", "cloud-azure", time.time() + 40)
    assert source.ask() is None
    service.warn("node0", "cloud-azure", time.time() + 40)
    assert 35 < source.ask() <= 40
    assert ask(service, "/metadata/scheduledevents?api-version=2020-07-01").status == 400


@pytest.mark.parametrize(
    ("event", "left"),
    [
        ({"EventType": "Preempt", "Resources": ["vm"], "NotBefore": ""}, 0),
        ({"EventType": "Preempt", "Resources": ["vm"], "NotBefore": "gibberish"}, 0),
        ({"EventType": "Reboot", "Resources": ["vm"], "NotBefore": ""}, None),
        ({"EventType": "Preempt", "Resources": ["other"], "NotBefore": ""}, None),
        ("not an event", None),
    ],
)
def test_odd_events_of_azure(monkeypatch, event, left):
    def answer(base, path, **_):
        text = "vm" if "instance" in path else json.dumps({"Events": [event]})
        return sources.Answer(200, text)

    monkeypatch.setattr(sources, "fetch", answer)
    assert sources.Azure("http://x").ask() == left


@pytest.mark.parametrize("kind", [sources.Aws, sources.Gcp, sources.Azure])
def test_a_service_that_is_not_there_is_no_notice(kind):
    assert kind("http://127.0.0.1:9").ask() is None


@pytest.mark.parametrize(
    ("text", "left"), [("", 60), ("25\n", 25), ("soon", 60), ("-1", 60), ("nan", 60)]
)
def test_a_touched_file(tmp_path, text, left):
    source = sources.File(tmp_path / "notice", 60)
    assert source.ask() is None
    (tmp_path / "notice").write_text(text)
    assert source.ask() == left


def test_one_rank_of_each_node_asks_for_all():
    job = JobEnvironment(
        notice=("aws", "gcp", "azure", "file:/n/%n"), metadata_url="http://h:1/%n", host="node3"
    )
    found = sources.of(job)
    assert [source.name for source in found] == ["aws", "gcp", "azure", "file"]
    assert found[0]._base == "http://h:1/node3"
    assert found[3]._path == Path("/n/node3")
    assert sources.of(JobEnvironment(notice=("aws",), local_rank=1)) == []


def test_an_unknown_source_is_refused():
    for name in ("ibm", "file:", "file"):
        with pytest.raises(UsageError, match="no source of notices"):
            JobEnvironment.read({"SLURMSPOT_NOTICE": name})
    assert JobEnvironment.read({"SLURMSPOT_NOTICE": "aws,file:/x"}).notice == ("aws", "file:/x")


def test_all_sources_end_in_the_same_flag(service):
    seen = threading.Event()
    notices = []

    def note(notice):
        notices.append(notice)
        seen.set()

    listener = NoticeListener(
        {signal.SIGUSR1: 60.0}, sources=[sources.Gcp(at(service), hold_s=20)], on_notice=note
    ).start()
    try:
        assert listener.notice is None
        service.warn("node0", "cloud-gcp", 0.0)
        assert seen.wait(10)
        assert (listener.notice.source, listener.notice.machine) == ("gcp", True)
        assert 25 < listener.remaining_s() <= 30
    finally:
        listener.close()
    assert len(notices) == 1


def test_what_comes_after_the_close_is_not_heard():
    class Late:
        name, interval_s = "late", 0.01
        answer = threading.Event()

        def ask(self):
            self.answer.wait(10)
            return 5.0

    late, notices = Late(), []
    listener = NoticeListener({}, sources=[late], on_notice=notices.append).start()
    listener.close()
    late.answer.set()
    for thread in threading.enumerate():
        if thread.name == "slurmspot-late":
            thread.join(10)
    assert notices == []


def test_an_unknown_path_and_a_caller_that_hangs_up(service):
    assert ask(service, "/nothing").status == 404
    link = http.client.HTTPConnection(*at(service).removeprefix("http://").split("/")[0].split(":"))
    path = "/node0/computeMetadata/v1/instance/preempted"
    path += "?wait_for_change=true&timeout_sec=1&last_etag=FALSE"
    link.request("GET", path, headers={"Metadata-Flavor": "Google"})
    link.close()
    assert sources.Gcp(at(service), hold_s=0).ask() is None


def test_a_port_that_is_taken_is_told(service):
    with pytest.raises(UsageError, match="cannot serve notices"):
        MetadataService(service.url)
