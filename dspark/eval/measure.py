"""Decode a task's prompts with a draft (or plainly) and count: acceptance, speed, texts that run in circles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms
from dspark.decode.speaking import Speaker, Stopwatch
from dspark.eval.confidence import ConfidenceStatistics, confidence_statistics
from dspark.eval.statistics import AcceptanceStatistics, DecodingGap, TeacherForcedStatistics, acceptance_statistics
from dspark.eval.timing import Speedup, Timing, timing_statistics
from dspark.types import Target

LONGEST_PERIOD_TOKENS = 64
SHORTEST_LOOP_TOKENS = 48
FEWEST_REPEATS = 4
TIE_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""By the target's dtype: logits closer than this change places by rounding, when they are summed in another order."""


WARM_UP_TOKENS = 4
ROWS = 256
"""Rows of logits that are looked at together; a vocabulary is wide."""


@dataclass(frozen=True)
class DecodedText:
    """One prompt's answer (ids_T int64, new ids only), its rounds (none when decoded plainly) and its time.

    ``seconds`` and ``first_token_seconds`` are what its reader waits, from the prompt's turn to the last and the first
    token. ``phase_seconds`` is its share of the machine's time: that of its batch, in equal parts.
    """

    ids_T: torch.Tensor
    rounds: tuple[Round, ...]
    seconds: float
    is_looping: bool
    first_token_seconds: float
    phase_seconds: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        """New tokens in the text."""
        return len(self.ids_T)


Decode = Callable[[Sequence[int]], Sequence[DecodedText]]
"""Decodes the prompts of these numbers, as one batch."""
Each = Callable[[Sequence[int], Decode], Sequence[DecodedText]]
"""Is asked for the texts of a batch of prompts by their numbers and given what decodes them; may know some already."""


def decode_all(numbers: Sequence[int], decode: Decode) -> Sequence[DecodedText]:
    """The ``Each`` that knows none."""
    return decode(numbers)


