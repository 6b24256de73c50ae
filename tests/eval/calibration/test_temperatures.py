"""Temperatures of confidences: whose rounds count, what is fitted to what, what the file says, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from dspark.decode.round import Round
from dspark.errors import RecordError
from dspark.eval.calibration.temperatures import (
    GRID,
    Temperatures,
    fit_temperatures,
    product_calibrations,
    read_temperatures,
    split_by_prompt,
)

TRUE = (2.0, 0.5, 3.0)


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def drawn_rounds(num: int, seed: int = 0, stops: int = 0) -> list[Round]:
    """Rounds whose slot k is accepted with probability sigmoid(logit / TRUE[k]), and some that end in a stop token."""
    generator = torch.Generator().manual_seed(seed)
    logits_NK = 3 * torch.randn(num, len(TRUE), generator=generator) + 1
    is_kept_NK = torch.rand(logits_NK.shape, generator=generator) < (logits_NK / torch.tensor(TRUE)).sigmoid()
    accepted = is_kept_NK.cumprod(1).sum(1).tolist()
    rounds = [Round(3, a, a + 1, False, tuple(row)) for a, row in zip(accepted, logits_NK.tolist(), strict=True)]
    stopped = [Round(1, 1, 1, True, (3.0, 9.0, -9.0)), Round(2, 2, 2, True, (3.0, 3.0, -9.0))]
    return rounds + stopped * stops


def products(rounds: list[Round], temperatures: tuple[float, ...], slot: int) -> list[tuple[float, bool]]:
    """The definition: of every round that verified the slot, the product up to it and whether all were accepted."""
    return [
        (
            math.prod(sigmoid(r.confidence_logits[k] / temperatures[k]) for k in range(slot + 1)),
            r.accepted_drafts > slot,
        )
        for r in rounds
        if slot < r.num_proposed
    ]


def ece(pairs: list[tuple[float, bool]]) -> float:
    """With 20 bins, in loops."""
    gaps = [0.0] * 20
    for product, is_accepted in pairs:
        gaps[min(int(product * 20), 19)] += product - is_accepted
    return sum(map(abs, gaps)) / len(pairs)


def test_temperatures_that_made_the_outcomes_are_found_and_the_products_are_believed() -> None:
    rounds, others = drawn_rounds(6000), drawn_rounds(6000, seed=1)
    found = fit_temperatures(rounds)
    assert found == pytest.approx(TRUE, rel=0.3)
    before, after = (product_calibrations(others, t) for t in ((1.0,) * 3, found))
    assert len(before) == len(after) == 4
    for slot in range(3):
        assert after[slot].ece < min(0.03, before[slot].ece)
    assert after[-1].ece < before[-1].ece / 3
    assert before[0].auroc == after[0].auroc, "one temperature moves all confidences of a slot alike"
    assert (after[1].auroc or 0) > (before[1].auroc or 1), "products of calibrated confidences are ranked better"


SURE_AND_SURER = [
    Round(1, int(n < kept), 1 + int(n < kept), False, (x,)) for x, kept in ((2.5, 9), (4.0, 7)) for n in range(9)
]
"""In the last two bins, where the surer ones are accepted less often."""


@pytest.mark.parametrize("rounds", [*(drawn_rounds(80, seed, stops=1) for seed in (2, 3)), SURE_AND_SURER], ids=len)
def test_every_temperature_is_the_best_of_the_grid_for_its_product_with_the_ones_before_it(rounds: list[Round]) -> None:
    found = fit_temperatures(rounds)
    for slot in range(len(found)):
        errors = [ece(products(rounds, (*found[:slot], value), slot)) for value in GRID]
        assert ece(products(rounds, found, slot)) == pytest.approx(min(errors), abs=1e-12)
    assert GRID[0] == 1
    assert (min(GRID), max(GRID)) == pytest.approx((0.2, 5))


def test_of_equal_temperatures_the_one_nearest_to_1_is_taken() -> None:
    certain = [Round(1, a, a + 1, False, (math.inf,)) for a in (0, 1)]
    assert fit_temperatures(certain) == (1.0,)


def test_products_are_measured_as_they_are_defined() -> None:
    rounds, temperatures = drawn_rounds(300, seed=3, stops=3), (0.7, 2.0, 1.3)
    found = product_calibrations(rounds, temperatures)
    pairs = [products(rounds, temperatures, slot) for slot in range(3)]
    pooled = [pair for of_slot in pairs for pair in of_slot]
    for calibration, of in zip(found, [*pairs, pooled], strict=True):
        assert calibration.num_slots == len(of)
        assert calibration.ece == pytest.approx(ece(of))
        assert calibration.mean_confidence == pytest.approx(sum(product for product, _ in of) / len(of))
        assert calibration.acceptance == pytest.approx(sum(kept for _, kept in of) / len(of))
    assert [c.num_slots for c in found] == [306, 303, 300, 909], "behind an accepted stop token nothing was verified"


def test_all_texts_of_a_prompt_are_in_one_half_and_the_seed_decides_which() -> None:
    texts = [((f"task {n % 3}", n // 6), (Round(1, 0, 1, False, (float(n),)),)) for n in range(60)]
    halves = split_by_prompt(texts, 1)
    assert sorted(rounds[0].confidence_logits[0] for half in halves for rounds in half) == list(range(60))
    prompts = [{prompt for prompt, rounds in texts if rounds in half} for half in halves]
    assert not prompts[0] & prompts[1]
    assert [len(found) for found in prompts] == [15, 15]
    assert split_by_prompt(texts, 1) == halves != split_by_prompt(texts, 2)
    assert split_by_prompt(list(reversed(texts)), 1)[0] == halves[0][::-1], "whatever their order"
    with pytest.raises(ValueError, match="texts of 1 prompts, expected two or more"):
        split_by_prompt(texts[:1] * 9, 1)


def test_the_file_is_the_one_that_sglang_reads(tmp_path: Path) -> None:
    path = tmp_path / "temperatures.json"
    found = Temperatures(
        temperatures=(1.5, 0.1 + 0.2), dataset="heldout", num_samples=7, ece_before=(0.1, 0.2), ece_after=(0.0, 0.1)
    )
    path.write_text(found.model_dump_json())
    assert json.loads(path.read_text()) == {
        "temperatures": [1.5, 0.1 + 0.2],
        "dataset": "heldout",
        "num_samples": 7,
        "ece_before": [0.1, 0.2],
        "ece_after": [0.0, 0.1],
    }
    assert read_temperatures(path, 2) == found
    with pytest.raises(RecordError, match="2 temperatures for a draft of 8 slots"):
        read_temperatures(path, 8)


@pytest.mark.parametrize("values", ["[]", "[0]", "[-1.0]", "[Infinity]", "[NaN]", '["a"]', "1", '[1.0], "other": 1'])
def test_a_file_with_what_is_no_temperature_is_refused(tmp_path: Path, values: str) -> None:
    path = tmp_path / "temperatures.json"
    path.write_text(f'{{"temperatures": {values}}}')
    with pytest.raises(RecordError, match=r"temperatures.json: not temperatures \("):
        read_temperatures(path, 1)


def test_rounds_that_say_too_little_are_refused() -> None:
    good = Round(2, 1, 2, False, (0.1, 0.2))
    for rounds in ([], [Round(2, 1, 2, False, ())], [good, Round(1, 1, 2, False, (0.1,))]):
        with pytest.raises(ValueError, match="expected those of a draft with a confidence head"):
            fit_temperatures(rounds)
    for rounds in ([Round(1, 1, 1, True, (0.1, 0.2))], [good, Round(2, 1, 2, False, (0.1, math.nan))]):
        with pytest.raises(ValueError, match="not a number, or a slot was never verified"):
            fit_temperatures(rounds)
