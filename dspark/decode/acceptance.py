"""The acceptance rule: which drafted tokens are kept, and the token that follows them."""

from torch import Tensor

from dspark.decode.sampling import Uniforms, draw

SMALLEST_RESIDUAL = 1e-8


def accept(ids_K: Tensor, draft_probs_KV: Tensor, target_probs_NV: Tensor, uniforms: Uniforms) -> tuple[int, int]:
    """Keep a prefix of the drafted tokens so that what is committed is distributed as the target's own text.

    Token x_j is kept while u_j < p_j(x_j) / q_j(x_j). The token after the first refusal is drawn from max(p - q, 0),
    normalised, and the one after a block kept whole from the target's last row. With one-hot rows this is greedy. Takes
    K + 1 uniforms whatever happens: one a drafted token, then one for the last token.
    Shapes: ids_K int64, K >= 0; draft_probs_KV the rows the ids were drawn from; target_probs_NV, N = K + 1.
    Returns: (accepted_drafts, the id after them).
    Source: dspark.md 6 step 4, with DeepSpec's bound: a residual of mass 1e-8 or less gives way to p. DeepSpec also
    divides by at least 1e-8, which refuses a very unlikely draft too often; a drawn token has q > 0, so we need none.
    """
    uniforms_K = [uniforms() for _ in range(len(ids_K))]
    final_uniform = uniforms()
    ids_K1 = ids_K[:, None]
    ratios_K = (target_probs_NV[:-1].gather(1, ids_K1) / draft_probs_KV.gather(1, ids_K1)).squeeze(1).tolist()
    accepted_drafts = 0
    while accepted_drafts < len(ids_K) and uniforms_K[accepted_drafts] < ratios_K[accepted_drafts]:
        accepted_drafts += 1
    final_1V = target_probs_NV[accepted_drafts : accepted_drafts + 1]
    if accepted_drafts < len(ids_K):
        residual_1V = (final_1V - draft_probs_KV[accepted_drafts]).clamp(min=0.0)
        if residual_1V.sum() > SMALLEST_RESIDUAL:
            final_1V = residual_1V
    return accepted_drafts, int(draw(final_1V, [final_uniform]))
