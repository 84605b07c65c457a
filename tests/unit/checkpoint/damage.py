"""Damages a run's checkpoints in every way there is; each must be found.

Every function takes a folder with the checkpoints of steps 2 and 3, written by two ranks, does its
damage, and undoes it. What goes unfound is returned; nothing, if all is well.
"""

import random
import shutil
from contextlib import contextmanager
from pathlib import Path

from slurmspot.checkpoint import manifest
from slurmspot.checkpoint.verify import problems_of

NEWEST, OLDER = "step-00000003", "step-00000002"
BLOCK = 4096


def unfound(checkpoint, what):
    return [] if problems_of(checkpoint) else [what]


@contextmanager
def changed(path):
    """Put a file back as it was."""
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def files(checkpoint):
    return sorted(checkpoint.iterdir())


def flips(folder, count, seed=1):
    """Single bits, spread over all bytes of all files."""
    newest = folder / NEWEST
    generator = random.Random(seed)
    found = []
    sizes = {path: path.stat().st_size for path in files(newest)}
    for _ in range(count):
        # Half of them by file, so that the small manifest gets its share.
        path = generator.choices(list(sizes), list(sizes.values()))[0]
        if generator.random() < 0.5:
            path = generator.choice(list(sizes))
        at, bit = generator.randrange(sizes[path]), generator.randrange(8)
        flip(path, at, bit)
        found += unfound(newest, f"bit {bit} of byte {at} of {path.name}")
        flip(path, at, bit)
    return found + ([] if not problems_of(newest) else ["flips were not undone"])


def flip(path, at, bit):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def lengths(folder):
    """Truncations: to nothing, one byte, inside and at the ends of blocks and datasets; growth."""
    newest = folder / NEWEST
    found = []
    datasets = {file.name: file.datasets for file in manifest.read(newest).files}
    for path in files(newest):
        with changed(path) as content:
            size = len(content)
            cuts = {0, 1, 7, size // 2, size - 1, size - size % BLOCK, max(0, size - BLOCK)}
            for one in datasets.get(path.name, ()):
                cuts |= {one.start, one.start + 1, one.start + one.size_bytes}
            for cut in sorted(cuts - {size}):
                path.write_bytes(content[:cut])
                found += unfound(newest, f"{path.name} cut to {cut}")
            for more in (b"\0", b"\n", b"\0" * BLOCK, content):
                path.write_bytes(content + more)
                found += unfound(newest, f"{path.name} with {len(more)} bytes more")
    return found


def blocks(folder):
    """Each block zero-filled, as a lost write leaves it; and exchanged with the next."""
    newest = folder / NEWEST
    found = []
    for path in files(newest):
        with changed(path) as content:
            for at in range(0, len(content), BLOCK):
                block = content[at : at + BLOCK]
                after = content[at + BLOCK : at + 2 * BLOCK]
                for new, what in ((bytes(len(block)), "zeroed"), (after, "exchanged")):
                    there = content[at : at + 2 * BLOCK]
                    back = new + (block if what == "exchanged" else after)
                    if back != there:
                        path.write_bytes(content[:at] + back + content[at + 2 * BLOCK :])
                        found += unfound(newest, f"block at {at} of {path.name} {what}")
    return found


def swaps(folder):
    """Files of two steps, of two ranks, a manifest of an earlier save, and whole folders."""
    newest, older = folder / NEWEST, folder / OLDER
    found = []
    for path in files(newest):
        with changed(path) as content:
            path.write_bytes((older / path.name).read_bytes())
            if path.read_bytes() != content:
                found += unfound(newest, f"{path.name} of an older step")
    first, second = newest / "rank-00000.h5", newest / "rank-00001.h5"
    with changed(first) as one, changed(second) as other:
        first.write_bytes(other)
        second.write_bytes(one)
        found += unfound(newest, "the files of two ranks")
    replayed = folder / "step-00000004"
    shutil.copytree(newest, replayed)
    found += unfound(replayed, "a checkpoint under the name of another step")
    shutil.rmtree(replayed)
    return found


def listing(folder):
    """Files that are missing, more than there should be, or something else than files."""
    newest = folder / NEWEST
    found = []
    for path in files(newest):
        with changed(path):
            path.unlink()
            found += unfound(newest, f"{path.name} missing")
            path.symlink_to(Path("..") / OLDER / path.name)
            found += unfound(newest, f"{path.name} a link")
    for name in ("rank-00002.h5", "notes.txt", ".hidden"):
        (newest / name).touch()
        found += unfound(newest, f"{name} more")
        (newest / name).unlink()
    return found


def everything(folder, flip_count):
    """Whatever was not found of all of it."""
    found = [] if not problems_of(folder / NEWEST) else ["damaged from the start"]
    found += flips(folder, flip_count)
    for damage in (lengths, blocks, swaps, listing):
        found += damage(folder)
    return found + ([] if not problems_of(folder / NEWEST) else ["damage was not undone"])
