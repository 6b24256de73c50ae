"""One round of speculative decoding: draw a block from the draft, have the target verify it, commit what is kept."""

from dataclasses import dataclass

import torch

from dspark.decode.acceptance import accept
from dspark.decode.sampling import Sampling, Uniforms, draw, token_probs
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, propose
from dspark.types import CacheT, Target


@dataclass(frozen=True)
class Round:
    """What one round counts (dspark.md 6.1).

    ``num_proposed``: drafted tokens the target verified; up to the stop token if an accepted one is a stop token.
    ``acceptance_length``: tokens committed, accepted_drafts and the token after them (none after an accepted stop).
    ``is_cut``: the text ended inside the round, at an accepted stop token or at max_new_tokens. What lies beyond
    max_new_tokens is counted although it is not in the text.
    ``confidence_logits``: one for every drafted token, verified or not; empty for a draft without the head.
    """

    num_proposed: int
    accepted_drafts: int
    acceptance_length: int
    is_cut: bool
    confidence_logits: tuple[float, ...]


@dataclass(frozen=True)
class Block:
    """Drafted tokens on their way to the target, already shortened by the confidence threshold.
    Shapes: ids_K int64, K >= 0; probs_KV the very rows the ids were drawn from.
    """

    anchor_id: int
    ids_K: torch.Tensor
    probs_KV: torch.Tensor
    confidence_logits: tuple[float, ...]


def num_confident(confidence_logits_K: torch.Tensor, threshold: float) -> int:
    """How many drafted tokens are worth verifying: those before the first confidence below the threshold (0 is off).
    Lossless: a slot's confidence is known before its token is drawn, so the choice does not depend on that token.
    """
    is_confident_K = torch.sigmoid(confidence_logits_K) >= threshold
    return int(is_confident_K.cumprod(0).sum())


def draw_block(
    draft: DraftModel,
    context: ContextCache,
    anchor_id: int,
    sampling: Sampling,
    uniforms: Uniforms,
    confidence_threshold: float = 0.0,
) -> Block:
    """Draw a block after the anchor; all its tokens are drawn (one uniform each unless greedy), then it is shortened.
    The draft's context holds every position before the anchor.
    """
    rows: list[torch.Tensor] = []

    def pick(logits_V: torch.Tensor) -> int:
        rows.append(token_probs(logits_V, sampling))
        return int(logits_V.argmax()) if sampling.is_greedy else int(draw(rows[-1][None], [uniforms()]))

    proposal = propose(draft, context, anchor_id, pick)
    logits_K = proposal.confidence_logits_K
    num_kept = len(rows)
    if confidence_threshold > 0:
        assert logits_K is not None, "speculate refuses a threshold without a confidence head"
        num_kept = num_confident(logits_K, confidence_threshold)
    confidence_logits = () if logits_K is None else tuple(logits_K.tolist())
    return Block(anchor_id, proposal.ids_K[:num_kept], torch.stack(rows)[:num_kept], confidence_logits)


def verify_block(
    target: Target[CacheT], cache: CacheT, block: Block, sampling: Sampling, uniforms: Uniforms
) -> tuple[list[int], torch.Tensor, Round]:
    """Verify [anchor, block] in one pass of the target and commit the anchor and the accepted tokens.
    Returns: the new ids (the last is the next anchor, unless it is a stop token); taps_TLD of the committed positions,
    which the draft's context takes next; the round's counts.
    """
    ids_1T = torch.cat((block.ids_K.new_tensor([block.anchor_id]), block.ids_K))[None]
    output = target.verify(ids_1T, cache)
    target_probs_NV = token_probs(target.logits(output.last_hidden_ND), sampling)
    accepted_drafts, final_id = accept(block.ids_K, block.probs_KV, target_probs_NV, uniforms)
    num_proposed = len(block.ids_K)
    new_ids = [*block.ids_K[:accepted_drafts].tolist(), final_id]
    stop = next((i for i, new_id in enumerate(new_ids[:-1]) if new_id in sampling.stop_token_ids), None)
    if stop is not None:
        new_ids = new_ids[: stop + 1]
        accepted_drafts = num_proposed = stop + 1
    target.commit(cache, ids_1T.new_tensor([accepted_drafts + 1]))
    counts = Round(num_proposed, accepted_drafts, len(new_ids), stop is not None, block.confidence_logits)
    return new_ids, output.taps_NLD[: accepted_drafts + 1], counts
