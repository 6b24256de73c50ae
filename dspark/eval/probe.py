"""Small measurements on few texts: a true decode while a draft is being trained, and what rounded taps cost a draft."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dspark.data.chat import Encoded
from dspark.decode.generation import DraftSpeaker
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling
from dspark.decode.teacher_forced import estimate
from dspark.draft.model import DraftModel
from dspark.errors import PromptError
from dspark.eval.measure import decode_prompts
from dspark.eval.statistics import PairedComparison, acceptance_statistics, compare_pairs, difference_of_means
from dspark.types import Reading, Target, TargetOutput


class Probe(NamedTuple):
    """The target, the few prompts (int64 [T]) and the draws that every probe of a run shares, so that only the draft
    tells two probes apart.
    """

    target: Target[Any]
    prompts: tuple[torch.Tensor, ...]
    sampling: Sampling
    seed: int

    def __call__(self, draft: DraftModel) -> float:
        """Decode with the draft as it is; training goes on as if nothing had happened. Returns: the mean acceptance
        length with the bonus token, over the rounds of all prompts. Raises: PromptError when there is no round.
        """
        return acceptance_statistics(list(self.rounds(draft).values())).mean_acceptance_length

    def change(self, start: DraftModel, draft: DraftModel) -> PairedComparison:
        """The draft against the one that it was trained from, prompt by prompt. Raises: as a call."""
        return compare_pairs(self.rounds(draft), self.rounds(start))

    def rounds(self, draft: DraftModel) -> dict[int, Sequence[Round]]:
        """Of every prompt. Raises: PromptError when there is no round."""
        texts = decode_prompts(DraftSpeaker(self.target, draft), self.prompts, self.sampling, self.seed)
        if not any(text.rounds for text in texts):
            raise PromptError("probe: all texts stopped at their first token; use prompts that the target answers")
        return {number: text.rounds for number, text in enumerate(texts)}


class TapCost(NamedTuple):
    """Mean expected acceptance lengths (``TeacherForced.lengths``) over the same blocks: of taps as they are, and of
    those that were rounded. ``difference`` = rounded - exact, with its paired 95 % bootstrap interval over texts.
    """

    num_texts: int
    num_blocks: int
    exact: float
    rounded: float
    difference: float
    interval: tuple[float, float]

    def line(self, name: str) -> str:
        """What a door prints; ``name`` is that of the stored taps, such as "float8 taps"."""
        low, high = self.interval
        lengths = f"expected acceptance length {self.rounded:.3f}, of exact ones {self.exact:.3f}"
        difference = f"difference {self.difference:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}"
        return f"{name}: {lengths}; {difference}; {self.num_blocks} blocks of {self.num_texts} texts"


class _HasRead:
    """A target that has read its only text: ``prefill`` says ``output``, all else is the target's own."""

    def __init__(self, target: Reading, output: TargetOutput) -> None:
        self.target, self.output = target, output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[None, TargetOutput]:
        return None, self.output


@torch.no_grad()
def tap_cost(
    target: Reading,
    draft: DraftModel,
    texts: Iterable[tuple[torch.Tensor, torch.Tensor]],
    sampling: Sampling,
    round_taps: Callable[[torch.Tensor], torch.Tensor],
) -> TapCost:
    """Judge the draft's blocks, which follow each other without a gap, by ``estimate``: once with the target's taps and
    once with ``round_taps`` of them (same shape and dtype), from one pass of the target over each text.

    Texts, of one prompt each, are (prompt's ids, answer's ids) as there; those without a whole block say nothing. With
    ranks, all of them call, and find the same.
    Raises: PromptError when no text has a block; DraftMismatchError as ``estimate``.
    """
    counts: list[list[tuple[float, int]]] = []
    for prompt_ids_T, text_ids_T in texts:
        _, output = target.prefill([torch.cat((prompt_ids_T, text_ids_T))])
        rounded = TargetOutput(round_taps(output.taps_NLD), output.last_hidden_ND)
        anchors = range(0, len(text_ids_T), draft.config.block_size)
        heard = (_HasRead(target, read) for read in (rounded, output))
        found = [estimate(each, draft, prompt_ids_T, text_ids_T, sampling, anchors) for each in heard]
        if num_blocks := len(found[0].anchors):
            counts.append([(sum(each.lengths), num_blocks) for each in found])
    if not counts:
        raise PromptError(f"no answer is longer than a block of {draft.config.block_size} tokens; give longer ones")
    rounded_length, exact, difference, interval = difference_of_means(counts)
    return TapCost(len(counts), sum(text[0][1] for text in counts), exact, rounded_length, difference, interval)


def last_answer(encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids before a sequence's last run of positions to predict, and those of the run."""
    end = int(encoded.loss_mask_T.nonzero()[-1]) + 1
    start = int((~encoded.loss_mask_T[:end]).nonzero()[-1]) + 1
    return encoded.ids_T[:start], encoded.ids_T[start:end]
