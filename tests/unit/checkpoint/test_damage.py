import shutil

import damage
import pytest
import rank_scenarios as scenario
from rank_pool import RankPool

from slurmspot.checkpoint.verify import verify


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 2 and 3 of a model in shards on two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    pool = RankPool(2)
    try:
        for step in (2, 3):
            pool.run(2, scenario.save, folder, "fsdp", step)
    finally:
        pool.close()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_every_damage_is_found(folder):
    assert damage.everything(folder, flip_count=300) == []
    assert all(report.intact for report in verify(folder))
