"""A record that each test may damage."""

from pathlib import Path

import pytest
from recorded import record_everything


@pytest.fixture
def record(tmp_path: Path) -> Path:
    record_everything(tmp_path / "record")
    return tmp_path / "record"
