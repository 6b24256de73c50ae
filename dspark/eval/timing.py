"""How long texts took: what a user waits for, where the time went, and what a draft should have gained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

import torch

from dspark.decode.round import Round


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


@dataclass(frozen=True)
class Spread:
    """Of one number over texts. With fewer than 100 texts the 99th percentile is their largest."""

    mean: float
    median: float
    p99: float


@dataclass(frozen=True)
class Timing:
    """``first_token``: seconds from a prompt's turn to its text's first token. ``time_per_token`` (TPOT): a text's
    further seconds by its further tokens; None when no text has any. ``output_tokens_per_second``: tokens of all texts
    by the time that the machine spent on them, prefill included. ``phase_seconds``: of all texts together; what is
    neither prefill, draft nor target is "other".
    """

    first_token: Spread
    time_per_token: Spread | None
    output_tokens_per_second: float
    phase_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Speedup:
    """Plain decoding's time per token over a draft's, prefill left out, and what explains it.

    ``predicted``: the acceptance length over what a round costs, in steps of plain decoding; only the time in draft and
    target counts. ``measured`` is ``predicted`` times ``kept_share`` times ``working_share``, an identity: the share of
    the committed tokens that are in the texts (the rest lies beyond max_new_tokens), and the share of the time spent in
    draft and target.
    """

    predicted: float
    measured: float
    kept_share: float
    working_share: float


def timing_statistics(texts: Sequence[DecodedText]) -> Timing:
    """Of at least one text. Source: the definitions of TTFT and TPOT are those of SGLang's and vLLM's benchmarks."""
    paces = [(t.seconds - t.first_token_seconds) / (t.num_tokens - 1) for t in texts if t.num_tokens > 1]
    phases, first = phase_sums(texts), spread([text.first_token_seconds for text in texts])
    tokens_per_second = sum(text.num_tokens for text in texts) / sum(phases.values())
    return Timing(first, spread(paces) if paces else None, tokens_per_second, phases)


def phase_sums(texts: Sequence[DecodedText]) -> dict[str, float]:
    """Seconds of all texts, by phase, in the order in which the phases first came."""
    names = dict.fromkeys(name for text in texts for name in text.phase_seconds)
    return {name: sum(text.phase_seconds.get(name, 0.0) for text in texts) for name in names}


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    most = max(values) if len(values) < 100 else quantiles(values, n=100)[-1]
    return Spread(fmean(values), median(values), most)


def speedup(plain: Sequence[DecodedText], drafted: Sequence[DecodedText], num_committed: int) -> Speedup | None:
    """Of the same prompts; ``num_committed`` tokens came from the draft's rounds. None when there was nothing to gain:
    no round, or no plain token behind the first.
    """
    (num_plain, before), (num_drafted, after) = _decoding(plain), _decoding(drafted)
    if not (num_committed and num_plain and num_drafted):
        return None
    per_token, whole = sum(before.values()) / num_plain, sum(after.values())
    working = whole - after.get("other", 0.0)
    predicted, measured = num_committed * per_token / working, per_token * num_drafted / whole
    return Speedup(predicted, measured, kept_share=num_drafted / num_committed, working_share=working / whole)


def _decoding(texts: Sequence[DecodedText]) -> tuple[int, dict[str, float]]:
    """The tokens behind the first ones, and the seconds that they took, by phase."""
    phases = phase_sums(texts)
    phases.pop("prefill", None)
    return sum(max(text.num_tokens - 1, 0) for text in texts), phases
