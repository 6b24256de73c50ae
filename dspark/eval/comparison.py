"""Several ways to decode the same prompts, side by side."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.config import EvalSection
from dspark.decode.sampling import Sampling
from dspark.decode.speaking import Speaker
from dspark.decode.teacher_forced import estimate, round_starts
from dspark.draft.model import DraftModel
from dspark.errors import PromptError
from dspark.eval.measure import Measurement, Prompts, Texts, compare_greedy, summarise
from dspark.eval.statistics import decoding_gap, teacher_forced_statistics
from dspark.eval.timing import speedup
from dspark.types import Target

DRAFT = "draft"
"""The contender that an evaluation is about."""
Models = tuple[Target[Any], DraftModel]
Decode = Callable[[str, Prompts, Sampling], Texts]
"""What a contender, by its name, writes behind the prompts."""


@dataclass(frozen=True)
class Contender:
    """One way to decode: its name, and what was measured and written at each temperature."""

    name: str
    measurements: tuple[Measurement, ...]
    texts: tuple[Texts, ...]


def compare(
    speakers: Mapping[str, Speaker],
    pair: Models,
    prompts: Sequence[Prompts],
    plan: EvalSection,
    stop_token_ids: tuple[int, ...],
    decode: Decode,
) -> tuple[Contender, ...]:
    """Decode in each way, at each temperature of the plan, the prompts that are its own. The pair's target judges the
    greedy texts of ways that draft: against those of a plain way before them, if there is one, else on their own. The
    way ``DRAFT`` is the pair's and gets what is expected of it.
    Raises: PromptError when every text of a way that drafts stopped at its first token.
    """
    contenders: list[Contender] = []
    plain: list[Texts] = []
    for name, speaker in speakers.items():
        answers: list[Texts] = []
        measurements = []
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
            measurements.append(measurement)
        plain = plain if speaker.is_drafting else answers
        contenders.append(Contender(name, tuple(measurements), tuple(answers)))
    return tuple(contenders)


def expect(measurement: Measurement, pair: Models, prompts: Prompts, texts: Texts, sampling: Sampling) -> Measurement:
    """The measurement with what teacher forcing expects of its draft on the very texts that it decoded, block by block
    where its rounds began. Nothing is added where no block lies in a text.
    """
    both = zip(prompts, texts, strict=True)
    found = [estimate(*pair, ids_T, text.ids_T, sampling, round_starts(text.rounds)) for ids_T, text in both]
    if not any(text.anchors for text in found):
        return measurement
    gap = decoding_gap(found, [text.rounds for text in texts])
    return replace(measurement, teacher_forced=teacher_forced_statistics(found), decoding_gap=gap)
