"""Decode a task's prompts with a draft (or plainly) and count: acceptance, speed, texts that run in circles."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dspark.config import EvalSection
from dspark.data.loops import ends_in_loop
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, Uniforms, row_uniforms
from dspark.decode.speaking import Speaker, Stopwatch
from dspark.decode.teacher_forced import estimate, round_starts
from dspark.draft.model import DraftModel
from dspark.errors import PromptError
from dspark.eval import statistics
from dspark.eval.confidence import ConfidenceStatistics, confidence_statistics
from dspark.eval.timing import DecodedText, Speedup, Timing, speedup, timing_statistics
from dspark.types import Target

is_looping = partial(ends_in_loop, copies=4, least_tokens=48, longest_run=64)
"""Whether a text ends in a loop. A text that left its loop, if only to stop, is not degenerate as a whole."""
TIE_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""By the target's dtype: logits closer than this change places by rounding, when they are summed in another order."""


WARM_UP_TOKENS = 4
ROWS = 256
"""Rows of logits that are looked at together; a vocabulary is wide."""


Prompts = Sequence[Tensor]
"""Ids, int64 [T] each."""
Texts = Sequence[DecodedText]
DRAFT = "draft"
"""The contender that an evaluation is about."""
Models = tuple[Target[Any], DraftModel]
Decode = Callable[[str, Prompts, Sampling], Texts]
"""What a contender, by its name, writes behind the prompts."""


