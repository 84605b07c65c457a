import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def memory():
    """A folder on tmpfs, for what changes very many files: nothing there waits for a disk."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
