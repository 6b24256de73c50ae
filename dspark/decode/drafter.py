"""What drafts the blocks of a text: a DSpark draft, or a look back at what was already said."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dspark.decode.round import Block, draw_block, num_confident
from dspark.decode.sampling import Sampling, Uniforms
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend
from dspark.errors import DraftMismatchError

LONGEST_MATCH, SHORTEST_MATCH = 3, 1


class Drafter(Protocol):
    """Drafts one text, block after block. The text stays the target's own as long as a block's rows are the very
    distributions that its ids were drawn from. ``target_layer_ids``: whose outputs it reads, () for none.
    ``has_confidence``: whether its blocks say how sure they are.
    """

    target_layer_ids: tuple[int, ...]
    has_confidence: bool

    def extend(self, ids: Sequence[int], taps_TLD: torch.Tensor) -> None:
        """Take in the next T >= 1 committed ids and the target's states there: the prompt's, then in each round those
        of its anchor and its accepted drafts.
        """

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        """Draft what follows the anchor, which stands right behind the committed ids; K may be 0."""


Draft = DraftModel | Callable[[], Drafter]
"""What many texts are drafted with: a DSpark draft, or what makes a drafter for each text."""


def check_layers(read: tuple[int, ...], tapped: tuple[int, ...]) -> None:
    """Raises: DraftMismatchError where a drafter reads (and does not read none) other layers than the target taps."""
    if read and list(read) != list(tapped):
        found = f"load the target with layers {list(read)}, which the draft reads, not with {list(tapped)}"
        raise DraftMismatchError(found)


class ModelDrafter:
    """A DSpark draft at work on one text. Blocks have num_drafts tokens (None: as many as it was trained for), less
    those from the first on whose confidence is below the threshold (0 is off).
    Raises: DraftMismatchError for a threshold without a confidence head, or num_drafts outside 1..block_size.
    """

    def __init__(self, draft: DraftModel, confidence_threshold: float = 0.0, num_drafts: int | None = None) -> None:
        block_size, self.has_confidence = draft.config.block_size, draft.confidence_head is not None
        if confidence_threshold > 0 and not self.has_confidence:
            raise DraftMismatchError(f"confidence_threshold {confidence_threshold} needs a confidence head; use 0")
        if num_drafts is not None and not 1 <= num_drafts <= block_size:
            raise DraftMismatchError(f"num_drafts must be 1 to {block_size}, the draft's block size, got {num_drafts}")
        self.draft, self.confidence_threshold, self.num_drafts = draft, confidence_threshold, num_drafts
        self.target_layer_ids, self.context = draft.config.target_layer_ids, ContextCache(draft)

    def extend(self, ids: Sequence[int], taps_TLD: torch.Tensor) -> None:
        extend(self.draft, self.context, taps_TLD)

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        """All tokens are drawn, also those that the threshold then leaves out."""
        block = draw_block(self.draft, self.context, anchor_id, sampling, uniforms, self.num_drafts)
        if self.confidence_threshold > 0:
            return block.first(num_confident(block.confidences, self.confidence_threshold))
        return block


class LookupDrafter:
    """Prompt lookup: what followed the last time that the text ended as it does now, without any model.

    The longest of the text's last 3, 2 or 1 tokens that occur before are looked up; of several places the latest that
    a whole block follows, else the earliest. Rows are one-hot, for nothing is drawn, so the acceptance rule keeps a
    token with the target's own probability of it. Without a match the block is empty and the target goes on alone.
    Source: prompt lookup decoding (A. Saxena, 2023); which of several places to take is ours.
    """

    target_layer_ids: tuple[int, ...] = ()
    has_confidence = False

    def __init__(self, block_size: int, vocab_size: int) -> None:
        self.block_size, self.vocab_size = block_size, vocab_size
        self.ids: list[int] = []
        self.device = torch.device("cpu")

    def extend(self, ids: Sequence[int], taps_TLD: torch.Tensor) -> None:
        self.ids += ids
        self.device = taps_TLD.device

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        ids_K = torch.tensor(look_up([*self.ids, anchor_id], self.block_size), dtype=torch.int64, device=self.device)
        probs_KV = torch.zeros(len(ids_K), self.vocab_size, device=self.device).scatter_(1, ids_K[:, None], 1.0)
        return Block(anchor_id, ids_K, probs_KV, ())


def look_up(ids: list[int], block_size: int) -> list[int]:
    """What followed the place where the end of ``ids`` occurred before, at most block_size ids; none if nowhere."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        end = ids[-length:]
        places = [place for place in range(length, len(ids)) if ids[place - length : place] == end]
        if places:
            whole = [place for place in places if place + block_size <= len(ids)]
            place = whole[-1] if whole else places[0]
            return ids[place : place + block_size]
    return []
