"""What is optimised, and what changes from step to step."""

import math

import pytest
import torch
from training_run import make_run

from dspark.config import ObjectiveSection
from dspark.train.optimizer import (
    EMA,
    MuonAndAdamW,
    acceptance_weight,
    adamw,
    build_optimizer,
    keep_average,
    learning_rate,
    moment_names,
    set_learning_rate,
)
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


def test_wsd_rises_stays_and_falls_in_a_line_over_the_last_part(tmp_path) -> None:
    fields = {"schedule": "wsd", "warmup_ratio": 0.2, "learning_rate": 1.0, "min_learning_rate_ratio": 0.2}
    train = make_run(tmp_path, steps=20, decay_ratio=0.25, **fields).train
    rates = [learning_rate(step, train) for step in range(20)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 13, 0.84, 0.68, 0.52, 0.36])
    never = make_run(tmp_path, steps=20, decay_ratio=0.0, **fields).train
    assert [learning_rate(step, never) for step in range(4, 20)] == [1.0] * 16


def test_wsd_falls_behind_the_warm_up_only(tmp_path) -> None:
    fields = {"schedule": "wsd", "learning_rate": 1.0, "decay_ratio": 1.0}
    train = make_run(tmp_path, steps=4, warmup_ratio=0.5, **fields).train
    assert [learning_rate(step, train) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]
    train = make_run(tmp_path, steps=4, warmup_ratio=1.0, **fields).train
    assert [learning_rate(step, train) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_rate_reaches_every_group(tmp_path, kind: str) -> None:
    run = make_run(tmp_path, optimizer=kind)
    optimizer = build_optimizer(fresh_draft(run.draft, 0), run.train)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25] * (2 if kind == "adamw" else 3)


def test_a_run_is_optimised_by_fused_adamw_unless_it_asks_for_another(tmp_path) -> None:
    run = make_run(tmp_path)
    optimizer = build_optimizer(fresh_draft(run.draft, 0), run.train)
    assert type(optimizer) is torch.optim.AdamW
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_muon_gets_the_matrices_of_the_layers_and_fc_and_nothing_else(tmp_path, head: str) -> None:
    run = make_run(tmp_path, optimizer="muon", weight_decay=0.1)
    draft = fresh_draft(run.draft.model_copy(update={"markov_head_type": head}), 0)
    optimizer = build_optimizer(draft, run.train)
    hidden = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    expected = {"fc.weight"} | {
        name for name, _ in draft.named_parameters() if name.startswith("layers.") and name.split(".")[-2] in hidden
    }
    assert len(expected) == 1 + 2 * len(hidden)
    kept, decays = moment_names(optimizer), [group["weight_decay"] for group in optimizer.param_groups]
    assert {name for name, p in draft.named_parameters() if kept[p] == ("momentum_buffer",)} == expected
    assert kept.keys() == set(draft.parameters())
    assert decays == [0.1, 0.1, 0.0]


def gradients(draft, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in draft.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_and_adamw_move_as_torchs_two_do_apart_and_go_on_from_a_loaded_state(tmp_path) -> None:
    run = make_run(tmp_path, optimizer="muon", weight_decay=0.1)
    draft, twin = fresh_draft(run.draft, 0), fresh_draft(run.draft, 0)
    optimizer = build_optimizer(draft, run.train)
    is_hidden = [kept == ("momentum_buffer",) for kept in map(moment_names(optimizer).get, draft.parameters())]
    pairs = list(zip(twin.parameters(), is_hidden, strict=True))
    decays = {"params": [p for p, hidden in pairs if not hidden and p.ndim > 1]}
    plain = {"params": [p for p, hidden in pairs if p.ndim < 2], "weight_decay": 0.0}
    muon = torch.optim.Muon(
        [p for p, hidden in pairs if hidden], lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    apart = [muon, torch.optim.AdamW([decays, plain], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            optimizer = build_optimizer(draft, run.train)
            optimizer.load_state_dict(state)
        for each in (optimizer, *apart):
            set_learning_rate(each, 1e-3 * (step + 1))
        gradients(draft, step)
        gradients(twin, step)
        optimizer.step()
        for each in apart:
            each.step()
    assert isinstance(optimizer, MuonAndAdamW)
    wanted = twin.state_dict()
    assert [name for name, tensor in draft.state_dict().items() if not torch.equal(tensor, wanted[name])] == []
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in draft.parameters())


def test_muon_moves_a_matrix_a_fifth_of_the_rate(tmp_path) -> None:
    """In root mean square, whatever its shape: as AdamW about does."""
    run = make_run(tmp_path, optimizer="muon")
    draft = fresh_draft(run.draft, 0)
    optimizer = build_optimizer(draft, run.train)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    gradients(draft, 0)
    optimizer.step()
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight", "layers.1.mlp.down_proj.weight"):
        moved = (draft.state_dict()[name] - before[name]).pow(2).mean().sqrt() / run.train.learning_rate
        assert 0.15 < moved < 0.25, name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_average_starts_at_the_first_move_and_follows_every_move(tmp_path, kind: str) -> None:
    run = make_run(tmp_path, optimizer=kind)
    draft = fresh_draft(run.draft, 0)
    optimizer = build_optimizer(draft, run.train)
    keep_average(optimizer, 0.75)
    wanted: list[torch.Tensor] = []
    for step in range(3):
        gradients(draft, step)
        optimizer.step()
        weights = [parameter.detach().double() for parameter in draft.parameters()]
        wanted = [0.75 * a + 0.25 * w for a, w in zip(wanted or weights, weights, strict=True)]
    for parameter, average in zip(draft.parameters(), wanted, strict=True):
        found = optimizer.state[parameter][EMA]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), average, rtol=1e-6, atol=1e-7)


def test_the_acceptance_term_comes_in_over_its_warm_up() -> None:
    section = ObjectiveSection(acceptance_length=0.5, acceptance_warmup_steps=4)
    assert [acceptance_weight(step, section) for step in (0, 1, 4, 9)] == [0.0, 0.125, 0.5, 0.5]
    assert acceptance_weight(0, ObjectiveSection(acceptance_length=0.5, acceptance_warmup_steps=0)) == 0.5
