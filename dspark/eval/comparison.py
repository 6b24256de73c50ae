"""Several ways to decode the same prompts, side by side."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dspark.config import EvalSection
from dspark.decode.drafter import Draft
from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.eval.measure import DecodedText, Each, Measurement, compare_greedy, decode_prompts, summarise
from dspark.types import Target

Watch = Callable[[str, float, int], AbstractContextManager[Each]]
"""Takes a contender's name, a temperature and how many texts there are to be; gives a context for them."""


@dataclass(frozen=True)
class Contender:
    """One way to decode: its name, what was measured at each temperature, and its texts at the first temperature."""

    name: str
    measurements: tuple[Measurement, ...]
    texts: tuple[DecodedText, ...]


def compare(
    open_target: Callable[[tuple[int, ...]], Target[Any]],
    drafts: Mapping[str, Draft | None],
    prompts: Sequence[torch.Tensor],
    plan: EvalSection,
    random: tuple[tuple[int, ...], int],
    watch: Watch,
) -> tuple[Contender, ...]:
    """Decode the prompts with each draft (None is plain decoding) at each temperature of the plan.
    ``open_target`` gives the target with the layers tapped that a draft reads; ``random`` is (stop_token_ids, seed).
    Greedy texts are compared with plain decoding's, if that comes before them.
    """
    stop_token_ids, seed = random
    contenders: list[Contender] = []
    plain: list[tuple[DecodedText, ...]] = []
    for name, draft in drafts.items():
        target = open_target(draft.config.target_layer_ids if isinstance(draft, DraftModel) else ())
        answers: list[tuple[DecodedText, ...]] = []
        measurements = []
        for temperature in plan.temperatures:
            sampling = Sampling(temperature, plan.max_new_tokens, stop_token_ids, plan.top_k, plan.top_p)
            with watch(name, temperature, len(prompts)) as each:
                texts = decode_prompts(target, draft, prompts, sampling, seed, each)
            measurement = summarise(", ".join(plan.tasks), temperature, texts)
            if plain and sampling.is_greedy:
                equality = compare_greedy(target, prompts, texts, plain[len(answers)])
                measurement = replace(measurement, equality=equality)
            answers.append(texts)
            measurements.append(measurement)
        plain = answers if draft is None else plain
        contenders.append(Contender(name, tuple(measurements), answers[0]))
    return tuple(contenders)


def summary(contenders: Sequence[Contender]) -> str:
    """The result at the first temperature in a sentence."""
    plain = contenders[0].measurements[0]
    drafted = [(c.name, a) for c in contenders if (a := c.measurements[0].acceptance) is not None]
    lengths = [f"{name} {a.mean_acceptance_length:.2f}" for name, a in drafted]
    return (
        f"Tokens a round on {plain.num_prompts} held-out prompts at temperature {plain.temperature:g}, "
        f"bonus token included: {', '.join(lengths)}."
    )
