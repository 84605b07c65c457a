"""The thread that waits for work."""

import os
import threading

from slurmspot.checkpoint.worker import Worker

DEADLINE_S = 10


def threads(name):
    return [one for one in threading.enumerate() if one.name == name]


def test_work_is_done_in_order_in_one_thread():
    worker, seen = Worker("ordered"), []
    for number in range(20):
        done = worker.do(lambda number=number: seen.append((number, threading.get_ident())))
    assert done.wait(DEADLINE_S)
    assert [number for number, _ in seen] == list(range(20))
    (ident,) = {ident for _, ident in seen}
    assert ident != threading.get_ident()


def test_the_thread_ends_with_the_worker_and_not_before_its_work():
    worker, gate, seen = Worker("ending"), threading.Event(), []
    worker.do(lambda: gate.wait(DEADLINE_S))
    done = worker.do(lambda: seen.append(1))
    (thread,) = threads("ending")
    del worker
    gate.set()
    assert done.wait(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert seen == [1]


def test_a_forked_child_gets_a_thread_of_its_own():
    worker = Worker("forked")
    assert worker.do(lambda: None).wait(DEADLINE_S)
    child = os.fork()
    if child == 0:
        os._exit(0 if worker.do(lambda: None).wait(DEADLINE_S) else 1)
    assert os.waitpid(child, 0)[1] == 0
