"""The layers of the draft, rotation and head grouping."""

from typing import Any

import pytest
import torch
from exported import SMALL
from golden_draft import CASES, DTYPES, close, exact, golden_case
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dspark.draft.backbone import DraftAttention, draft_rotary
from dspark.kernels.anchor_attention import attend
from dspark.kernels.rotary import rotate_half_pairs, rotate_interleaved_pairs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_layers_hidden_states_and_base_logits_are_deepspecs(
    dspark_golden: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    case = golden_case(dspark_golden, name, dtype)
    source = case.expected if "layer_outputs" in case.expected else dspark_golden["cases"]["mha_vanilla"]
    outputs: list[Tensor] = []
    for layer in case.draft.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    hidden_BAKD = case.on_grid(case.forward().hidden_AKD)
    keep = case.keep_BA
    for found_ND, expected_BAKD in zip(outputs, torch.tensor(source["layer_outputs"]).double(), strict=True):
        close(found_ND.view(hidden_BAKD.shape)[keep], expected_BAKD[keep])
    close(hidden_BAKD[keep], torch.tensor(source["hidden"]).double()[keep])
    close(case.draft.base_logits(hidden_BAKD)[keep], torch.tensor(source["base_logits"]).double()[keep])


def test_the_drafts_rotation_is_right_at_far_positions_also_for_bfloat16_weights(dspark_golden: dict[str, Any]) -> None:
    rope = dspark_golden["rope"]
    x_TE = exact(rope["x"], torch.float64)
    for dtype, atol in ((torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        draft = golden_case(dspark_golden, "mha_vanilla", torch.float64).draft.to(dtype)
        cos_TE, sin_TE = draft.rotary(torch.tensor(rope["positions"]))
        found_TE = rotate_half_pairs(x_TE, cos_TE, sin_TE)
        torch.testing.assert_close(found_TE, torch.tensor(rope["y"]).double(), rtol=1e-7, atol=atol)
        wrong_TE = rotate_interleaved_pairs(x_TE, cos_TE, sin_TE)
        torch.testing.assert_close(
            wrong_TE, torch.tensor(rope["y_wrong_adjacent_pairs"]).double(), rtol=1e-7, atol=atol
        )
        assert (found_TE - wrong_TE).abs().max() > 1e-2


@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_attention_equals_softmax_written_out_for_every_grouping(
    dspark_golden: dict[str, Any], num_key_value_heads: int
) -> None:
    config = golden_case(dspark_golden, "mha_vanilla", torch.float64).draft.config
    config = config.model_copy(update={"num_key_value_heads": num_key_value_heads})
    torch.manual_seed(0)
    attention = DraftAttention(config).double()
    nn.init.normal_(attention.q_norm.weight)
    hidden_ND, rotary = torch.randn(6, 16, dtype=torch.float64), (torch.ones(6, 4).double(), torch.zeros(6, 4).double())
    keys_JGE, values_JGE = torch.randn(2, 9, num_key_value_heads, 8, dtype=torch.float64)
    visible_NJ = torch.rand(6, 9) < 0.6
    visible_NJ[:, 0] = True
    found_ND = attention(hidden_ND, rotary, lambda _, q_NHE, *own: attend(q_NHE, keys_JGE, values_JGE, visible_NJ))
    queries_NHE = attention.q_norm(attention.q_proj(hidden_ND).view(6, 4, 8))
    read_NHE = torch.zeros(6, 4, 8, dtype=torch.float64)
    for head in range(4):
        source = head // (4 // num_key_value_heads)
        scores_NJ = queries_NHE[:, head] @ keys_JGE[:, source].T / 8**0.5
        read_NHE[:, head] = scores_NJ.masked_fill(~visible_NJ, -torch.inf).softmax(-1) @ values_JGE[:, source]
    torch.testing.assert_close(found_ND, attention.o_proj(read_NHE.flatten(1)))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65_536},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
    ],
    ids=lambda scaling: "default" if scaling is None else scaling["rope_type"],
)
def test_positions_are_turned_as_transformers_does(scaling: dict[str, Any] | None) -> None:
    """An independent implementation of the pairing of halves, at positions 0, 7, 4095 and 200000, in float32 tables."""
    config = SMALL.model_copy(update={"head_dim": 128, "max_position_embeddings": 262_144, "rope_scaling": scaling})
    positions_N = torch.tensor([0, 7, 4095, 200_000])
    heads_NE = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    rope = (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=128, max_position_embeddings=262_144, rope_parameters=rope))
    cos_NE, sin_NE = (table[0] for table in theirs(heads_NE, positions_N[None]))
    expected_NE, _ = apply_rotary_pos_emb(heads_NE[None, None], heads_NE[None, None], cos_NE[None], sin_NE[None])
    cos, sin = draft_rotary(config, positions_N, torch.float32)
    assert cos.dtype == torch.float32
    # Their angles are float32, whose step at 200,000 is 2^-6.
    torch.testing.assert_close(rotate_half_pairs(heads_NE, cos, sin), expected_NE[0, 0], atol=4e-2, rtol=0)
    torch.testing.assert_close(cos[:3], cos_NE[:3, :64], atol=3e-4, rtol=0)
    plain, _ = draft_rotary(config.model_copy(update={"rope_scaling": None}), positions_N, torch.float32)
    assert torch.equal(cos, plain) == (scaling is None)
