"""Absorbed attention over cached rows against plain causal attention."""

import pytest
import torch

from dspark.kernels import mla


@pytest.mark.parametrize("num_cached", [0, 1, 63])
def test_absorbed_attention_equals_plain_attention_with_expanded_keys(num_cached: int) -> None:
    generator = torch.Generator().manual_seed(num_cached)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total, heads, scale = num_cached + 5, 3, 0.3
    q_nope, q_rope = normal(2, total, heads, 6), normal(2, total, heads, 4)
    latent, k_rope = normal(2, total, 7), normal(2, total, 4)
    keys_HEC, values_HFC = normal(heads, 6, 7), normal(heads, 5, 7)
    k_nope, v = torch.einsum("btc,hec->bthe", latent, keys_HEC), torch.einsum("btc,hfc->bthf", latent, values_HFC)
    k = torch.cat((k_nope, k_rope[:, :, None].expand(-1, -1, heads, -1)), -1)
    plain = mla.causal_attention(torch.cat((q_nope, q_rope), -1), k, v, scale)[:, num_cached:]
    weights = (torch.einsum("bthe,bjhe->bhtj", torch.cat((q_nope, q_rope), -1), k) * scale).masked_fill(
        torch.ones(total, total, dtype=torch.bool).triu(1), -torch.inf
    )
    by_hand = torch.einsum("bhtj,bjhf->bthf", weights.softmax(-1), v)[:, num_cached:]
    absorbed = torch.einsum("bthe,hec->bthc", q_nope, keys_HEC)[:, num_cached:]
    slots_T = torch.arange(num_cached, total)
    bias_BTJ = torch.where(torch.arange(total) > slots_T[:, None], -torch.inf, 0.0).double().expand(2, -1, -1)
    rows = torch.cat((latent, k_rope), -1)
    context = mla.absorbed_attention(torch.cat((absorbed, q_rope[:, num_cached:]), -1), rows, bias_BTJ, 7, scale)
    expanded = torch.einsum("bthc,hfc->bthf", context, values_HFC)
    torch.testing.assert_close(expanded, plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(plain, by_hand, rtol=1e-12, atol=1e-13)
