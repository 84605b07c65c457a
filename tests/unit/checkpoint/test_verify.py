import json
import os
import shutil
import subprocess
import sys

import h5py
import pytest
import torch
from click.testing import CliRunner

from slurmspot.checkpoint import manifest
from slurmspot.checkpoint.checkpointer import Checkpointer
from slurmspot.checkpoint.verify import problems_of, verify
from slurmspot.cli.verify import command
from slurmspot.errors import NotFoundError


class Holder:
    """A registered object around a plain dictionary."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run folder with two small checkpoints."""
    run = tmp_path_factory.mktemp("run")
    holder = Holder(a=torch.arange(5), b={"c": torch.ones(()), "empty": torch.ones(0)}, n=3)
    checkpointer = Checkpointer(run / "checkpoints", {"thing": holder})
    for step in (1, 2):
        holder.state["n"] = step
        holder.state["a"] = torch.arange(5) + step
        checkpointer.save(step, trigger="period", meta={"cursor": step})
        checkpointer.wait()
    checkpointer.close()
    return run


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture
def newest(run):
    return run / "checkpoints" / "step-00000002"


def flip(path, i):
    with path.open("r+b") as file:
        file.seek(i)
        byte = file.read(1)[0]
        file.seek(i)
        file.write(bytes([byte ^ 1 << i % 8]))


def test_untouched_checkpoints_are_intact(run):
    assert [(one.step, one.intact, one.tier) for one in verify(run)] == [
        (2, True, "remote"),
        (1, True, "remote"),
    ]
    assert len(verify(run / "checkpoints")) == 2
    assert len(verify(run / "checkpoints" / "step-00000001")) == 1


def test_every_single_byte_of_every_file_counts(newest):
    known = manifest.read(newest)
    for path in sorted(newest.iterdir()):
        for i in range(path.stat().st_size):
            flip(path, i)
            (problem, *more) = problems_of(newest)
            assert not more
            assert problem.file == path.name
            inside = [
                d.name
                for file in known.files
                if file.name == path.name
                for d in file.datasets
                if d.start <= i < d.start + d.size_bytes
            ]
            assert problem.dataset == (inside[0] if inside else None), i
            flip(path, i)
    assert problems_of(newest) == []


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.h5"])
@pytest.mark.parametrize("change", [-1, 1, -(10**9)])
def test_a_file_that_is_shorter_or_longer(newest, name, change):
    size = (newest / name).stat().st_size
    os.truncate(newest / name, max(0, size + change))
    assert [problem.file for problem in problems_of(newest)] == [name]


def test_a_missing_file(newest):
    (newest / "rank-00000.h5").unlink()
    assert [str(one) for one in problems_of(newest)] == ["rank-00000.h5: is missing"]


