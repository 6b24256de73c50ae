"""One pass of a rank over a window of tokens: embedding, every layer, final norm. Nothing is committed."""

from typing import NamedTuple

import torch

from dspark.kernels import residual, router
from dspark.verifier.blocks import Chain, Partial, feed, latent_attention, linear_attention
from dspark.verifier.weights import VerifierWeights


class Window(NamedTuple):
    """What a pass says about T tokens, and what a commit of them needs.

    Shapes: taps_TLD the outputs of the tapped layers; hidden_TD after the final norm; projected_LTC the in-projections
    of the linear attention layers, None where there are none.
    """

    taps_TLD: torch.Tensor
    hidden_TD: torch.Tensor
    projected_LTC: torch.Tensor | None


def read_window(
    ids_T: torch.Tensor,
    weights: VerifierWeights,
    target_layer_ids: tuple[int, ...],
    dense: router.Dispatch,
    chain: Chain,
) -> Window:
    """Read T tokens after the committed ones.

    One rank alone adds its own partial sum only; ``_add`` is where ranks would add theirs.
    """
    call, config, _, is_chained = chain
    input_norms = [layer.input_norm_D for layer in weights.layers]
    residual_TD, x_TD = call(
        "Embedding and norm",
        residual.embed_norm,
        ids_T,
        weights.embedding_VD,
        input_norms[0],
        config.rms_norm_eps,
        is_chained=is_chained,
    )
    outputs: list[torch.Tensor] = []
    projected: list[torch.Tensor] = []
    for layer, next_norm_D in zip(weights.layers, [*input_norms[1:], weights.norm_D], strict=True):
        if layer.latent is None:
            assert weights.linear is not None
            partial, projected_TC = linear_attention(x_TD, weights.linear, len(projected), chain)
            projected.append(projected_TC)
        else:
            partial = latent_attention(x_TD, layer.latent, len(outputs) - len(projected), chain)
        residual_TD, x_TD = _add("Attention", partial, residual_TD, layer.post_norm_D, chain)
        partial = feed(x_TD, layer.router, layer.experts, dense, chain)
        kind = "Dense MLP" if layer.router is None else "MoE"
        residual_TD, x_TD = _add(kind, partial, residual_TD, next_norm_D, chain)
        outputs.append(residual_TD)
    taps = [outputs[layer] for layer in target_layer_ids]
    taps_TLD = call("Taps", torch.stack, taps, 1) if taps else x_TD.new_empty(len(ids_T), 0, config.hidden_size)
    projected_LTC = call("KDA staging", torch.stack, projected) if projected else None
    return Window(taps_TLD, x_TD, projected_LTC)


def _add(
    kind: str, partial: Partial, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, chain: Chain
) -> tuple[torch.Tensor, torch.Tensor]:
    return chain.call(
        f"{kind} sum and norm",
        residual.add_norm,
        partial.parts_TKD,
        partial.weights_TK,
        residual_TD,
        norm_weight_D,
        chain.config.rms_norm_eps,
        is_chained=chain.is_chained,
    )
