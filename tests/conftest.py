"""What every test gets: one thread, no network, fresh memory that is NaN, and the golden numbers."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
)

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where kernel tests run: the GPU, or the CPU through Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ranks_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on CPUs are forks that need not load the packages again."""
    from rank_server import ranks_from_a_server

    ranks_from_a_server(monkeypatch)


@pytest.fixture(scope="session")
def ling_golden() -> dict[str, Any]:
    """Numbers of the Ling-3.0 blocks, float64, from a plain numpy reference (see its ``_readme``)."""
    return json.loads((GOLDEN / "ling-3.0-golden.json").read_text())


@pytest.fixture(scope="session")
def dspark_golden() -> dict[str, Any]:
    """Numbers of the DSpark draft from the original code, float64 (see its ``_readme``)."""
    return json.loads((GOLDEN / "dspark-golden.json").read_text())
