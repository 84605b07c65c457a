"""How fast an export of sacct becomes a timeline, beside other readers of as many rows.

    python benchmarks/timeline.py --rows 1000000 --json

Writes exports of ``--rows`` rows (jobs of one to four attempts, three steps each) and reads them,
each reader in a process of its own; of ``--repeat`` runs the least of each figure. Readers use one
core each; ``…_cpu`` compares processor time, which other work on the machine disturbs less. Peak
memory is how much the resident set of the process grew, over the size of the file.

* ``pandas.read_csv`` (C engine) only splits the same file into columns. Its texts become Python's;
  where pyarrow is installed, pandas 3 leaves them in Arrow's memory, about four times as fast.
* slurm2sql 0.9.9 imports into SQLite. It refuses several attempts of one job (UNIQUE constraint on
  the id), so its file gives each attempt an id of its own; slurmspot is timed on that file too.
* reportseff parses and sums up the fields that it asks sacct for; the query itself is left out.

These two are installed into a virtual environment that is thrown away; ``--no-peers`` leaves them
out.
"""

# ruff: noqa: PLC0415  each process imports only the reader that it times

from __future__ import annotations

import argparse
import csv
import json
import random
import re
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from slurmspot.timeline.records import COMMAND

FIELDS = COMMAND.partition("--format=")[2].partition(" ")[0].split(",")
ENDS = ("COMPLETED", "COMPLETED", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED by 1000")
GOES_ON = ("PREEMPTED", "PREEMPTED", "REQUEUED", "NODE_FAIL")
NODES = 200
PEERS = ("slurm2sql==0.9.9", "reportseff")
# Fields that reportseff asks for besides.
SEFF = {
    "AllocCPUS": "64",
    "TotalCPU": "01:02:03",
    "Timelimit": "1-00:00:00",
    "ReqMem": "64G",
    "MaxRSS": "1024K",
    "NNodes": "1",
    "NTasks": "1",
}
SEFF_FIELDS = ("JobIDRaw", "JobID", "State", "Elapsed", "Partition", *SEFF)
EPOCH = datetime(2026, 1, 1)  # noqa: DTZ001  sacct prints the cluster's local time


def records(*, distinct: bool, seed: int = 1) -> Iterator[dict[str, str]]:
    """Rows without end: the fields of each attempt, then of each of its steps."""
    rand = random.Random(seed)
    job_id, clock = 1000, 0
    while True:
        job_id += 1
        clock += rand.randrange(20)
        submit, count = clock, rand.choice((1, 1, 1, 1, 2, 2, 3, 4))
        name, user = f"train-{rand.randrange(500)}", f"user{rand.randrange(60)}"
        first, nodes = rand.randrange(NODES), rand.choice((1, 1, 2, 4))
        for number in range(count):
            if distinct and number:
                job_id += 1
            eligible = submit + (121 if number else 0)
            start = eligible + rand.randrange(600)
            end = start + rand.randrange(30, 20_000)
            gone = end + rand.randrange(6)
            last = number == count - 1
            state = rand.choice(ENDS if last else GOES_ON)
            place = f"gpu[{first:03d}-{first + nodes - 1:03d}]" if nodes > 1 else f"gpu{first:03d}"
            tres = f"billing={8 * nodes},cpu={64 * nodes},gres/gpu={4 * nodes},node={nodes}"
            for step, until in (("", end), (".batch", gone), (".extern", gone), (".0", end)):
                yield {
                    "JobID": f"{job_id}{step}",
                    "JobName": step[1:] or name if step != ".0" else "python3",
                    "User": "" if step else user,
                    "Partition": "" if step else "spot",
                    "State": state if not step else "CANCELLED" if not last else state[:9],
                    "Submit": _shown(start if step else submit),
                    "Eligible": _shown(start if step else eligible),
                    "Start": _shown(start),
                    "End": _shown(until),
                    "Suspended": "00:00:00",
                    "ElapsedRaw": str(until - start),
                    "NodeList": place,
                    "AllocTRES": tres,
                    **SEFF,
                    "Elapsed": f"{(until - start) // 3600:02d}:{(until - start) // 60 % 60:02d}:00",
                    "JobIDRaw": f"{job_id}{step}",
                }
            submit = gone


def _shown(seconds: int) -> str:
    return (EPOCH + timedelta(seconds=seconds)).isoformat()


def write_export(
    path: Path,
    rows: int,
    *,
    fields: Sequence[str] = FIELDS,
    delimiter: str = "|",
    distinct: bool = False,
) -> Path:
    """Write an export of ``rows`` rows; ``distinct`` gives every attempt an id of its own."""
    with path.open("w") as file:
        file.write(delimiter.join(fields) + "\n")
        for row in islice(records(distinct=distinct), rows):
            file.write(delimiter.join([row[name] for name in fields]) + "\n")
    return path


def by_slurmspot(path: Path) -> Callable[[], object]:
    """Jobs, attempts and when their processes were gone."""
    from slurmspot.timeline.attempts import read_timeline

    def read() -> object:
        with path.open("rb") as file:
            return read_timeline(file, tz=UTC)

    return read


def by_read_csv(path: Path) -> Callable[[], object]:
    """Columns of text."""
    import pandas as pd

    return lambda: pd.read_csv(path, sep="|", engine="c")


def by_slurm2sql(path: Path) -> Callable[[], object]:
    """A database in memory."""
    import slurm2sql

    return lambda: slurm2sql.slurm2sql(
        sqlite3.connect(":memory:"), csv_input=csv.DictReader(path.open(), delimiter="|")
    )


def by_reportseff(path: Path) -> Callable[[], object]:
    """A collection of jobs, from the text that sacct would have given it."""
    from reportseff.job_collection import JobCollection

    def read() -> object:
        collection = JobCollection()
        for line in re.split(r"\n", path.read_text())[1:-1]:
            entry = dict(zip(SEFF_FIELDS, line.split("^|^"), strict=True))
            collection.process_entry(entry, add_job=True)
        return collection

    return read


READERS = {
    "slurmspot": by_slurmspot,
    "read_csv": by_read_csv,
    "slurm2sql": by_slurm2sql,
    "reportseff": by_reportseff,
}


def measure_here(reader: str, path: Path) -> dict[str, float]:
    """Read once; meant for a process of its own."""
    read = READERS[reader](path)

    def peak_bytes() -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before, wall, cpu = peak_bytes(), time.perf_counter(), time.process_time()
    kept = read()
    found = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_bytes": peak_bytes() - before,
    }
    del kept
    return found


