"""The long form of the tests that nothing fools the checkpoints: ``make torture``.

Prints JSON; exits with 1 if anything was lost, or went unfound.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import damage
import rank_scenarios as scenario
from rank_pool import RankPool


def script(name, folder, *args, under=()):
    """What a script that forks and kills has to tell."""
    path = Path(__file__).with_name(name)
    argv = [*under, sys.executable, str(path), str(folder), *map(str, args)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return json.loads(done.stdout)


def kills(folder, trials, seed):
    """SIGKILL at every change of a save and a prune, at every read, and at random moments."""
    everywhere, anywhere, last_step, _, content = script("killed_saver.py", folder, trials, seed)
    assert anywhere == trials
    assert content
    return {"at_every_change": everywhere, "at_random": anywhere, "last_step": last_step}


def tiers(folder, trials, seed):
    """The same on two tiers: save, drain, prune, and restore from a node's disk."""
    saving, promoting, from_local, anywhere = script("killed_drainer.py", folder, trials, seed)
    return {
        "at_every_change": saving,
        "at_every_change_of_a_restore": promoting,
        "at_random": trials,
        "gone_on_from_local": from_local + anywhere[0],
        "last_step": anywhere[1],
    }


def gang(folder):
    """Either rank of two nodes killed at every change, and then a node's disk lost."""
    answer = script("killed_gang.py", folder)
    killed, mixed = answer["saving"]
    return {
        "at_every_change": killed,
        "gone_on_from_half_a_drain": mixed,
        "at_every_change_of_such_a_restore": answer["mixing"],
    }


def owners(folder):
    """An attempt frozen at every change, woken up when another has its run."""
    answer = script("paused_owner.py", folder)
    return {f"{name}_frozen_and_fenced": answer[name] for name in ("tiered", "remote")}


def damages(folder, flips):
    """Each kind of damage, done to the checkpoints of two ranks."""
    pool = RankPool(2)
    try:
        for step in (2, 3):
            pool.run(2, scenario.save, folder, "fsdp", step)
    finally:
        pool.close()
    return {"flips": flips, "unfound": damage.everything(folder, flips)}


def full_disk(folder):
    """File systems that are too small: the last good checkpoint stays, and room is used again."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return script("full_disk.py", folder, under=["unshare", *user, "--mount"])


def main():
    """Run it all, or some of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500, help="at random, on one tier")
    parser.add_argument("--tier-kills", type=int, default=250, help="at random, on two tiers")
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("parts", nargs="*", help="default: all")
    args = parser.parse_args()
    parts = {
        "kills": lambda folder: kills(folder, args.kills, args.seed),
        "tiers": lambda folder: tiers(folder, args.tier_kills, args.seed),
        "gang": gang,
        "owners": owners,
        "damage": lambda folder: damages(folder, args.flips),
        "full_disk": full_disk,
    }
    if unknown := set(args.parts) - parts.keys():
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}")
    answer = {}
    for name in args.parts or parts:
        sys.stderr.write(f"{name} …\n")
        begin = time.monotonic()
        # Thousands of attempts would wait for a disk; those of one tier do, and find direct I/O.
        room = "/dev/shm" if name in {"tiers", "gang", "owners"} else None
        with tempfile.TemporaryDirectory(dir=room) as folder:
            answer[name] = parts[name](Path(folder))
        answer[name]["seconds"] = round(time.monotonic() - begin)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    sys.exit(1 if answer.get("damage", {}).get("unfound") else 0)


if __name__ == "__main__":
    main()
