"""Several ways to decode the same prompts, side by side."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from dspark.config import EvalSection
from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.eval.measure import DecodedText, Measurement, decode_prompts, summarise
from dspark.types import Target

Progress = Callable[[str, int], AbstractContextManager[Callable[..., None]]]
"""Takes a name and a total, gives a context whose value is called after each step."""


@dataclass(frozen=True)
class Contender:
    """One way to decode: its name, what was measured at each temperature, and its texts at the first temperature."""

    name: str
    measurements: tuple[Measurement, ...]
    texts: tuple[DecodedText, ...]


def compare(
    open_target: Callable[[tuple[int, ...]], Target[Any]],
    drafts: Mapping[str, DraftModel | None],
    prompts: Sequence[torch.Tensor],
    plan: EvalSection,
    random: tuple[tuple[int, ...], int],
    progress: Progress,
) -> tuple[Contender, ...]:
    """Decode the prompts with each draft (None is plain decoding) at each temperature of the plan.
    ``open_target`` gives the target with the layers tapped that a draft reads; ``random`` is (stop_token_ids, seed).
    """
    stop_token_ids, seed = random
    contenders = []
    for name, draft in drafts.items():
        target = open_target(draft.config.target_layer_ids if draft else ())
        answers = []
        for temperature in plan.temperatures:
            sampling = Sampling(temperature, plan.max_new_tokens, stop_token_ids, plan.top_k, plan.top_p)
            with progress(f"{name}, T = {temperature:g}", len(prompts)) as advance:
                answers.append(decode_prompts(target, draft, prompts, sampling, seed, advance))
        pairs = zip(plan.temperatures, answers, strict=True)
        measurements = tuple(summarise(", ".join(plan.tasks), temperature, texts) for temperature, texts in pairs)
        contenders.append(Contender(name, measurements, answers[0]))
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
