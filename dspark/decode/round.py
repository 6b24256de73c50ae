"""One round of speculative decoding: draw a block from the draft, have the target verify it, commit what is kept."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from dspark.decode.sampling import Sampling, Uniforms, draw, token_probs
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, propose
from dspark.types import CacheT, Target
from dspark.verifier.drafting.acceptance import keep


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
    """Drafted tokens on their way to the target; ``first`` leaves some out, their confidences stay.
    Shapes: ids_K int64, K >= 0; probs_KV the very rows the ids were drawn from.
    """

    anchor_id: int
    ids_K: torch.Tensor
    probs_KV: torch.Tensor
    confidence_logits: tuple[float, ...]

    @property
    def confidences(self) -> list[float]:
        """How likely each of the K tokens is accepted if those before it are, as the draft has it."""
        logits_K = torch.tensor(self.confidence_logits[: len(self.ids_K)], dtype=torch.float64)
        return logits_K.sigmoid().tolist()

    def first(self, num_drafts: int) -> "Block":
        """The block without the tokens behind its first num_drafts."""
        return replace(self, ids_K=self.ids_K[:num_drafts], probs_KV=self.probs_KV[:num_drafts])


class Verified(NamedTuple):
    """What a round made of one text's block: the new ids (the last is the next anchor, unless it is a stop token);
    taps_TLD of the committed positions, which the draft's context takes next; the round's counts.
    """

    ids: list[int]
    taps_TLD: torch.Tensor
    counts: Round


def num_confident(confidences: Sequence[float], threshold: float) -> int:
    """How many drafted tokens are worth verifying: those before the first confidence below the threshold.
    Lossless: a slot's confidence is known before its token is drawn, so the choice does not depend on that token.
    """
    return next((slot for slot, sure in enumerate(confidences) if not sure >= threshold), len(confidences))


def draw_block(
    draft: DraftModel, context: ContextCache, anchor_id: int, sampling: Sampling, uniforms: Uniforms,
    num_drafts: int | None = None,
) -> Block:  # fmt: skip
    """Draw the first num_drafts tokens (None: all) of the block after the anchor, with one uniform each unless greedy.
    The draft's context holds every position before the anchor.
    """
    rows: list[torch.Tensor] = []

    def pick(logits_V: torch.Tensor) -> int:
        rows.append(token_probs(logits_V, sampling))
        return int(logits_V.argmax()) if sampling.is_greedy else int(draw(rows[-1][None], [uniforms()]))

    proposal = propose(draft, context, anchor_id, pick, num_drafts)
    logits_K = proposal.confidence_logits_K
    confidence_logits = () if logits_K is None else tuple(logits_K.tolist())
    return Block(anchor_id, proposal.ids_K, torch.stack(rows), confidence_logits)


def accept(
    ids_K: torch.Tensor, draft_probs_KV: torch.Tensor, target_probs_NV: torch.Tensor, uniforms: Uniforms
) -> tuple[int, int]:  # fmt: skip
    """``keep`` of a block, with uniforms of the text's own: K + 1 always, one a drafted token, then one for the last.
    Shapes: as there, N = K + 1. Returns: (accepted_drafts, the id after them).
    """
    uniforms_N = target_probs_NV.new_tensor([uniforms() for _ in range(len(ids_K) + 1)], dtype=torch.float64)
    count_1, next_id_1 = keep(ids_K, draft_probs_KV, target_probs_NV, uniforms_N)
    return int(count_1) - 1, int(next_id_1)


def verify_blocks(
    target: Target[CacheT], cache: CacheT, blocks: Mapping[int, Block], sampling: Sampling,
    uniforms: Sequence[Uniforms], lap: Callable[[str], None],
) -> dict[int, Verified]:  # fmt: skip
    """Verify [anchor, block] of every open text in one pass of the target, and commit anchors and accepted tokens.

    ``blocks``: by the text's row in the cache. Rows without a block, and those behind a block's end, read padding: what
    the target says there is looked at by nobody and none of it is committed. Row b takes uniforms[b] alone.
    ``lap`` hears "verify" when the choices have been read, and "commit".
    """
    windows = {
        row: torch.cat((block.ids_K.new_tensor([block.anchor_id]), block.ids_K)) for row, block in blocks.items()
    }
    padding_T = next(iter(windows.values()))[:0]
    ids_BT = pad_sequence([windows.get(row, padding_T) for row in range(len(uniforms))], batch_first=True)
    output = target.verify(ids_BT, cache)
    target_probs_NV = token_probs(target.logits(output.last_hidden_ND), sampling)
    counts_B, verified = [0] * len(uniforms), dict[int, Verified]()
    for row, block in blocks.items():
        start = row * ids_BT.shape[1]
        rows_NV = target_probs_NV[start : start + len(windows[row])]
        accepted_drafts, final_id = accept(block.ids_K, block.probs_KV, rows_NV, uniforms[row])
        ids = [*block.ids_K[:accepted_drafts].tolist(), final_id]
        new_ids, counts = count(ids, len(block.ids_K), sampling.stop_token_ids, block.confidence_logits)
        counts_B[row] = counts.accepted_drafts + 1
        verified[row] = Verified(new_ids, output.taps_NLD[start : start + counts_B[row]], counts)
    lap("verify")
    target.commit(cache, torch.tensor(counts_B))
    lap("commit")
    return verified


def count(
    ids: list[int], num_proposed: int, stop_token_ids: Collection[int], confidence_logits: tuple[float, ...]
) -> tuple[list[int], Round]:
    """A round's counts, from its accepted drafts and the token after them: these ids, up to an accepted stop token."""
    accepted_drafts = len(ids) - 1
    stop = next((place for place, new_id in enumerate(ids[:-1]) if new_id in stop_token_ids), None)
    if stop is not None:
        ids = ids[: stop + 1]
        accepted_drafts = num_proposed = stop + 1
    return ids, Round(num_proposed, accepted_drafts, len(ids), stop is not None, confidence_logits)
