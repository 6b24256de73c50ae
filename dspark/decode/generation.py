"""Whole texts, all in step: plain decoding, and speculative decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar, Generic

import torch

from dspark.decode.drafter import Draft, Drafter, ModelDrafter, check_layers
from dspark.decode.round import Block, Round, Verified, verify_blocks
from dspark.decode.sampling import Sampling, Uniforms, sample
from dspark.decode.scheduler import share
from dspark.decode.speaking import Spoken, Stopwatch
from dspark.draft.model import DraftModel
from dspark.errors import DraftMismatchError
from dspark.types import CacheT, Target, TargetOutput


@dataclass(frozen=True)
class PlainSpeaker(Generic[CacheT]):
    """The target alone, one token of every text a pass; rows that have ended go on unseen.

    Each row draws from its own uniforms, one a token, so its text does not depend on the other rows but for the
    rounding of the target's batched arithmetic. Phases: prefill, verify (also of what was drawn), commit, other.
    """

    target: Target[CacheT]
    is_drafting: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms], stopwatch: Stopwatch
    ) -> Iterator[list[Spoken]]:
        """As ``Speaker``."""
        if not prompts:
            return
        stopwatch.lap("other")
        cache, output = self.target.prefill(prompts)
        ids_B = _first_ids(self.target, output, prompts, sampling, uniforms)
        stopwatch.lap("prefill")
        rows, one_B = list(range(len(prompts))), torch.ones(len(prompts), dtype=torch.int64)
        for num_tokens in count(1):
            ids = ids_B.tolist()
            yield [Spoken(row, [ids[row]], None) for row in rows]
            stopwatch.lap("other")
            rows = [row for row in rows if ids[row] not in sampling.stop_token_ids]
            if not rows or num_tokens == sampling.max_new_tokens:
                return
            hidden_BD = self.target.verify(ids_B[:, None], cache).last_hidden_ND
            ids_B = sample(self.target.logits(hidden_BD), sampling, [uniform() for uniform in uniforms])
            stopwatch.lap("verify")
            self.target.commit(cache, one_B)
            stopwatch.lap("commit")


@dataclass(frozen=True)
class DraftSpeaker(Generic[CacheT]):
    """Speculative decoding: a round of every open text a step, drafted one after the other, verified in one pass.

    Each text has a drafter and uniforms of its own, so it and its rounds do not depend on the other rows but for the
    rounding of the target's batched arithmetic. With a ``budget`` at most so many drafted tokens are verified in a
    pass, those that most likely survive (``share``); then a text's rounds, not its law, depend on who competes, as long
    as the rows' uniforms are independent. Phases: prefill, draft, verify (with the choice of what is kept), commit,
    other.
    Raises: ValueError for a budget below 0.
    """

    target: Target[CacheT]
    draft: Draft
    budget: int | None = None
    is_drafting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"budget must be at least 0, got {self.budget}")
        self._drafter()  # what it does not fit is known before the first text

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms], stopwatch: Stopwatch
    ) -> Iterator[list[Spoken]]:
        """As ``Speaker``; a DSpark draft is bound to the target's tables. Source: dspark.md 6.

        A row's uniforms are taken in this order: one for the token after the prompt; then in each round one a drafted
        token (unless greedy), one a proposed token for its acceptance, one for the round's last token. A text of
        exactly max_new_tokens is followed by one more round, which is counted and adds nothing to the text: DeepSpec
        stops there.
        Raises: DraftMismatchError for a drafter that reads other layers than the target taps, or that does not say how
        sure it is when there is a budget; as the drafters are made.
        """
        if not prompts:
            return
        stopwatch.lap("other")
        drafters = [self._drafter() for _ in prompts]
        cache, output = self.target.prefill(prompts)
        first_ids = _first_ids(self.target, output, prompts, sampling, uniforms).tolist()
        taps = torch.split(output.taps_NLD, [len(prompt_ids_T) for prompt_ids_T in prompts])
        parts = zip(drafters, prompts, taps, first_ids, strict=True)
        texts = [_Text(drafter, ids_T.tolist(), taps_TLD, [new_id]) for drafter, ids_T, taps_TLD, new_id in parts]
        stopwatch.lap("prefill")
        yield [Spoken(row, text.ids[:], None) for row, text in enumerate(texts)]
        while True:
            stopwatch.lap("other")
            still = {row: text for row, text in enumerate(texts) if text.is_open(sampling)}
            if not still:
                return
            blocks = self.cut({row: text.draft(sampling, uniforms[row]) for row, text in still.items()})
            stopwatch.lap("draft")
            verified = verify_blocks(self.target, cache, blocks, sampling, uniforms, stopwatch.lap)
            yield [Spoken(row, *text.take(verified[row], sampling)) for row, text in still.items()]

    def _drafter(self) -> Drafter:
        drafter = ModelDrafter(self.draft) if isinstance(self.draft, DraftModel) else self.draft()
        check_layers(drafter.target_layer_ids, self.target.target_layer_ids)
        if self.budget is not None and not drafter.has_confidence:
            raise DraftMismatchError(f"a budget of {self.budget} drafted tokens needs a draft with a confidence head")
        return drafter

    def cut(self, blocks: dict[int, Block]) -> dict[int, Block]:
        """The blocks of a step without what the budget leaves out."""
        if self.budget is None:
            return blocks
        counts = share([block.confidences for block in blocks.values()], self.budget)
        return {row: block.first(count) for (row, block), count in zip(blocks.items(), counts, strict=True)}


@dataclass
class _Text:
    """A text in the making: its drafter, what that has yet to take in, and the new ids, the last one the anchor."""

    drafter: Drafter
    committed: list[int]
    taps_TLD: torch.Tensor
    ids: list[int]

    def is_open(self, sampling: Sampling) -> bool:
        return self.ids[-1] not in sampling.stop_token_ids and len(self.ids) <= sampling.max_new_tokens

    def draft(self, sampling: Sampling, uniforms: Uniforms) -> Block:
        self.drafter.extend(self.committed, self.taps_TLD)
        return self.drafter.draw(self.ids[-1], sampling, uniforms)

    def take(self, verified: Verified, sampling: Sampling) -> tuple[list[int], Round]:
        """Returns: the new ids that belong to the text, and the round, cut where it ends."""
        self.committed, self.taps_TLD = [self.ids[-1], *verified.ids[:-1]], verified.taps_TLD
        room, counts = sampling.max_new_tokens - len(self.ids), verified.counts
        self.ids += verified.ids
        return verified.ids[:room], replace(counts, is_cut=counts.is_cut or len(verified.ids) > room)


def _first_ids(
    target: Target[CacheT], output: TargetOutput, prompts: Sequence[torch.Tensor], sampling: Sampling,
    uniforms: Sequence[Uniforms],
) -> torch.Tensor:  # fmt: skip
    """The token after each prompt."""
    last_B = torch.tensor([len(prompt_ids_T) for prompt_ids_T in prompts]).cumsum(0) - 1
    hidden_BD = output.last_hidden_ND[last_B.to(output.last_hidden_ND.device)]
    return sample(target.logits(hidden_BD), sampling, [uniform() for uniform in uniforms])


def generate(
    target: Target[CacheT], prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms]
) -> list[torch.Tensor]:
    """Plain decoding of all prompts in step (``PlainSpeaker``); for ``uniforms`` see ``row_uniforms``.
    Shapes: prompts int64 [T_b], T_b >= 1. Returns: new ids of each row, int64 on the CPU, the stop token included.
    """
    ids: list[list[int]] = [[] for _ in prompts]
    for news in PlainSpeaker(target)(prompts, sampling, uniforms, Stopwatch()):
        for spoken in news:
            ids[spoken.row] += spoken.ids
    return list(map(torch.tensor, ids))
