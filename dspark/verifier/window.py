"""One pass of a rank over a window of tokens: embedding, every layer, final norm. Nothing is committed."""

from typing import NamedTuple

import torch

from dspark.kernels import residual, router
from dspark.verifier.blocks import Chain, Partial, Staged, empty_stage, feed, latent_attention, linear_attention
from dspark.verifier.ranks import Ranks
from dspark.verifier.weights import VerifierWeights


class Window(NamedTuple):
    """What a pass says about T tokens, and what a commit of them needs (None without linear attention layers).
    Shapes: taps_TLD the outputs of the tapped layers; hidden_TD after the final norm.
    """

    taps_TLD: torch.Tensor
    hidden_TD: torch.Tensor
    staged: Staged | None


def read_window(
    ids_T: torch.Tensor, weights: VerifierWeights, target_layer_ids: tuple[int, ...], dense: router.Dispatch,
    chain: Chain, ranks: Ranks,
) -> Window:  # fmt: skip
    """Read T tokens after the committed ones; ``ranks`` add the partial sums of every block."""
    input_norms = [layer.input_norm_D for layer in weights.layers]
    begin = (ids_T, weights.embedding_VD, input_norms[0], chain.config.rms_norm_eps)
    residual_TD, x_TD = chain.run("Embedding and norm", residual.embed_norm, *begin)
    outputs: list[torch.Tensor] = []
    staged = None if weights.linear is None else empty_stage(x_TD, weights.linear)
    num_linear, forced = 0, iter(chain.forced)
    for layer, next_norm_D in zip(weights.layers, [*input_norms[1:], weights.norm_D], strict=True):
        if layer.latent is None:
            assert weights.linear is not None
            assert staged is not None
            partial = linear_attention(x_TD, weights.linear, num_linear, staged, chain)
            num_linear += 1
        else:
            partial = latent_attention(x_TD, layer.latent, len(outputs) - num_linear, chain)
        residual_TD, x_TD = _add("Attention", partial, residual_TD, layer.post_norm_D, chain, ranks)
        kind, given = ("Dense MLP", dense) if layer.router is None else ("MoE", next(forced, None))
        partial = feed(x_TD, layer.router, layer.experts, given, chain)
        residual_TD, x_TD = _add(kind, partial, residual_TD, next_norm_D, chain, ranks)
        outputs.append(residual_TD)
    taps = [outputs[layer] for layer in target_layer_ids]
    taps_TLD = chain.call("Taps", torch.stack, taps, 1) if taps else x_TD.new_empty(len(x_TD), 0, x_TD.shape[1])
    return Window(taps_TLD, x_TD, staged)


def _add(
    kind: str, partial: Partial, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, chain: Chain, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    stage = f"{kind} {'sum' if ranks.world_size == 1 else 'all-reduce'} and norm"
    return chain.run(stage, ranks.add_norm, *partial, residual_TD, norm_weight_D, chain.config.rms_norm_eps)