def measure(
    reader: str, path: Path, *, repeat: int, python: str = sys.executable
) -> dict[str, Any]:
    """The least of each figure over ``repeat`` readings, each in a process of its own."""
    argv = [python, __file__, "--measure", reader, str(path)]
    runs = [
        json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        for _ in range(repeat)
    ]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def peers_python(folder: Path) -> str:
    """The interpreter of a fresh environment that holds the peers, and slurmspot's code."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "slurmspot.pth").write_text(str(Path(__file__).resolve().parents[1]))
    return str(python)


def compare_with_peers(folder: Path, rows: int, repeat: int) -> dict[str, Any]:
    """Both peers and slurmspot, on files that the peers can read."""
    python = peers_python(folder / "peers")
    distinct = write_export(folder / "distinct.txt", rows, distinct=True)
    seff = write_export(folder / "seff.txt", rows, fields=SEFF_FIELDS, delimiter="^|^")
    ours = measure("slurmspot", distinct, repeat=repeat)
    slurm2sql = measure("slurm2sql", distinct, repeat=1, python=python)
    reportseff = measure("reportseff", seff, repeat=1, python=python)
    return {
        "slurmspot_distinct_ids": ours,
        "slurm2sql": slurm2sql,
        "reportseff": reportseff,
        "vs_slurm2sql": round(ours["cpu_s"] / slurm2sql["cpu_s"], 4),
        "vs_reportseff": round(ours["cpu_s"] / reportseff["cpu_s"], 4),
        "note": "slurm2sql 0.9.9 refuses several attempts of one job (UNIQUE constraint): its file "
        "has an id of its own for each attempt",
    }


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("READER", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        reader, path = options.measure
        print(json.dumps(measure_here(reader, Path(path))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_export(folder / "sacct.txt", options.rows)
        size = path.stat().st_size
        ours = measure("slurmspot", path, repeat=options.repeat)
        theirs = measure("read_csv", path, repeat=options.repeat)
        few = min(10_000, options.rows)
        small = measure("slurmspot", write_export(folder / "small.txt", few), repeat=options.repeat)
        found = {
            "rows": options.rows,
            "file_bytes": size,
            "slurmspot": ours,
            "read_csv": theirs,
            "vs_read_csv": round(ours["wall_s"] / theirs["wall_s"], 3),
            "vs_read_csv_cpu": round(ours["cpu_s"] / theirs["cpu_s"], 3),
            "peak_memory_vs_file": round(ours["peak_bytes"] / size, 3),
            "us_per_row": round(1e6 * ours["cpu_s"] / options.rows, 3),
            "us_per_row_at_10000": round(1e6 * small["cpu_s"] / few, 3),
        }
        if not options.no_peers:
            found |= compare_with_peers(folder, options.rows, options.repeat)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for key, value in found.items():
        print(f"{key:24} {value}")


if __name__ == "__main__":
    main()
