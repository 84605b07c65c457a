"""A few processes that act as ranks, started once because importing torch is what takes time."""

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path


def _serve(pipe):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        call, args, rank, size, store = job
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size
            )
            try:
                pipe.send((True, call(*args)))
            finally:
                dist.destroy_process_group()
        except Exception:  # noqa: BLE001 - the test that asked shows it
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """Runs functions of an importable module as the ranks of one gloo world."""

    def __init__(self, size):
        self._start(size)

    def _start(self, size):
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size, call, *args, timeout_s=180):
        """What ``call(*args)`` returned on each of ``size`` ranks."""
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:size]):
                pipe.send((call, args, rank, size, str(Path(folder) / "store")))
            answers = []
            for rank, pipe in enumerate(self._pipes[:size]):
                if not pipe.poll(timeout_s):
                    self._start_again()
                    raise AssertionError(f"rank {rank} hangs in {call.__name__}")
                answers.append(pipe.recv())
        failures = [text for good, text in answers if not good]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def _start_again(self):
        """Leave no rank waiting for another: the next test shall not hang as well."""
        for process in self._processes:
            process.kill()
        self._start(len(self._processes))

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
