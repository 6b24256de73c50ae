"""What drafts the blocks of a text: a DSpark draft, or a look back at what was already said."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dspark.decode.round import Block, draw_block
from dspark.decode.sampling import Sampling, Uniforms
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend
from dspark.errors import DraftMismatchError

LONGEST_MATCH, SHORTEST_MATCH = 3, 1


class Drafter(Protocol):
    """Drafts one text, block after block. The text stays the target's own as long as a block's rows are the very
    distributions that its ids were drawn from. ``target_layer_ids``: whose outputs it reads, () for none.
    """

    target_layer_ids: tuple[int, ...]

    def extend(self, ids: Sequence[int], taps_TLD: torch.Tensor) -> None:
        """Take in the next T >= 1 committed ids and the target's states there: the prompt's, then in each round those
        of its anchor and its accepted drafts.
        """
        ...

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        """Draft what follows the anchor, which stands right behind the committed ids; K may be 0."""
        ...


Draft = DraftModel | Callable[[], Drafter]
"""What many texts are drafted with: a DSpark draft, or what makes a drafter for each text."""


def check_layers(read: tuple[int, ...], tapped: tuple[int, ...]) -> None:
    """Raises: DraftMismatchError where a drafter reads (and does not read none) other layers than the target taps."""
    if read and list(read) != list(tapped):
        found = f"load the target with layers {list(read)}, which the draft reads, not with {list(tapped)}"
        raise DraftMismatchError(found)


class ModelDrafter:
    """A DSpark draft at work on one text. Raises: DraftMismatchError for a threshold without a confidence head."""

    def __init__(self, draft: DraftModel, confidence_threshold: float = 0.0) -> None:
        if confidence_threshold > 0 and not draft.config.enable_confidence_head:
            raise DraftMismatchError(f"confidence_threshold {confidence_threshold} needs a confidence head; use 0")
        self.draft, self.confidence_threshold = draft, confidence_threshold
        self.target_layer_ids, self.context = draft.config.target_layer_ids, ContextCache(draft)

    def extend(self, ids: Sequence[int], taps_TLD: torch.Tensor) -> None:
        extend(self.draft, self.context, taps_TLD)

    def draw(self, anchor_id: int, sampling: Sampling, uniforms: Uniforms) -> Block:
        return draw_block(self.draft, self.context, anchor_id, sampling, uniforms, self.confidence_threshold)


class LookupDrafter:
    """Prompt lookup: what followed the last time that the text ended as it does now, without any model.

    The longest of the text's last 3, 2 or 1 tokens that occur before are looked up; of several places the latest that
    a whole block follows, else the earliest. Rows are one-hot, for nothing is drawn, so the acceptance rule keeps a
    token with the target's own probability of it. Without a match the block is empty and the target goes on alone.
    Source: prompt lookup decoding (A. Saxena, 2023); which of several places to take is ours.
    """

    target_layer_ids: tuple[int, ...] = ()

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
