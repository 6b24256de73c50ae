"""Latent attention, defined. E width of a key, F width of a value, C width of a cached row, J cached rows."""

import torch
from torch.nn import functional


def causal_attention(q_BTHE: torch.Tensor, k_BTHE: torch.Tensor, v_BTHF: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of every token on itself and the tokens before it, rows starting together at position 0.

    Rows padded on the right need no mask: no true token sees the padding.
    Shapes: returns [B, T, H, F].
    """
    q_BHTE, k_BHTE, v_BHTF = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHF))
    return functional.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTF, is_causal=True, scale=scale).transpose(1, 2)


def absorbed_attention(
    q_BTHC: torch.Tensor, rows_BJC: torch.Tensor, bias_BTJ: torch.Tensor, value_width: int, scale: float
) -> torch.Tensor:
    """Attention of absorbed queries on cached rows ``latent | rotated key``; all heads share the rows.

    Shapes: bias_BTJ is 0 where token t may see row j and -inf elsewhere; returns the weighted sum of the first
    ``value_width`` columns, [B, T, H, value_width], in q's dtype. Rows of the cache must be finite even where masked.
    Softmax in float32 or higher. Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """
    num_tokens, num_heads = q_BTHC.shape[1:3]
    wide = torch.promote_types(q_BTHC.dtype, torch.float32)
    rows_BJC = rows_BJC.to(wide)
    bias_BNJ = bias_BTJ.to(wide).repeat_interleave(num_heads, 1)
    scores_BNJ = torch.baddbmm(bias_BNJ, q_BTHC.flatten(1, 2).to(wide), rows_BJC.transpose(1, 2), alpha=scale)
    context_BNC = scores_BNJ.softmax(-1) @ rows_BJC[..., :value_width]
    return torch.unflatten(context_BNC, 1, (num_tokens, num_heads)).to(q_BTHC.dtype)
