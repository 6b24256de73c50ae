"""Decode a task's prompts with a draft (or plainly) and count: acceptance, speed, texts that run in circles."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dspark.decode.drafter import Draft
from dspark.decode.generation import generate, speculate
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms
from dspark.errors import PromptError
from dspark.eval.confidence import ConfidenceStatistics, confidence_statistics
from dspark.eval.statistics import AcceptanceStatistics, acceptance_statistics
from dspark.types import CacheT, Target

LONGEST_PERIOD_TOKENS = 64
SHORTEST_LOOP_TOKENS = 48
FEWEST_REPEATS = 4
TIE_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""By the target's dtype: logits closer than this change places by rounding, when they are summed in another order."""


@dataclass(frozen=True)
class DecodedText:
    """One prompt's answer (ids_T int64, new ids only), its rounds (none when decoded plainly) and its time."""

    ids_T: torch.Tensor
    rounds: tuple[Round, ...]
    seconds: float
    is_looping: bool


Each = Callable[[int, Callable[[], DecodedText]], DecodedText]
"""Is asked for every text by its prompt's number and given what decodes it, and may know the text already."""


@dataclass(frozen=True)
class Difference:
    """Where one prompt's greedy text first leaves plain decoding's; prompts and positions (of new tokens) from 0.
    ``gap``: between the target's two largest logits there. ``is_tie``: rounding can explain it, for both texts go on
    with a token whose logit is within ``tie_gap`` of the largest. A text that only ends elsewhere is never a tie.
    """

    prompt: int
    position: int
    gap: float
    is_tie: bool


@dataclass(frozen=True)
class GreedyEquality:
    """Greedy texts against plain decoding's. ``mismatches``: prompts whose texts differ; ``faults``: those of them
    that rounding does not explain.
    """

    mismatches: int
    faults: int
    tie_gap: float
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class Measurement:
    """One task at one temperature; ``acceptance`` is None for plain decoding.

    ``new_tokens`` are those in the texts; ``tokens_per_second`` divides them by the wall time of all texts, one prompt
    at a time, prefill included. ``looping_share``: texts that end in a loop (``is_looping``), which flatter a draft;
    ``mean_acceptance_length_without_loops`` leaves them out and is None when nothing is left.
    ``confidence`` is there for drafts that say how sure they are, ``equality`` for greedy texts that were compared with
    plain decoding's.
    """

    task: str
    temperature: float
    num_prompts: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    looping_share: float
    mean_acceptance_length_without_loops: float | None
    acceptance: AcceptanceStatistics | None
    confidence: ConfidenceStatistics | None = None
    equality: GreedyEquality | None = None


def decode_prompts(
    target: Target[CacheT],
    draft: Draft | None,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    seed: int,
    each: Each = lambda _, decode: decode(),
) -> tuple[DecodedText, ...]:
    """Decode the prompts (int64 [T]) one after the other, speculatively, or plainly without a draft.

    Prompt i draws from generator (seed, i), so the texts do not depend on which other prompts are measured.
    Raises: PromptError when a draft was given and every text stopped at its first token.
    """
    texts = []
    for index, prompt_ids_T in enumerate(prompts):
        texts.append(each(index, partial(_decode, target, draft, prompt_ids_T, sampling, row_uniforms(seed, index))))
    if draft is not None and not any(text.rounds for text in texts):
        raise PromptError(f"all {len(prompts)} texts stopped at their first token; use prompts that the target answers")
    return tuple(texts)


def _decode(
    target: Target[CacheT], draft: Draft | None, prompt_ids_T: torch.Tensor, sampling: Sampling, uniforms: Uniforms
) -> DecodedText:
    start = time.perf_counter()
    rounds: tuple[Round, ...] = ()
    if draft is None:
        ids_T = generate(target, [prompt_ids_T], sampling, [uniforms])[0]
    else:
        generation = speculate(target, draft, prompt_ids_T, sampling, uniforms)
        ids_T, rounds = generation.ids_T, generation.rounds
    return DecodedText(ids_T, rounds, time.perf_counter() - start, is_looping(ids_T.tolist()))