@dataclass(frozen=True)
class Difference:
    """Where one prompt's greedy text first leaves plain decoding's; prompts and positions (of new tokens) from 0.
    ``gap``: between the target's two largest logits there, or between the largest and that of the text's token.
    ``is_tie``: rounding can explain it, for both texts go on with a token whose logit is within ``tie_gap`` of the
    largest. A text that only ends elsewhere is never a tie.
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

    ``new_tokens`` are those in the texts; ``tokens_per_second`` divides them by the wall time of all of them, prefill
    included. ``looping_share``: texts that end in a loop (``is_looping``), which flatter a draft;
    ``mean_acceptance_length_without_loops`` leaves them out and is None when nothing is left.
    ``confidence`` is there for drafts that say how sure they are, ``equality`` for greedy texts, ``speedup`` beside
    plain decoding, ``teacher_forced`` and ``decoding_gap`` where teacher forcing was asked what it expects of a draft.
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
    timing: Timing
    confidence: ConfidenceStatistics | None = None
    equality: GreedyEquality | None = None
    speedup: Speedup | None = None
    teacher_forced: TeacherForcedStatistics | None = None
    decoding_gap: DecodingGap | None = None


def decode_prompts(
    speaker: Speaker,
    prompts: Sequence[torch.Tensor],
    sampling: Sampling,
    seed: int,
    each: Each = decode_all,
    batch_size: int = 1,
) -> tuple[DecodedText, ...]:
    """Decode the prompts (int64 [T]), ``batch_size`` at a time in step.

    Prompt i draws from generator (seed, i), so the texts do not depend on which other prompts are measured. On a GPU
    some tokens are decoded before the first text, for what is compiled or captured once.
    Raises: PromptError for a text without a token to draw from.
    """
    texts: list[DecodedText] = []
    is_warm = not torch.cuda.is_available()

    def decode(numbers: Sequence[int]) -> Sequence[DecodedText]:
        nonlocal is_warm
        if not is_warm:
            few = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
            listen(speaker, [prompts[n] for n in numbers], few, [row_uniforms(seed, n) for n in numbers])
            is_warm = True
        return listen(speaker, [prompts[n] for n in numbers], sampling, [row_uniforms(seed, n) for n in numbers])

    for start in range(0, len(prompts), batch_size):
        texts += each(range(start, min(start + batch_size, len(prompts))), decode)
    return tuple(texts)


def listen(
    speaker: Speaker, prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms]
) -> list[DecodedText]:
    """The texts of a batch, with their clocks."""
    stopwatch, places = Stopwatch(), range(len(prompts))
    ids: list[list[int]] = [[] for _ in places]
    rounds: list[list[Round]] = [[] for _ in places]
    first, last = [0.0] * len(prompts), [0.0] * len(prompts)
    for news in speaker(prompts, sampling, uniforms, stopwatch):
        now = stopwatch.seconds()
        for row, new_ids, counts in news:
            first[row], last[row] = first[row] or now, now
            ids[row] += new_ids
            rounds[row] += [] if counts is None else [counts]
    phases = {name: seconds / len(prompts) for name, seconds in stopwatch.phase_seconds.items()}
    return [
        DecodedText(torch.tensor(ids[b]), tuple(rounds[b]), last[b], is_looping(ids[b]), first[b], phases)
        for b in places
    ]


def summarise(task: str, temperature: float, texts: Sequence[DecodedText], seed: int = 0) -> Measurement:
    """Counts over all texts of a task; without a single round they count as decoded plainly."""
    rounds = [text.rounds for text in texts]
    judged = [counts for text in rounds for counts in text if counts.confidence_logits and counts.num_proposed]
    sober = [text.rounds for text in texts if not text.is_looping and text.rounds]
    sober_length = acceptance_statistics(sober, seed).mean_acceptance_length if sober else None
    timing, new_tokens = timing_statistics(texts), sum(text.num_tokens for text in texts)
    return Measurement(
        task=task,
        temperature=temperature,
        num_prompts=len(texts),
        new_tokens=new_tokens,
        seconds=sum(timing.phase_seconds.values()),
        tokens_per_second=timing.output_tokens_per_second,
        looping_share=sum(text.is_looping for text in texts) / len(texts),
        mean_acceptance_length_without_loops=sober_length,
        acceptance=acceptance_statistics(rounds, seed) if any(rounds) else None,
        timing=timing,
        confidence=confidence_statistics(judged) if judged else None,
    )


@torch.no_grad()
def compare_greedy(
    target: Target[Any],
    prompts: Sequence[torch.Tensor],
    texts: Sequence[DecodedText],
    sampling: Sampling,
    plain_texts: Sequence[DecodedText] | None = None,
) -> GreedyEquality:
    """Compare greedy texts of the prompts (int64 [T]) with plain decoding's, token by token; without these, every token
    with the target's arg-max after the text before it, all read in one pass, and the end with where it has to be. That
    says the same: a text is plain decoding's when no token departs from the arg-max.
    """
    tie_gap = TIE_GAPS.get(target.head_VD.dtype, max(TIE_GAPS.values()))
    differences = []
    for number, (prompt_ids_T, text) in enumerate(zip(prompts, texts, strict=True)):
        if plain_texts is None:
            found = _departure(target, prompt_ids_T, text.ids_T, sampling, tie_gap)
        else:
            found = _parting(target, prompt_ids_T, (text.ids_T, plain_texts[number].ids_T), tie_gap)
        if found is not None:
            differences.append(Difference(number, *found))
    faults = sum(not difference.is_tie for difference in differences)
    return GreedyEquality(len(differences), faults, tie_gap, tuple(differences))


def _parting(
    target: Target[Any], prompt_ids_T: torch.Tensor, texts: tuple[torch.Tensor, torch.Tensor], tie_gap: float
) -> tuple[int, float, bool] | None:
    """Where two texts part, the gap between the two largest logits there, and whether that is a tie."""
    ids, expected = texts[0].tolist(), texts[1].tolist()
    if ids == expected:
        return None
    pairs = enumerate(zip(ids, expected, strict=False))
    position = next((place for place, pair in pairs if pair[0] != pair[1]), min(len(ids), len(expected)))
    before_T = torch.cat((prompt_ids_T, texts[1][:position].to(prompt_ids_T)))
    logits_V = target.logits(target.prefill([before_T])[1].last_hidden_ND[-1:])[0]
    first, second = logits_V.topk(2).values.tolist()
    rivals = [*ids[position : position + 1], *expected[position : position + 1]]
    return position, first - second, len(rivals) == 2 and first - float(logits_V[rivals].min()) < tie_gap


def _departure(
    target: Target[Any], prompt_ids_T: torch.Tensor, ids_T: torch.Tensor, sampling: Sampling, tie_gap: float
) -> tuple[int, float, bool] | None:
    """The first token that is not the arg-max (if one is no tie, the first such), how far below it lies, and whether
    that is a tie; or where the text should have ended.
    """
    read_T = torch.cat((prompt_ids_T, ids_T[:-1].to(prompt_ids_T)))
    hidden_TD = target.prefill([read_T])[1].last_hidden_ND[len(prompt_ids_T) - 1 :]
    gaps: list[float] = []
    own_T = ids_T.to(hidden_TD.device)
    for rows_TD, rows_T in zip(torch.split(hidden_TD, ROWS), torch.split(own_T, ROWS), strict=True):
        logits_TV = target.logits(rows_TD)
        gaps += (logits_TV.amax(-1) - logits_TV.gather(1, rows_T[:, None])[:, 0]).tolist()
    ends = [n for n, new_id in enumerate(ids_T.tolist()) if new_id in sampling.stop_token_ids] + [len(ids_T) - 1]
    off = [n for n, gap in enumerate(gaps) if gap > 0]
    wrong = [n for n in off if gaps[n] >= tie_gap]
    if (place := next(iter(wrong or off), None)) is not None:
        return place, gaps[place], not wrong
    is_whole = len(ids_T) == sampling.max_new_tokens or len(ends) > 1
    return None if ends[0] == len(ids_T) - 1 and is_whole else (ends[0], gaps[ends[0]], False)


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
