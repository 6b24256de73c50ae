"""What is optimised, and what changes from step to step."""

import math

import pytest
import torch
from training_run import make_run

from dspark.config import ObjectiveSection
from dspark.train.optimizer import acceptance_weight, adamw, learning_rate, set_learning_rate
from dspark.train.setup import fresh_draft


def test_the_tables_of_the_target_are_not_optimised_and_norms_do_not_decay(tmp_path) -> None:
    run = make_run(tmp_path, weight_decay=0.1)
    draft = fresh_draft(run.draft, run.seed)
    table_VD = torch.randn(run.draft.vocab_size, run.draft.hidden_size)
    draft.bind(table_VD, table_VD.clone())
    groups = adamw(draft, run.train).param_groups
    found = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    expected = {id(parameter): 0.1 if parameter.ndim > 1 else 0.0 for parameter in draft.parameters()}
    assert found == expected
    assert not any(name.startswith(("embedding", "head")) for name in draft.state_dict())


def test_the_rate_rises_to_its_peak_and_falls_along_a_cosine_to_the_minimum(tmp_path) -> None:
    train = make_run(tmp_path, steps=100, warmup_ratio=0.1, learning_rate=1.0, min_learning_rate_ratio=0.1).train
    rates = [learning_rate(step, train) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[99] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 89 / 90)))
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize("warmup_ratio", [0.0, 1.0])
def test_a_run_may_be_all_warm_up_or_none(tmp_path, warmup_ratio: float) -> None:
    train = make_run(tmp_path, steps=4, warmup_ratio=warmup_ratio, learning_rate=1.0).train
    rates = [learning_rate(step, train) for step in range(4)]
    assert rates == (
        [0.25, 0.5, 0.75, 1.0] if warmup_ratio else pytest.approx([1.0, 0.853553, 0.5, 0.146447], rel=1e-5)
    )


def test_a_rate_reaches_every_group(tmp_path) -> None:
    run = make_run(tmp_path)
    optimizer = adamw(fresh_draft(run.draft, 0), run.train)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_the_acceptance_term_comes_in_over_its_warm_up() -> None:
    section = ObjectiveSection(acceptance_length=0.5, acceptance_warmup_steps=4)
    assert [acceptance_weight(step, section) for step in (0, 1, 4, 9)] == [0.0, 0.125, 0.5, 0.5]
    assert acceptance_weight(0, ObjectiveSection(acceptance_length=0.5, acceptance_warmup_steps=0)) == 0.5
