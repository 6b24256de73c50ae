"""Gated latent attention against the golden blocks, plain and absorbed."""

from typing import Any

import pytest
import torch

from dspark.kernels.rotary import rotary_angles
from dspark.target.cache import Layout, LingCache
from dspark.target.config import TargetConfig
from dspark.target.latent_attention import LatentAttention

TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-13}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


def build(case: dict[str, Any], dtype: torch.dtype) -> LatentAttention:
    rest = dict.fromkeys(
        ("vocab_size", "num_hidden_layers", "head_dim", "intermediate_size", "first_k_dense_replace", "topk_group",
         "moe_intermediate_size", "moe_shared_expert_intermediate_size", "num_experts_per_tok", "num_shared_experts",
         "n_group", "routed_scaling_factor", "layer_group_size"), 1
    )  # fmt: skip
    laws = {"num_experts": 2, "kda_lower_bound": -5.0, "short_conv_kernel_size": 4, "rms_norm_eps": 1e-6}
    block = LatentAttention(TargetConfig.model_validate({**rest, **laws, **case["config"]})).to(dtype)
    block.load_state_dict(
        {name.removeprefix("attention."): torch.tensor(w, dtype=dtype) for name, w in case["weights"].items()}
    )
    return block


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mla_flash_like_no_q_lora", "mla_tiny_like_q_lora"])
def test_plain_and_absorbed_forms_give_the_golden_block(ling_golden: dict, name: str, dtype: torch.dtype) -> None:
    case = ling_golden[name]
    block, x_ND = build(case, dtype), torch.tensor(case["x"], dtype=dtype)
    cos, sin = rotary_angles(torch.tensor(case["positions"]), 4, case["config"]["rope_theta"], dtype)
    y_ND, rows_BTC = block(x_ND, Layout.of([4], x_ND.device), (cos, sin))

    def close(actual: torch.Tensor, expected: Any) -> None:
        torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=dtype), **TOLERANCE[dtype])

    close(y_ND, case["y"])
    close(rows_BTC[0, :, :5], case["cached_latent"])
    close(rows_BTC[0, :, 5:], case["cached_k_rope_adjacent_pairs"])
    close(block.g_proj(x_ND).sigmoid(), case["head_gate"])
    for first in range(1, 4):
        cache = LingCache([first], [], [rows_BTC[:, :first]])
        view = cache.view(4 - first)
        close(block.stage(x_ND[first:], (cos[first:], sin[first:]), view, cache.rows_MBJC[0]), case["y"][first:])
        close(cache.rows_MBJC[0][0, :4], rows_BTC[0])