def summarise(task: str, temperature: float, texts: Sequence[DecodedText], seed: int = 0) -> Measurement:
    """Counts over all texts of a task; without a single round they count as decoded plainly."""
    rounds = [text.rounds for text in texts]
    judged = [counts for text in rounds for counts in text if counts.confidence_logits and counts.num_proposed]
    sober = [text.rounds for text in texts if not text.is_looping and text.rounds]
    sober_length = acceptance_statistics(sober, seed).mean_acceptance_length if sober else None
    new_tokens = sum(len(text.ids_T) for text in texts)
    seconds = sum(text.seconds for text in texts)
    return Measurement(
        task=task,
        temperature=temperature,
        num_prompts=len(texts),
        new_tokens=new_tokens,
        seconds=seconds,
        tokens_per_second=new_tokens / seconds,
        looping_share=sum(text.is_looping for text in texts) / len(texts),
        mean_acceptance_length_without_loops=sober_length,
        acceptance=acceptance_statistics(rounds, seed) if any(rounds) else None,
        confidence=confidence_statistics(judged) if judged else None,
    )


def measure(
    target: Target[CacheT],
    draft: Draft | None,
    task: tuple[str, Sequence[torch.Tensor]],
    sampling: Sampling,
    seed: int,
    each: Each = lambda _, decode: decode(),
) -> Measurement:
    """``decode_prompts`` and ``summarise`` of a named task."""
    name, prompts = task
    return summarise(name, sampling.temperature, decode_prompts(target, draft, prompts, sampling, seed, each))


def compare_greedy(
    target: Target[CacheT],
    prompts: Sequence[torch.Tensor],
    texts: Sequence[DecodedText],
    plain_texts: Sequence[DecodedText],
) -> GreedyEquality:
    """Compare greedy texts of the prompts (int64 [T]) with plain decoding's, token by token. Where they part, the
    target reads the text before once more and says how close its two largest logits are.
    """
    tie_gap = TIE_GAPS.get(target.head_VD.dtype, max(TIE_GAPS.values()))
    differences = []
    for number, (prompt_ids_T, text, plain) in enumerate(zip(prompts, texts, plain_texts, strict=True)):
        ids, expected = text.ids_T.tolist(), plain.ids_T.tolist()
        if ids == expected:
            continue
        pairs = enumerate(zip(ids, expected, strict=False))
        position = next((place for place, pair in pairs if pair[0] != pair[1]), min(len(ids), len(expected)))
        before_T = torch.cat((prompt_ids_T, plain.ids_T[:position].to(prompt_ids_T)))
        with torch.no_grad():
            logits_V = target.logits(target.prefill([before_T])[1].last_hidden_ND[-1:])[0]
        first, second = logits_V.topk(2).values.tolist()
        rivals = [*ids[position : position + 1], *expected[position : position + 1]]
        is_tie = len(rivals) == 2 and first - float(logits_V[rivals].min()) < tie_gap
        differences.append(Difference(number, position, first - second, is_tie))
    faults = sum(not difference.is_tie for difference in differences)
    return GreedyEquality(len(differences), faults, tie_gap, tuple(differences))


def is_looping(ids: Sequence[int]) -> bool:
    """Whether a text ends in a loop: one run of at most 64 tokens, at least 4 times in a row, over at least 48 tokens.
    The rule looks at the end only: a text that left its loop, if only to stop, is not degenerate as a whole.
    """
    last = len(ids) - 1
    for period in range(1, min(LONGEST_PERIOD_TOKENS, len(ids) // FEWEST_REPEATS) + 1):
        needed = max(SHORTEST_LOOP_TOKENS, FEWEST_REPEATS * period) - period
        if last - needed - period + 1 >= 0 and all(
            ids[last - step] == ids[last - step - period] for step in range(needed)
        ):
            return True
    return False
