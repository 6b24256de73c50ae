"""The models that the engine is compared with the plain target on: tiny ones, and the shipped nano."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_ling
from verifying import CAPACITY_TOKENS

from dspark.target.loading import NANO_FOLDER, load_target
from dspark.target.model import LingModel
from dspark.verifier import Verifier


@pytest.fixture(scope="session", params=["tiny", "low-rank queries", "nano"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "nano":
        return NANO_FOLDER
    changes = {"q_lora_rank": 12} if request.param == "low-rank queries" else {}
    return write_tiny_ling(tmp_path_factory.mktemp("tiny"), **changes)


@pytest.fixture
def target_layer_ids() -> tuple[int, ...]:
    return (3, 0)


@pytest.fixture
def target(folder: Path, target_layer_ids: tuple[int, ...], kernel_device: torch.device) -> LingModel:
    target = load_target(folder, target_layer_ids=target_layer_ids, device=kernel_device)
    assert isinstance(target, LingModel)
    return target


@pytest.fixture
def verifier(folder: Path, target_layer_ids: tuple[int, ...], kernel_device: torch.device) -> Verifier:
    return Verifier.load(folder, CAPACITY_TOKENS, target_layer_ids, torch.float32, kernel_device)
