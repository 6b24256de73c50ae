"""The shipped nano with its draft, and drafts drawn at random, beside the engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from verifying import CAPACITY_TOKENS

from dspark.draft.model import DraftModel
from dspark.export.draft_folder import read_draft
from dspark.target.loading import NANO_FOLDER
from dspark.verifier import Shard, Verifier
from dspark.verifier.drafting import BlockDrafter, draft_weights

TAPS = (1, 2, 4, 5, 6)
"""Those of the shipped draft."""


@pytest.fixture
def verifier(kernel_device: torch.device) -> Verifier:
    return Verifier.load(NANO_FOLDER, CAPACITY_TOKENS, TAPS, torch.float32, kernel_device)


@pytest.fixture
def draft(verifier: Verifier, kernel_device: torch.device) -> DraftModel:
    return read_draft(NANO_FOLDER / "draft", (verifier.embedding_VD, verifier.head_VD), device=kernel_device).float()


@pytest.fixture
def random_draft(draft: DraftModel, kernel_device: torch.device) -> Callable[..., DraftModel]:
    """A draft like the shipped one, with other fields and weights so large that all of them matter."""

    def make(**fields: Any) -> DraftModel:
        other = DraftModel(draft.config.model_copy(update=fields))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in other.named_parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
                weight.add_(1.0 if name.endswith("norm.weight") else 0.0)
        other.bind(draft.embedding_VD, draft.head_VD)
        return other.to(kernel_device)

    return make


@pytest.fixture
def drafter_of(verifier: Verifier) -> Callable[..., BlockDrafter]:
    """Its memory is NaN where nothing was written."""

    def make(draft: DraftModel, num_drafts: int = 8) -> BlockDrafter:
        weights = draft_weights(draft, Shard(), torch.float32, verifier.weights.device)
        drafter = BlockDrafter(verifier, weights, num_drafts)
        drafter.keys_LHJE.fill_(torch.nan)
        drafter.values_LHJE.fill_(torch.nan)
        return drafter

    return make
