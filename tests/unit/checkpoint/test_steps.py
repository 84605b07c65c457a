from pathlib import Path

import numpy as np
import pytest

from slurmspot.checkpoint import steps
from slurmspot.errors import UsageError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def begun(target, content):
    partial = steps.begin(target)
    (partial / "data").write_text(content)
    return partial


def test_only_exact_names_are_checkpoints_and_the_newest_comes_first(tmp_path):
    for name in (
        "step-00000010",
        "step-00000009",
        "step-10",
        "step-00000011.partial-1",
        "step-١٢٣٤٥٦٧٨",
    ):
        (tmp_path / name).mkdir()
    assert list(steps.committed(tmp_path)) == [10, 9]
    assert names_of(steps.partials(tmp_path)) == ["step-00000011.partial-1"]
    assert steps.committed(tmp_path / "nowhere") == {}


def names_of(paths):
    return sorted(path.name for path in paths)


@pytest.mark.parametrize("step", [-1, 10**8, 1.0, "5", None, True])
def test_steps_that_have_no_name(step):
    with pytest.raises(UsageError, match="whole number of 1 to 8 digits"):
        steps.step_name(step)


def test_a_numpy_integer_is_a_step():
    assert steps.step_name(np.int64(3)) == "step-00000003"


def test_begin_makes_a_private_folder_that_is_not_a_checkpoint(tmp_path):
    partial = steps.begin(tmp_path / "deep" / "step-00000001")
    assert partial.stat().st_mode & 0o777 == 0o700
    assert steps.is_partial(partial)
    assert steps.committed(tmp_path / "deep") == {}


def test_commit(tmp_path):
    target = tmp_path / "step-00000001"
    steps.commit(begun(target, "ours"), target, is_good=lambda _: pytest.fail("nothing to check"))
    assert names(tmp_path) == ["step-00000001"]


def test_a_late_writer_cannot_replace_an_intact_checkpoint(tmp_path):
    target = tmp_path / "step-00000001"
    late = begun(target, "late")
    steps.commit(begun(target, "first"), target, is_good=lambda _: True)
    steps.commit(late, target, is_good=lambda _: True)
    assert (target / "data").read_text() == "first"
    assert names(tmp_path) == ["step-00000001"]


def test_a_damaged_checkpoint_is_replaced(tmp_path):
    target = tmp_path / "step-00000001"
    steps.commit(begun(target, "damaged"), target, is_good=lambda _: True)
    steps.commit(begun(target, "good"), target, is_good=lambda _: False)
    assert (target / "data").read_text() == "good"
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_that_another_process_removes_meanwhile_is_made_anew(tmp_path):
    target = tmp_path / "step-00000001"
    steps.commit(begun(target, "first"), target, is_good=lambda _: True)

    def vanishes(path):
        steps.remove(path)
        return False

    steps.commit(begun(target, "second"), target, is_good=vanishes)
    assert (target / "data").read_text() == "second"
    assert names(tmp_path) == ["step-00000001"]


def test_something_else_under_a_checkpoints_name_is_replaced(tmp_path):
    target = tmp_path / "step-00000001"
    (tmp_path / "elsewhere").mkdir()
    for make in (target.touch, lambda: target.symlink_to(tmp_path / "elsewhere")):
        make()
        steps.commit(begun(target, "good"), target, is_good=lambda _: False)
        assert (target / "data").read_text() == "good"
        steps.remove(target)
    assert names(tmp_path) == ["elsewhere"]


def test_a_writer_whose_folder_was_taken_away_fails(tmp_path):
    target = tmp_path / "step-00000001"
    partial = begun(target, "x")
    steps.remove(partial)
    with pytest.raises(FileNotFoundError):
        steps.commit(partial, target, is_good=lambda _: True)
    assert names(tmp_path) == []


def test_remove_takes_the_name_first(tmp_path, monkeypatch):
    target = tmp_path / "step-00000001"
    steps.commit(begun(target, "x"), target, is_good=lambda _: True)
    seen = []
    monkeypatch.setattr(
        "shutil.rmtree", lambda path, **_: seen.append((path.name, names(tmp_path)))
    )
    steps.remove(target)
    ((name, left),) = seen
    assert left == [name]
    assert name.startswith("step-00000001.partial-")


def test_remove_does_not_follow_links(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "data").touch()
    (tmp_path / "step-00000001").symlink_to(tmp_path / "precious")
    steps.remove(tmp_path / "step-00000001")
    assert names(tmp_path) == ["precious"]
    assert names(tmp_path / "precious") == ["data"]


@pytest.mark.parametrize(
    ("name", "partial"),
    [
        ("step-00000001.partial-0123456789abcdef", True),
        ("exp.partial-ab", True),
        ("exp.partial-freeze", False),
        ("my.partial-run", False),
        ("step-00000001", False),
    ],
)
def test_only_names_made_for_it_are_of_partial_checkpoints(name, partial):
    assert steps.is_partial(Path(name)) is partial