@dataclass(frozen=True)
class Difference:
    """Where one prompt's greedy text first leaves plain decoding's, at the first fault if one is no tie; prompts and
    positions (of new tokens) from 0.
    ``gap``: how far below the target's largest logit that of the text's token lies there. ``is_tie``: rounding can
    explain all of them, for each is smaller than ``tie_gap``. A text that ends elsewhere is never a tie.
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
    acceptance: statistics.AcceptanceStatistics | None
    timing: Timing
    confidence: ConfidenceStatistics | None = None
    equality: GreedyEquality | None = None
    speedup: Speedup | None = None
    teacher_forced: statistics.TeacherForcedStatistics | None = None
    decoding_gap: statistics.DecodingGap | None = None

    @property
    def num_looping(self) -> int:
        """Texts that end in a loop."""
        return round(self.looping_share * self.num_prompts)


def compare(
    speakers: Mapping[str, Speaker],
    pair: Models,
    prompts: Sequence[Prompts],
    plan: EvalSection,
    stop_token_ids: tuple[int, ...],
    decode: Decode,
) -> dict[str, list[Measurement]]:
    """Decode in each way, at each temperature of the plan, the prompts that are its own. The pair's target judges the
    greedy texts of ways that draft: against those of a plain way before them, if there is one, else on their own. The
    way ``DRAFT`` is the pair's and gets what is expected of it.
    Returns: of every way its measurements, one a temperature.
    Raises: PromptError when every text of a way that drafts stopped at its first token.
    """
    measured: dict[str, list[Measurement]] = {}
    plain: list[Texts] = []
    for name, speaker in speakers.items():
        measured[name], answers = [], list[Texts]()
        for temperature, ids in zip(plan.temperatures, prompts, strict=True):
            sampling = Sampling(temperature, plan.max_new_tokens, stop_token_ids, plan.top_k, plan.top_p)
            texts = decode(name, ids, sampling)
            measurement = summarise(", ".join(plan.tasks), temperature, texts)
            before = plain[len(answers)] if plain else None
            if speaker.is_drafting:
                if not measurement.acceptance:
                    found = f"all {len(ids)} texts stopped at their first token"
                    raise PromptError(f"{found}; use prompts that the target answers")
                equality = compare_greedy(pair[0], ids, texts, sampling, before) if sampling.is_greedy else None
                gain = speedup(before, texts, measurement.acceptance.num_tokens) if before else None
                measurement = replace(measurement, equality=equality, speedup=gain)
            if name == DRAFT:
                measurement = expect(measurement, pair, ids, texts, sampling)
            answers.append(texts)
            measured[name].append(measurement)
        plain = plain if speaker.is_drafting else answers
    return measured


def expect(measurement: Measurement, pair: Models, prompts: Prompts, texts: Texts, sampling: Sampling) -> Measurement:
    """The measurement with what teacher forcing expects of its draft on the very texts that it decoded, block by block
    where its rounds began. Nothing is added where no block lies in a text.
    """
    both = zip(prompts, texts, strict=True)
    found = [estimate(*pair, ids_T, text.ids_T, sampling, round_starts(text.rounds)) for ids_T, text in both]
    if not any(text.anchors for text in found):
        return measurement
    gap = statistics.decoding_gap(found, [text.rounds for text in texts])
    return replace(measurement, teacher_forced=statistics.teacher_forced_statistics(found), decoding_gap=gap)


def decode_prompts(speaker: Speaker, prompts: Prompts, sampling: Sampling, seed: int) -> list[DecodedText]:
    """Decode the prompts (int64 [T]) one after another. Raises: as ``decode_batches``."""
    batches = ([number] for number in range(len(prompts)))
    return [text for (text,) in decode_batches(speaker, prompts, sampling, seed, batches)]


def decode_batches(
    speaker: Speaker, prompts: Prompts, sampling: Sampling, seed: int, batches: Iterable[Sequence[int]]
) -> Iterator[list[DecodedText]]:
    """Decode the prompts (int64 [T]) of these numbers, those of a batch in step.

    Prompt i draws from generator (seed, i), so the texts do not depend on which other prompts are measured. On a GPU
    some tokens are decoded before the first text, for what is compiled or captured once.
    Raises: PromptError for a text without a token to draw from.
    """
    is_warm = not torch.cuda.is_available()
    for numbers in batches:
        some = [prompts[n] for n in numbers]
        if not is_warm:
            few = replace(sampling, max_new_tokens=min(WARM_UP_TOKENS, sampling.max_new_tokens))
            listen(speaker, some, few, [row_uniforms(seed, n) for n in numbers])
            is_warm = True
        yield listen(speaker, some, sampling, [row_uniforms(seed, n) for n in numbers])


def listen(speaker: Speaker, prompts: Prompts, sampling: Sampling, uniforms: Sequence[Uniforms]) -> list[DecodedText]:
    """The texts of a batch, with their clocks."""
    stopwatch, places = Stopwatch(), range(len(prompts))
    ids: list[list[int]] = [[] for _ in places]
    rounds: list[list[Round]] = [[] for _ in places]
    first, last = [0.0] * len(prompts), [0.0] * len(prompts)
    for news in speaker(prompts, sampling, uniforms, stopwatch):
        now = stopwatch.seconds()
        for row, new_ids, counts in news:
            first[row], last[row] = first[row] or now, now if new_ids else last[row]
            ids[row] += new_ids
            rounds[row] += [] if counts is None else [counts]
    phases = {name: seconds / len(prompts) for name, seconds in stopwatch.phase_seconds.items()}
    rows = zip(ids, rounds, first, last, strict=True)
    return [DecodedText(torch.tensor(i), tuple(r), end, is_looping(i), begin, phases) for i, r, begin, end in rows]


def summarise(task: str, temperature: float, texts: Texts) -> Measurement:
    """Counts over all texts of a task; without a single round they count as decoded plainly."""
    rounds = [text.rounds for text in texts]
    judged = [counts for text in rounds for counts in text if counts.confidence_logits and counts.num_proposed]
    sober = [text.rounds for text in texts if not text.is_looping and text.rounds]
    lengths = [counts.acceptance_length for text in sober for counts in text]
    sober_length = sum(lengths) / len(lengths) if lengths else None
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
        acceptance=statistics.acceptance_statistics(rounds) if any(rounds) else None,
        timing=timing,
        confidence=confidence_statistics(judged) if judged else None,
    )


@torch.no_grad()
def compare_greedy(
    target: Target[Any], prompts: Prompts, texts: Texts, sampling: Sampling, plain_texts: Texts | None = None
) -> GreedyEquality:
    """Which greedy texts of the prompts (int64 [T]) are not plain decoding's: those that differ from the plain texts,
    or, without these, any in which a token is not the target's arg-max behind the text before it, or that does not end
    where it has to. What differs is judged as a whole either way, in one pass of the target over it.
    """
    tie_gap = TIE_GAPS.get(target.head_VD.dtype, max(TIE_GAPS.values()))
    differences = []
    for number, (prompt_ids_T, text) in enumerate(zip(prompts, texts, strict=True)):
        ids, plain = text.ids_T.tolist(), plain_texts[number].ids_T.tolist() if plain_texts else None
        if ids == plain:
            continue
        found = _departure(target, prompt_ids_T, text.ids_T, sampling, tie_gap)
        if found is None and plain is not None:  # it is plain decoding that took the other of two equal tokens
            pairs = enumerate(zip(ids, plain, strict=False))
            found = next((place for place, pair in pairs if pair[0] != pair[1]), min(len(ids), len(plain))), 0.0, True
        if found is not None:
            differences.append(Difference(number, *found))
    faults = sum(not difference.is_tie for difference in differences)
    return GreedyEquality(len(differences), faults, tie_gap, tuple(differences))


def _departure(
    target: Target[Any], prompt_ids_T: Tensor, ids_T: Tensor, sampling: Sampling, tie_gap: float
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
    stops = [n for n, new_id in enumerate(ids_T.tolist()) if new_id in sampling.stop_token_ids]
    end = stops[0] if stops else sampling.max_new_tokens - 1
    off = [n for n, gap in enumerate(gaps) if not gap <= 0]  # also what is no number
    wrong = [n for n in off if not gaps[n] < tie_gap]
    if not wrong and end != len(ids_T) - 1:
        wrong = [min(end, len(ids_T) - 1)]
    place = next(iter(wrong or off), None)
    return None if place is None else (place, gaps[place], not wrong)
