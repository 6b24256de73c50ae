"""The confidence head."""

from typing import Any

import pytest
import torch
from golden_draft import CASES, DTYPES, close, golden_case

from dspark.draft.confidence import ConfidenceHead


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_confidence_logits_are_deepspecs(dspark_golden: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    case = golden_case(dspark_golden, name, dtype)
    found_AK = case.forward().confidence_logits_AK
    assert found_AK is not None
    found_BAK = case.on_grid(found_AK)
    close(found_BAK[case.valid_BAK], torch.tensor(case.expected["confidence_logits"]).double()[case.valid_BAK])


def test_the_head_is_taken_in_float32_with_bfloat16_weights_and_under_autocast(dspark_golden: dict[str, Any]) -> None:
    config = golden_case(dspark_golden, "mha_vanilla", torch.float64).draft.config
    torch.manual_seed(0)
    head = ConfidenceHead(config).bfloat16()
    hidden_ND, embedded_NR = torch.randn(50, 16).bfloat16(), torch.randn(50, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found_N = head(hidden_ND, embedded_NR)
    exact_N = head.double()(hidden_ND.double(), embedded_NR.double())
    assert found_N.dtype == torch.float32
    torch.testing.assert_close(found_N.double(), exact_N, rtol=1e-5, atol=1e-6)


def test_a_head_without_the_markov_row_reads_the_hidden_state_alone(dspark_golden: dict[str, Any]) -> None:
    config = golden_case(dspark_golden, "mha_vanilla", torch.float64).draft.config
    head = ConfidenceHead(config.model_copy(update={"confidence_head_with_markov": False}))
    assert head.proj.weight.shape == (1, 16)
    hidden_ND = torch.randn(4, 16)
    torch.testing.assert_close(head(hidden_ND, torch.full((4, 6), torch.nan)), head.proj(hidden_ND).squeeze(-1))
