"""Drafting one block at inference: the context cache, and the loop over slots."""

from collections.abc import Callable

import torch
from torch import Tensor

from dspark.draft.backbone import Memory
from dspark.draft.model import DraftModel
from dspark.kernels.anchor_attention import attend
from dspark.types import Proposal


class ContextCache:
    """Keys (after norm and rotation) and values of committed positions, [capacity, G, E] a layer.
    Rows below num_tokens are committed; behind them a block's own keys lie while it is drafted.
    """

    def __init__(self, draft: DraftModel) -> None:
        config, weight = draft.config, draft.fc.weight
        shape = (0, config.num_key_value_heads, config.head_dim)
        self.keys = [weight.new_empty(shape) for _ in range(config.num_hidden_layers)]
        self.values = [weight.new_empty(shape) for _ in range(config.num_hidden_layers)]
        self.num_tokens = 0

    def write(self, layer: int, keys_TGE: Tensor, values_TGE: Tensor) -> tuple[Tensor, Tensor]:
        """Put T rows behind the committed ones without committing them. Returns: all rows up to the last written."""
        end = self.num_tokens + len(keys_TGE)
        for rows, new in ((self.keys, keys_TGE), (self.values, values_TGE)):
            if len(rows[layer]) < end:
                grown = new.new_empty(2 * end, *new.shape[1:])
                grown[: self.num_tokens] = rows[layer][: self.num_tokens]
                rows[layer] = grown
            rows[layer][self.num_tokens : end] = new
        return self.keys[layer][:end], self.values[layer][:end]

    def memory(self, layer: int) -> Memory:
        """The layer's committed rows as what a block reads before its own."""
        return lambda _, q_NHE, k_NGE, v_NGE: attend(q_NHE, *self.write(layer, k_NGE, v_NGE), None)


@torch.no_grad()
def extend(draft: DraftModel, cache: ContextCache, taps_TLD: Tensor) -> None:
    """Commit the target's states at the next T >= 0 positions: the prompt's, or a round's anchor and accepted drafts.
    The new anchor has no state until it is verified. Source: specs/dspark.md 6, step 6.
    """
    for layer, (keys_TGE, values_TGE) in enumerate(draft.context_keys_values(taps_TLD, cache.num_tokens)):
        cache.write(layer, keys_TGE, values_TGE)
    cache.num_tokens += len(taps_TLD)


@torch.no_grad()
def propose(
    draft: DraftModel, cache: ContextCache, anchor_id: int, pick: Callable[[Tensor], int],
    num_drafts: int | None = None,
) -> Proposal:  # fmt: skip
    """Draft the first num_drafts tokens (None: all block_size) after the anchor, at position ``cache.num_tokens``.

    The layers run once, over all slots whatever num_drafts, for a slot sees them all; then slot by slot ``pick``
    receives the slot's logits [V] (float32 or better, the bias of the token before included) and returns an id, which
    biases the next slot. The cache keeps its committed rows only.
    Source: DSpark (arXiv 2607.05147), inference; DeepSpec (specs/dspark.md 6, steps 1 and 2).
    """
    device, head = draft.fc.weight.device, draft.markov_head
    position_1 = torch.tensor([cache.num_tokens], device=device)
    ids = [torch.tensor(anchor_id, device=device)]
    memories = [cache.memory(layer) for layer in range(len(draft.layers))]
    hidden_KD = draft.blocks(ids[0].view(1), position_1, memories)[0, :num_drafts]
    state_R = hidden_KD.new_zeros(draft.config.markov_rank)
    embedded, logits = [], []
    for hidden_D, base_V in zip(hidden_KD, draft.base_logits(hidden_KD), strict=True):
        embedded.append(head.embed(ids[-1]))
        mixed_R, state_R = head.step(embedded[-1], hidden_D, state_R)
        logits.append(base_V + head.markov_w2(mixed_R))
        ids.append(torch.tensor(pick(logits[-1]), device=device))
    confidence = draft.confidence_head
    confidence_K = None if confidence is None else confidence(hidden_KD, torch.stack(embedded))
    return Proposal(torch.stack(ids[1:]), torch.stack(logits), confidence_K)
