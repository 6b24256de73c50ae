"""The Markov heads."""

from typing import Any

import pytest
import torch
from golden_draft import CASES, DTYPES, close, golden_case

from dspark.draft.markov import RnnMarkovHead


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_biased_logits_are_deepspecs_in_float32_or_better(
    dspark_golden: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    case = golden_case(dspark_golden, name, dtype)
    logits_BAKV = case.logits()
    assert logits_BAKV.dtype == dtype
    assert logits_BAKV.isfinite().all()
    close(logits_BAKV[case.valid_BAK], torch.tensor(case.expected["biased_logits"]).double()[case.valid_BAK])


@pytest.mark.parametrize("name", CASES)
def test_whole_blocks_equal_slot_by_slot(dspark_golden: dict[str, Any], name: str) -> None:
    head = golden_case(dspark_golden, name, torch.float64).draft.markov_head
    torch.manual_seed(0)
    embedded_AKR = head.embed(torch.randint(0, 61, (6, 5)))
    hidden_AKD = torch.randn(6, 5, 16, dtype=torch.float64)
    together_AKR = head(embedded_AKR, hidden_AKD)
    for a in (0, 5):
        state_R = torch.zeros(6, dtype=torch.float64)
        for slot in range(5):
            mixed_R, state_R = head.step(embedded_AKR[a, slot], hidden_AKD[a, slot], state_R)
            torch.testing.assert_close(mixed_R, together_AKR[a, slot])


def _swap_columns(weight: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """What a layer reading [second; first; ...] instead of [first; second; ...] computes, as a weight."""
    return torch.cat([weight[:, second : second + first], weight[:, :second], weight[:, first + second :]], dim=1)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("mha_gated", "gate_input_prev_first"),
        ("mha_rnn", "input_prev_before_state"),
        ("mha_rnn", "split_candidate_first"),
        ("mha_rnn", "state_carried_across_blocks"),
    ],
)
def test_a_planted_mistake_gives_the_wrong_number_and_we_do_not(
    dspark_golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, mistake: str
) -> None:
    case = golden_case(dspark_golden, name, torch.float64)
    wrong = case.expected["wrong"][f"y_wrong_{mistake}"]
    wrong_KV = torch.tensor(wrong["biased_logits_of_shown_block"]).double()
    shown = case.expected["wrong"]["shown_block"]
    place = (shown["sequence"], shown["block"], slice(0, int(case.valid_BAK[shown["sequence"], shown["block"]].sum())))
    assert (case.logits()[place] - wrong_KV[place[2]]).abs().max() > 1e-3
    parameters = dict(case.draft.markov_head.named_parameters())
    with torch.no_grad():
        if mistake == "gate_input_prev_first":
            parameters["gate_proj.weight"].copy_(_swap_columns(parameters["gate_proj.weight"], 16, 6))
        elif mistake == "input_prev_before_state":
            parameters["joint_proj.weight"].copy_(_swap_columns(parameters["joint_proj.weight"], 6, 6))
        elif mistake == "split_candidate_first":
            for key in ("joint_proj.weight", "joint_proj.bias"):
                gate, candidate, output = parameters[key].chunk(3)
                parameters[key].copy_(torch.cat([candidate, gate, output]))
        else:
            forward = RnnMarkovHead.forward
            monkeypatch.setattr(
                RnnMarkovHead,
                "forward",
                lambda self, e, h: forward(self, e.reshape(2, 25, -1), h.reshape(2, 25, -1)).view(e.shape),
            )
    torch.testing.assert_close(case.logits()[place], wrong_KV[place[2]], rtol=1e-7, atol=1e-9)
