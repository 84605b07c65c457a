"""How long ``slurmspot --help`` takes, as a ratio to importing click: it may be twice at most."""

import argparse
import json
import statistics
import subprocess
import sys
import time

BAR = 2.0


def seconds(*argv: str) -> float:
    """Wall time of one run of Python."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *argv], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Measure both, turn about, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    peer, ours = [], []
    for _ in range(options.repeats):
        peer.append(seconds("-c", "import click"))
        ours.append(seconds("-m", "slurmspot", "--help"))
    ratio = statistics.median(ours) / statistics.median(peer)
    result = {
        "help_vs_import_click": ratio,
        "bar": BAR,
        "met": ratio <= BAR,
        "ours_s": ours,
        "peer_s": peer,
    }
    print(json.dumps(result) if options.json else f"help / import click: {ratio:.2f} (bar {BAR})")


if __name__ == "__main__":
    main()
