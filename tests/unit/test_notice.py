"""Notices: real signals, caught without interrupting anything."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from slurmspot.errors import UsageError
from slurmspot.job.notice import NoticeListener, shielded


@pytest.fixture
def listener():
    seen = threading.Event()
    notices = []

    def note(notice):
        notices.append(notice)
        seen.set()

    listener = NoticeListener({signal.SIGUSR1: 60.0, signal.SIGTERM: 5.0}, on_notice=note).start()
    listener.seen = seen
    listener.notices = notices
    yield listener
    listener.close()


def test_without_a_notice_there_is_no_deadline(listener):
    assert listener.notice is None
    assert listener.remaining_s() is None


def test_a_signal_sets_a_flag_with_a_deadline(listener):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert listener.seen.wait(5)
    assert listener.notice.source == "SIGUSR1"
    assert 55 < listener.remaining_s() <= 60


def test_the_nearest_deadline_counts(listener):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        listener.seen.clear()
        os.kill(os.getpid(), number)
        assert listener.seen.wait(5)
    assert [n.source for n in listener.notices] == ["SIGTERM", "SIGUSR1"]
    assert listener.notice.source == "SIGTERM"
    assert listener.remaining_s() <= 5


def test_a_notice_is_seen_while_the_main_thread_is_blocked(listener):
    """The main thread sits in a C call that never returns to the interpreter."""
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    threading.Timer(1.5, child.stdin.close).start()
    child.wait()
    assert time.monotonic() - began > 1
    assert (listener.notices[0].mono_ns - began * 1e9) / 1e9 < 1


def test_closing_puts_the_former_handlers_back():
    former = signal.getsignal(signal.SIGUSR1)
    listener = NoticeListener({signal.SIGUSR1: 1.0}).start()
    assert signal.getsignal(signal.SIGUSR1) is not former
    listener.close()
    listener.close()
    assert signal.getsignal(signal.SIGUSR1) is former


def test_only_the_main_thread_can_listen():
    caught = []

    def start():
        try:
            NoticeListener({signal.SIGUSR1: 1.0}).start()
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_a_shielded_child_outlives_the_signals(listener):
    with shielded():
        child = subprocess.Popen(
            [sys.executable, "-c", "print(input(), flush=True)"], stdin=-1, stdout=-1, text=True
        )
    for number in (signal.SIGUSR1, signal.SIGTERM):
        child.send_signal(number)
    out, _ = child.communicate("alive\n", timeout=20)
    assert out == "alive\n"
    os.kill(os.getpid(), signal.SIGUSR1)  # this process still hears it
    assert listener.seen.wait(5)