def test_a_missing_manifest_and_an_empty_folder(run, newest):
    (newest / "manifest.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    (run / "checkpoints" / "step-00000001").mkdir()
    assert [[one.file for one in report.problems] for report in verify(run)] == [
        ["manifest.json"],
        ["manifest.json"],
    ]


def test_an_extra_file(newest):
    (newest / "rank-00001.h5").write_bytes(b"")
    assert [str(one) for one in problems_of(newest)] == ["rank-00001.h5: is not in the manifest"]


def test_files_swapped_between_steps(run, newest):
    older = run / "checkpoints" / "step-00000001"
    for name in ("rank-00000.h5", "manifest.json"):
        (newest / name).rename(run / "x")
        (older / name).rename(newest / name)
        (run / "x").rename(older / name)
        assert not any(report.intact for report in verify(run))
    # Both are now swapped as a whole: each is consistent, under the wrong name.
    assert {one.problems[0].file for one in verify(run)} == {"manifest.json"}


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.h5"])
def test_a_link_is_not_followed_and_a_pipe_does_not_block(newest, tmp_path, name):
    (newest / name).rename(tmp_path / name)
    (newest / name).symlink_to(tmp_path / name)
    assert [problem.file for problem in problems_of(newest)] == [name]
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert [problem.file for problem in problems_of(newest)] == [name]


def test_a_linked_checkpoint_is_refused(run, newest):
    newest.rename(run / "elsewhere")
    newest.symlink_to(run / "elsewhere")
    assert not verify(run)[0].intact


def test_hdf5_that_disagrees_with_a_manifest_that_fits_its_bytes(newest):
    """Whoever can write a manifest that matches still cannot have HDF5 say something else."""
    path = newest / "rank-00000.h5"
    path.unlink()
    with h5py.File(path, "w") as file:
        file["stowaway"] = [1, 2, 3]
    known = manifest.read(newest)
    rest = manifest.DataFile(
        name=path.name, size_bytes=path.stat().st_size, rest_xxh3_128="0" * 32, datasets=()
    )
    import dataclasses

    import xxhash

    rest = dataclasses.replace(rest, rest_xxh3_128=xxhash.xxh3_128_hexdigest(path.read_bytes()))
    forged = dataclasses.replace(known, files=(rest,))
    (newest / "manifest.json").write_bytes(manifest.dump(forged))
    assert [(one.dataset, one.problem) for one in problems_of(newest)] == [
        ("stowaway", "is in the file but not in the manifest")
    ]


def test_names_that_are_not_checkpoints_are_not_looked_at(run):
    for name in ("step-00000003.partial-ab", "step-3", "step-000000004", "latest", "step-0000000x"):
        (run / "checkpoints" / name).mkdir()
    assert [report.step for report in verify(run)] == [2, 1]
    with pytest.raises(NotFoundError, match="not a checkpoint"):
        verify(run / "checkpoints" / "step-00000003.partial-ab")


def invoke(*argv):
    return CliRunner().invoke(command, [str(one) for one in argv], standalone_mode=False)


def test_command_line_good(run):
    done = invoke(run)
    assert done.return_value == 0
    assert [line.split() for line in done.stdout.splitlines()][1][0] == "2"
    assert done.stderr == ""


def test_command_line_json_names_the_place(run, newest):
    dataset = manifest.read(newest).files[0].datasets[0]
    flip(newest / "rank-00000.h5", dataset.start)
    done = invoke(run, "--json")
    assert done.return_value == 1
    assert json.loads(done.stdout) == {
        "schema_version": 1,
        "intact": False,
        "checkpoints": [
            {
                "step": 2,
                "tier": "remote",
                "node": None,
                "intact": False,
                "problems": [
                    {
                        "file": "rank-00000.h5",
                        "dataset": "thing/a",
                        "problem": "content differs from what was saved",
                    }
                ],
            },
            {"step": 1, "tier": "remote", "node": None, "intact": True, "problems": []},
        ],
    }
    assert "DAMAGED" in invoke(run).stdout


def test_command_line_shows_all_problems_when_asked(run, newest):
    for i in range(5):
        (newest / f"extra-{i}").touch()
    assert "2 more" in invoke(run).stdout
    assert "extra-4" not in invoke(run).stdout
    assert "extra-4" in invoke(run, "--all").stdout


def test_command_line_with_nothing_to_verify(tmp_path):
    for argv in ([tmp_path], [tmp_path, "--json"], [tmp_path / "nowhere"]):
        done = invoke(*argv)
        assert isinstance(done.exception, NotFoundError)
        assert done.exception.exit_code == 3


def test_without_hdf5_the_command_says_what_to_install(run):
    code = (
        "import sys; sys.modules['h5py'] = None\n"
        "from slurmspot.cli import main; main(['verify', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "slurmspot: h5py is not installed"
    assert "slurmspot[train]" in done.stderr


def test_verifying_loads_no_torch(run):
    code = (
        "import sys; from slurmspot.cli import main\n"
        "try: main(['verify', sys.argv[1]])\n"
        "except SystemExit as done: assert not done.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True, capture_output=True)
