"""Sequential temperature scaling: a temperature a slot, so that products of confidences are shares that survive."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from dspark.config import Section, read_back
from dspark.decode.round import Round
from dspark.errors import RecordError
from dspark.eval.confidence import Calibration, calibration

NUM_BINS = 20
"""Of the expected calibration error of products, as in DeepSpec (dspark.md 7.1)."""
GRID = sorted((5 ** (step / 60) for step in range(-60, 61)), key=lambda temperature: max(temperature, 1 / temperature))
"""From 1/5 to 5, even in the logarithm, those nearest to 1 first."""
PromptRounds = tuple[tuple[str, int], tuple[Round, ...]]
"""A prompt (its task and its place there), and the rounds of a text that was decoded after it."""


class Temperatures(Section):
    """SGLang's file for --speculative-dspark-confidence-sts-path: slot k's logit is divided by ``temperatures[k]``.
    ``num_samples``: rounds that they were fitted on. ``ece_before``, ``ece_after``: of every slot's cumulative product,
    on other rounds.
    """

    temperatures: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(min_length=1)
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()


def split_by_prompt(texts: Sequence[PromptRounds], seed: int) -> list[list[tuple[Round, ...]]]:
    """Two halves by chance, texts to fit on and texts to test on. All that was decoded after a prompt is in one of
    them, for its texts are alike. Raises: ValueError for fewer than two prompts.
    """
    prompts = sorted({prompt for prompt, _ in texts})
    if len(prompts) < 2:
        raise ValueError(f"drafted texts of {len(prompts)} prompts, expected two or more; evaluate more prompts")
    fitted = random.Random(seed).sample(prompts, len(prompts) // 2)
    return [[rounds for prompt, rounds in texts if (prompt in fitted) == is_fitted] for is_fitted in (True, False)]


def fit_temperatures(rounds: Sequence[Round]) -> tuple[float, ...]:
    """A temperature for every slot, from left to right: of ``GRID`` the one with the least expected calibration error
    of the cumulative product up to the slot, earlier slots as they were fitted; of equal ones the nearest to 1.

    Slot k's product is compared with "slots 0 to k were accepted" over all rounds that verified slot k, whether or not
    they accepted the slots before it, as SGLang's recorder has it; what an accepted stop token cut off does not count.
    Raises: ValueError for rounds whose blocks differ in length, without confidences or with NaN, or with a slot that no
    round verified. Source: DSpark (arXiv 2607.05147), sequential temperature scaling (specs/dspark.md 6.2).
    """
    logits_NK, is_verified_NK, is_accepted_NK = _outcomes(rounds)
    grid_G, product_N, fitted = torch.tensor(GRID, dtype=torch.float64), torch.ones(len(rounds)).double(), []
    for logits_N, is_verified_N, is_accepted_N in zip(logits_NK.T, is_verified_NK.T, is_accepted_NK.T, strict=True):
        product_GN = product_N * torch.sigmoid(logits_N / grid_G[:, None])
        best = int(_errors(product_GN[:, is_verified_N], is_accepted_N[is_verified_N]).argmin())
        product_N = product_GN[best]
        fitted.append(GRID[best])
    return tuple(fitted)


def product_calibrations(rounds: Sequence[Round], temperatures: Sequence[float]) -> list[Calibration]:
    """The cumulative product up to each slot against "all were accepted", over the rounds that ``fit_temperatures``
    counts; and, the last, all slots pooled. Raises: ValueError as there.
    """
    logits_NK, is_verified_NK, is_accepted_NK = _outcomes(rounds)
    odds_NK = torch.sigmoid(logits_NK / torch.tensor(temperatures, dtype=torch.float64)).cumprod(1).logit()
    parts = [*(slice(k, k + 1) for k in range(len(temperatures))), slice(None)]
    triples = [(odds_NK[:, part], is_accepted_NK[:, part], is_verified_NK[:, part]) for part in parts]
    return [calibration(odds[counted], is_accepted[counted], NUM_BINS) for odds, is_accepted, counted in triples]


def read_temperatures(path: Path, block_size: int) -> Temperatures:
    """Raises: RecordError for a file of another form, or for a block of another size."""
    found = read_back(Temperatures, path.read_bytes(), path, "run dspark calibrate", "not temperatures ({})")
    if (num := len(found.temperatures)) != block_size:
        hint = "run dspark calibrate for this draft"
        raise RecordError(f"{path}: {num} temperatures for a draft of {block_size} slots; {hint}")
    return found


def _outcomes(rounds: Sequence[Round]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, whether the slot was verified, and whether it and all before it were accepted."""
    sizes = {len(counts.confidence_logits) for counts in rounds}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"rounds with {sorted(sizes)} confidences; expected those of a draft with a confidence head")
    logits_NK = torch.tensor([counts.confidence_logits for counts in rounds], dtype=torch.float64)
    slots_K = torch.arange(logits_NK.shape[1])
    is_verified_NK = slots_K < torch.tensor([[counts.num_proposed] for counts in rounds])
    if logits_NK.isnan().any() or not is_verified_NK.any(0).all():
        raise ValueError("a confidence is not a number, or a slot was never verified; evaluate more prompts")
    return logits_NK, is_verified_NK, slots_K < torch.tensor([[counts.accepted_drafts] for counts in rounds])


def _errors(product_GN: torch.Tensor, is_accepted_N: torch.Tensor) -> torch.Tensor:
    """``Calibration.ece`` of every row."""
    place_GN, gap_GN = (product_GN * NUM_BINS).long().clamp(max=NUM_BINS - 1), product_GN - is_accepted_N.double()
    gap_GB = product_GN.new_zeros(len(product_GN), NUM_BINS).scatter_add(1, place_GN, gap_GN)
    return gap_GB.abs().sum(1) / len(is_accepted_N)
